"""The log names worlds, plans, fallbacks and failures, and is quiet unless asked."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from in_world import DEADLINE_S

import mkernel
from mkernel import log
from mkernel.world.watchdog import Watchdog

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) (mkernel\.[\w.]+) rank (\d) world (\S+): (.*)"
)


def parsed(text: str) -> list[tuple[str, ...]]:
    """Each line's level, logger, rank, world and message. There are no lines of anything else."""
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    assert None not in matches, text
    return [match.groups() for match in matches if match is not None]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect what is shown on stderr."""
    stream = io.StringIO()
    monkeypatch.setattr(log._shown, "stream", stream)
    yield stream
    log.show(None)


@pytest.mark.parametrize("level", [None, "warning", "info"])
def test_worlds_plans_and_fallbacks_are_said_where_it_is_asked(
    level: str | None, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MKERNEL_LOG", raising=False)
    if level is not None:
        monkeypatch.setenv("MKERNEL_LOG", level)
    name = mkernel.init(accelerator="ascend,streams").name
    a, b = torch.ones(64, 72), torch.ones(72, 40)
    for _ in range(2):
        mkernel.all_gather_gemm(a.half(), b.half())
    mkernel.all_reduce(a)
    mkernel.finalize()
    lines = parsed(shown.getvalue())
    if level != "info":
        assert lines == []
        return
    where = ("INFO", "mkernel.world.world", "0", name)
    assert {line[:4] for line in lines} == {where}
    begins, gather, reduce, fallback, ends = (line[4] for line in lines)
    assert begins == "begins: 1 ranks on 1 nodes, on ascend,streams, nic None, verbs None"
    assert re.match(
        r"plan all_gather_gemm of \{'m': 64, 'n': 40, 'k': 72\} float16 on ascend: path fused, "
        r"predicted [\d.]+ us, digest [0-9a-f]{12}$",
        gather,
    )
    assert reduce.startswith("plan all_reduce of ")
    assert fallback == "fallback: all_reduce runs on streams, as ascend does not take it"
    assert ends == "ends after 3 calls"


def test_memory_is_said_at_debug(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_LOG", "debug")
    mkernel.init(accelerator="streams")
    mkernel.empty((4, 8), torch.float32)
    mkernel.finalize()
    (line,) = (line for line in parsed(shown.getvalue()) if line[0] == "DEBUG")
    assert line[1] == "mkernel.world.memory"
    assert line[4] == "holds 128 bytes more of symmetric memory for tensors"


def fails(folder: Path) -> None:
    rank = mkernel.world().rank
    log._shown.setStream((folder / str(rank)).open("w"))
    mkernel.world().barrier()
    if rank == 1:
        raise ZeroDivisionError("a reason")
    mkernel.all_gather_gemm(torch.ones(64, 72), torch.ones(72, 40))


def test_a_failure_is_said_once_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_LOG", "warning")
    world = {"ranks_per_node": 2, "accelerator": "streams", "timeout_s": DEADLINE_S}
    with pytest.raises(ZeroDivisionError):
        mkernel.launch(partial(fails, tmp_path), **world)  # type: ignore[call-overload]
    for rank in range(2):
        (line,) = parsed((tmp_path / str(rank)).read_text())
        assert line[:4] == ("ERROR", "mkernel.world.failure", str(rank), "mkernel:0")
        assert re.match(r"broken in call \d: PeerFailure: rank 1 .*a reason", line[4])


def test_handlers_of_a_program_get_rank_and_world(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mkernel")
    world = mkernel.init(accelerator="streams")
    mkernel.finalize()
    first, last = caplog.records
    assert (first.getMessage()[:6], last.getMessage()) == ("begins", "ends after 0 calls")
    assert {(each.rank, each.world) for each in caplog.records} == {(0, world.name)}  # type: ignore[attr-defined]
    assert logging.getLogger("mkernel").level == logging.INFO, "a program's level stays"


def test_warnings_are_pythons_until_the_log_is_shown(shown: io.StringIO) -> None:
    with pytest.warns(RuntimeWarning, match="beware"):
        log.warn(Watchdog.__module__, "beware")
    log.show("info")
    log.show("warning")  # once more changes the level alone
    log.warn(Watchdog.__module__, "beware")
    logging.getLogger("mkernel").info("unseen")
    (line,) = shown.getvalue().splitlines()
    assert re.search(r" WARNING mkernel.world.watchdog rank \S+ world -: beware$", line)
    log.show(None)
    assert logging.getLogger("mkernel").handlers, "the handler that keeps it quiet stays"
