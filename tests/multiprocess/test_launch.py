"""``launch``: results in rank order, the first failure with its traceback, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import ends, group_of
from in_world import DEADLINE_S, TOLD_S

import mkernel
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.errors import (
    AlreadyInitialized,
    ArgumentError,
    NotInitialized,
    PeerFailure,
    ShapeError,
    Timeout,
    Unsupported,
)
from mkernel.launch import report
from mkernel.settings import Settings
from mkernel.world import lifecycle
from mkernel.world.watchdog import Watchdog

launch = partial(mkernel.launch, timeout_s=DEADLINE_S)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def where(offset: int) -> tuple[int, int, int, int]:
    world = mkernel.world()
    me = world.identity
    return world.rank + offset, world.size, me.node, me.local_rank


def fail_on(rank: int, what: str) -> None:
    world = mkernel.world()
    if world.rank == rank:
        if what == "raise":
            raise KeyError("planted failure")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
    world.barrier()


def fail_unseen() -> None:
    """Rank 0 fails; the others' watchdogs see that it has left, and not yet why."""
    if mkernel.world().rank == 0:
        raise KeyError("planted failure")
    Watchdog._look = lambda self, dead: None  # type: ignore[method-assign]
    mkernel.world().barrier()


def init_again() -> None:
    mkernel.init()


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def report_twice() -> None:
    from mkernel.launch import report

    report("first")
    report("second")


def test_results_come_in_rank_order() -> None:
    results = launch(where, 10, nodes=2, ranks_per_node=2, accelerator="ascend")
    assert results == [(10, 4, 0, 0), (11, 4, 0, 1), (12, 4, 1, 0), (13, 4, 1, 1)]


@pytest.mark.parametrize("rank", [0, 2])
def test_first_failure_is_raised_with_its_traceback(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(KeyError, match="planted failure") as caught:
        launch(fail_on, rank, "raise", ranks_per_node=3, accelerator="ascend")
    assert f"rank {rank}" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)
    assert time.monotonic() - start < TOLD_S


def test_a_rank_that_failed_has_not_merely_left() -> None:
    failures: list[str] = []
    with pytest.raises(KeyError, match="planted failure"):
        launch(tell_failure, ranks_per_node=2, on_report=lambda rank, text: failures.append(text))
    (failure,) = failures
    assert failure.startswith("rank 0 failed: KeyError: 'planted failure' (kept for ")


def tell_failure() -> None:
    try:
        fail_unseen()
    except PeerFailure as error:
        report(str(error))
        raise


def call_wrongly_on_rank_0() -> None:
    rows = torch.ones(64, 64) if mkernel.world().rank else torch.ones(64)
    mkernel.all_gather_gemm(rows, torch.ones(64, 64))


def test_a_wrong_call_on_one_rank_is_the_error_that_launch_raises() -> None:
    """The rank that refuses its own call leaves; the others learn why."""
    with pytest.raises(ShapeError, match="1-D"):
        launch(call_wrongly_on_rank_0, ranks_per_node=2, accelerator="ascend")


@pytest.mark.parametrize(("what", "how"), [("kill", "SIGKILL"), ("exit", "exit code 3")])
def test_dead_rank_is_a_peer_failure(what: str, how: str) -> None:
    start = time.monotonic()
    with pytest.raises(PeerFailure, match=how) as caught:
        launch(fail_on, 1, what, nodes=2, ranks_per_node=2, accelerator="ascend")
    assert caught.value.peer == 1
    assert time.monotonic() - start < TOLD_S


def test_error_that_does_not_unpickle_keeps_its_text() -> None:
    with pytest.raises(mkernel.errors.MkernelError, match="Unpicklable: 1 and 2"):
        launch(raise_unpicklable, accelerator="ascend")


def call_once() -> float:
    """The deadline of the world's waits."""
    mkernel.all_gather_gemm(torch.ones(16, 32), torch.ones(32, 32))
    return mkernel.world().settings.timeout_s


def test_the_kits_deadline_is_no_limit_for_the_start_of_its_worlds() -> None:
    subject = AcceleratorSubject("judged_backends:OpensLate")
    assert subject.launch(call_once, world=(1, 2), timeout_s=2.0) == [2.0, 2.0]


def test_a_backend_that_hangs_as_it_opens_does_not_hang_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank's own deadline comes later: the launcher's does not rely on it."""
    module = sys.modules["mkernel.launch"]  # the function has its name
    monkeypatch.setattr(module, "_JOIN_WAITS", 0)
    monkeypatch.setattr(module, "_BEGIN_S", 5.0)
    began = time.monotonic()
    with pytest.raises(Timeout, match=r"rank [01] .* was not in the world 5 s after the launch"):
        mkernel.launch(
            call_once, ranks_per_node=2, accelerator="judged_backends:NeverOpens", timeout_s=600.0
        )
    assert time.monotonic() - began < 300.0


def test_a_rank_waits_for_one_that_hangs_as_it_joins_up_to_the_deadline_of_the_join() -> None:
    settings = Settings(join_timeout_s=3.0, timeout_s=600.0)
    began = time.monotonic()
    with pytest.raises(Timeout, match=r"within (3|[0-2](\.\d+)?) s"):
        mkernel.launch(
            call_once, ranks_per_node=2, accelerator="judged_backends:NeverOpens", settings=settings
        )
    assert time.monotonic() - began < TOLD_S


def test_second_init_is_refused() -> None:
    with pytest.raises(AlreadyInitialized):
        launch(init_again, accelerator="ascend")


def launch_again() -> None:
    launch(call_once)


def test_a_rank_launches_none() -> None:
    """Python's own word for it was an AssertionError about daemonic processes."""
    with pytest.raises(Unsupported, match=r"a rank that it started, which is in a world already"):
        launch(launch_again, accelerator="ascend")


def test_reports_reach_the_launcher_in_order() -> None:
    seen: list[tuple[int, str]] = []
    launch(
        report_twice,
        ranks_per_node=2,
        on_report=lambda r, p: seen.append((r, p)),
        accelerator="ascend",
    )
    for rank in range(2):
        assert [payload for r, payload in seen if r == rank] == ["first", "second"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"nodes": 0}, "nodes"),
        ({"ranks_per_node": -1}, "ranks_per_node"),
        ({"nodes": 1.5}, "nodes"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        launch(where, 0, **arguments)  # type: ignore[arg-type]
    assert caught.value.argument == named


def test_function_that_does_not_pickle_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        launch(lambda: None)
    assert caught.value.argument == "fn"


def test_unknown_backends_are_named() -> None:
    for nodes, argument in ((2, "accelerator"), (2, "nic"), (1, "nic")):
        with pytest.raises(mkernel.errors.UnknownBackend) as caught:
            launch(where, 0, nodes=nodes, **{argument: "tpu"})
        assert caught.value.argument == argument


def test_no_world_outside_one() -> None:
    with pytest.raises(NotInitialized):
        mkernel.world()
    mkernel.finalize()  # harmless


SCRIPT = """
import sys, time
import mkernel

def body():
    from mkernel.launch import report
    report("started")
    time.sleep(600)

if __name__ == "__main__":
    try:
        mkernel.launch(
            body, nodes=1, ranks_per_node=2, timeout_s=300,
            on_report=lambda rank, what: print(what, flush=True),
        )
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


LOOK = """
import sys
import mkernel

def look():
    return mkernel.__file__, mkernel.world().size

if __name__ == "__main__":
    print(*mkernel.launch(look, nodes=1, ranks_per_node=2, timeout_s=240))
"""


def test_ranks_import_the_launchers_mkernel_wherever_it_is(tmp_path: Path) -> None:
    """The fork server would look in the working directory first, which may have another one."""
    (tmp_path / "mkernel").mkdir()
    (tmp_path / "mkernel" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "look.py"
    script.write_text(LOOK)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout == f"{(mkernel.__file__, 2)} {(mkernel.__file__, 2)}\n", done.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(mkernel.launch(step, ranks_per_node=2))", "ended while it imported"),
        (
            'if __name__ != "__main__":\n    raise ValueError("planted")\n'
            "mkernel.launch(step, ranks_per_node=2)",
            "ValueError: planted",
        ),
    ],
    ids=["no main guard", "an import that fails"],
)
def test_a_script_that_ranks_cannot_import_is_told_why(
    tmp_path: Path, script: str, said: str
) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"import mkernel\ndef step():\n    return 1\n{script}\n")
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert f"ended while it imported {file}" in done.stderr.splitlines()[-1]
    assert 'under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert "bootstrapping phase" not in done.stderr


def test_a_function_that_ranks_do_not_find_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        'import mkernel\nif __name__ == "__main__":\n    def step():\n        return 1\n'
        "    mkernel.launch(step, ranks_per_node=2)\n"
    )
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )  # fmt: skip
    assert done.returncode == 1
    assert "ArgumentError: fn = " in done.stderr.splitlines()[-1]
    assert "attribute 'step'" in done.stderr.splitlines()[-1]
    assert 'above `if __name__ == "__main__":` and not under it' in done.stderr.splitlines()[-1]


def test_ctrl_c_finds_no_rank_and_no_server_that_imports(tmp_path: Path) -> None:
    """A terminal sends it to all processes, those too that have not begun."""
    script = tmp_path / "stopped.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE_S
    while not any(map(_is_server, group_of(process.pid))) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # it imports torch for longer
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=TOLD_S)
    assert process.returncode == 130
    assert said == ""
    assert ends(process.pid)


def _is_server(process: int) -> bool:
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


STEP = "import mkernel\ndef step():\n    return mkernel.world().rank\n\n"


@pytest.mark.parametrize("how", ["-", "-i", "-c"])
def test_a_function_that_was_typed_is_refused_with_two_lines_that_work(
    how: str, tmp_path: Path
) -> None:
    """At a prompt, piped into Python, or as an argument of it."""

    def typed(text: str) -> tuple[str, list[str]]:
        command, given = [sys.executable, how], text
        if how == "-c":
            command, given = [*command, text], ""
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            cwd=tmp_path,
        )  # fmt: skip
        return done.stdout, [one for one in done.stderr.splitlines() if "mkernel" in one]

    _, told = typed(STEP + "mkernel.launch(step, ranks_per_node=2)\n")
    (lines,) = re.findall(r"these two lines work: (from .*?; mkernel.*?\))", told[-1])
    (tmp_path / "steps.py").write_text(STEP)
    first, second = lines.split("; ")
    said, errors = typed(f"import mkernel\n{first}\nprint({second})\n")
    assert said == "[0, 1]\n", errors


def fails_and_cannot_end(printed: Path) -> None:
    # Ranks print where the process that they are forked from began to, perhaps in another test.
    sys.stderr = printed.open("w", buffering=1)

    def failing(error: BaseException | None) -> None:
        raise OSError("planted, as the world ends")

    lifecycle.finalize = failing  # type: ignore[assignment]
    raise LookupError("planted by the function")


def test_what_the_function_raised_is_told_also_where_its_world_does_not_end(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with pytest.raises(LookupError, match="planted by the function"):
        mkernel.launch(fails_and_cannot_end, printed, accelerator="streams")
    assert "planted, as the world ends" in printed.read_text()
