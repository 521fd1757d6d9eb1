"""The command line refuses what is made to hurt by a named error: within 5 s of CPU time and 300 MB
above what ``import mkernel, torch`` takes, without a traceback, whatever a file or argument holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 400.0
"""On a busy machine; what waits for ever, waits longer."""
MOST_CPU_S = 5.0
MOST_BYTES = 300 << 20

_SERVER = """
import gc, json, os, resource, runpy, signal, sys, tempfile
import mkernel, torch
mkernel.launch
gc.freeze()  # a fork that ends would look for garbage through all that was imported
for line in sys.stdin:
    arguments, environment, cpus = json.loads(line)
    said = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if not child:
        signal.alarm(int(sys.argv[1]))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in enumerate(said, 1):
            os.dup2(file.fileno(), descriptor)
        os.sched_setaffinity(0, cpus or os.sched_getaffinity(0))
        os.environ.update(environment)
        sys.argv[:] = ["mkernel", *arguments]
        if arguments:
            runpy.run_module("mkernel", run_name="__main__")
        sys.exit()
    _, status, used = os.wait4(child, 0)
    for file in said:
        file.seek(0)
    out, err = (file.read().decode(errors="replace") for file in said)
    print(json.dumps({
        "code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime,
        "bytes": used.ru_maxrss << 10, "out": out, "err": err,
    }), flush=True)
"""
"""Runs commands in forks of a process that has done the imports, each for itself: that is seconds less
than a process from nothing. ``test_an_own_process_says_the_same`` compares the two."""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    cpu_s: float
    bytes: int
    out: str
    err: str


@pytest.fixture(scope="module")
def command() -> Iterator[Callable[..., Done]]:
    """Runs ``mkernel`` with arguments and measures it; without any, the imports alone. Fails where it
    does not end."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(int(DEADLINE_S))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout

    def run(
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
    ) -> Done:
        print(json.dumps([arguments, environment or {}, cpus]), file=server.stdin, flush=True)
        done = Done(**json.loads(server.stdout.readline()))
        assert done.code != -signal.SIGALRM, f"{arguments} did not end within {DEADLINE_S:g} s"
        return done

    yield run
    server.stdin.close()
    assert server.wait(DEADLINE_S) == 0
    server.stdout.close()


@pytest.fixture(scope="module")
def imports(command: Callable[..., Done]) -> Done:
    """What the imports alone take."""
    done = command()
    assert done.code == 0, done.err
    return done


@pytest.fixture
def refused(command: Callable[..., Done], imports: Done) -> Callable[..., str]:
    """Gives the one line of a command that is refused as it must be."""

    def judged(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
        done = command(*arguments, environment=environment)
        assert done.code == 2, (done.out[-2000:], done.err[-2000:])
        assert "Traceback" not in done.err
        lines = done.err.strip().splitlines()
        assert len(lines) == 1, lines[:20]
        assert lines[0].isprintable()
        kinds = ("Error", "Backend", "Unavailable", "Unsupported")
        assert lines[0].partition(":")[0].endswith(kinds)
        assert done.cpu_s - imports.cpu_s < MOST_CPU_S
        assert done.bytes - imports.bytes < MOST_BYTES
        return lines[0]

    return judged


def test_an_own_process_says_the_same(command: Callable[..., Done]) -> None:
    arguments = ["plan", "e\x1b[2J"]
    forked = command(*arguments)
    alone = subprocess.run(
        [sys.executable, "-m", "mkernel", *arguments],
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (forked.code, forked.out, forked.err) == (
        alone.returncode, alone.stdout.decode(), alone.stderr.decode()
    )  # fmt: skip


def _nodes(count: int) -> str:
    return '{"nodes":[' + ",".join(['{"id":0,"hostname":"a","numa":[]}'] * count) + "]}"


BIG = {
    "sixty_mb": lambda: _nodes(60_000_000 // 34),
    "long_name": lambda: json.dumps(
        {"nodes": [{"id": 0, "hostname": "h" * 60_000_000, "numa": []}]}
    ),
    "many_errors": lambda: '{"nodes":[' + ",".join(["{}"] * 1_300_000) + "]}",
    "many_keys": lambda: "{" + ",".join(f'"{i:x}":0' for i in range(400_000)) + "}",
    "many_nodes": lambda: _nodes(100_000),
    "deep": lambda: "[" * 4_000_000,
    "long_line": lambda: "NPU0 NPU1\n" + "NPU0 X HCCS\n" * 300_000,
    "long_xml_name": lambda: (
        '<topology version="2.0"><object type="Machine" nodeset="0x1">'
        f'<info name="HostName" value="{"h" * 3_000_000}"/></object></topology>'
    ),
}


@pytest.mark.parametrize("name", BIG)
def test_large_files_are_refused(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.json"
    file.write_text(BIG[name]())
    assert file.name in refused("probe", "--from", str(file))


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe", "--from"],
        ["plan", "ag_gemm", "--topology"],
        ["plan", "ag_gemm", "--constants"],
        ["bench", "ag_gemm", "--accelerator", "streams", "--shapes"],
        ["bench", "--model-only", "--accelerator", "ascend", "--machine"],
        ["run", "ag_gemm", "--accelerator", "streams", "--input"],
    ],
    ids=lambda arguments: arguments[-1],
)
def test_a_named_pipe_is_refused(
    refused: Callable[..., str], tmp_path: Path, arguments: Sequence[str]
) -> None:
    file = tmp_path / "special.safetensors"
    os.mkfifo(file)
    assert "special.safetensors is a named pipe" in refused(*arguments, str(file))


def test_results_that_are_no_files_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.json")
    assert "named pipe" in refused("bench", "--render", str(tmp_path))


RUN = ("run", "ag_gemm", "--accelerator", "streams")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["plan", "ag_gemm", "--nodes", "2147483647"], "--nodes"),
        (["plan", "ag_gemm", "--nodes", "1000000"], "--nodes"),
        (["plan", "ag_gemm", "--ranks-per-node", "1000000"], "--ranks-per-node"),
        (["plan", "ag_gemm", "--nodes", "16384", "--ranks-per-node", "9"], "--ranks-per-node"),
        (["plan", "ag_gemm", "--m", "1" + "0" * 4000], "m"),
        ([*RUN, "--nodes", "1000"], "--nodes"),
        ([*RUN, "--nodes", "1", "--ranks-per-node", "2000"], "--ranks-per-node"),
        (["bench", "--accelerator", "streams", "--ranks", "4096"], "--ranks"),
        (["probe", "--measure", "/dev/null", "--ranks", "4096"], "--ranks"),
        ([*RUN, "--m", "1000000000"], "--m"),
        ([*RUN, "--timeout", "nan"], "--timeout"),
        ([*RUN, "--timeout", "inf"], "--timeout"),
        ([*RUN, "--timeout", "1e308"], "--timeout"),
        ([*RUN, "--timeout", "1e-9"], "--timeout"),
        (["bench", "--accelerator", "streams", "--timeout", "nan"], "--timeout"),
        (["run", "ag_gemm", "--accelerator", "os:system"], "os:system"),
        (["plan", "ag_gemm", "--accelerator", "ascend", "--nic", "os:system"], "os:system"),
        (["conformance", "--nic", "os:system"], "os:system"),
        (["bench", "--accelerator", "streams", "--peers", "os:system"], "os:system"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else value,
)
def test_arguments_out_of_range_are_refused(
    refused: Callable[..., str], arguments: Sequence[str], name: str
) -> None:
    assert name in refused(*arguments)


def test_ranks_are_limited_by_the_cpus(command: Callable[..., Done]) -> None:
    """On any machine: the command may use one CPU only."""
    cpus = [min(os.sched_getaffinity(0))]
    for arguments in (
        ["bench", "--accelerator", "streams", "--ranks", "64"],
        [*RUN, "--nodes", "1000"],
    ):
        done = command(*arguments, cpus=cpus)
        assert done.code == 2, done.err
        assert "MKERNEL_RANKS_PER_CPU" in done.err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MKERNEL_TIMEOUT_S", "nan"),
        ("MKERNEL_TIMEOUT_S", "1e308"),
        ("MKERNEL_PINNING", "[" * 100_000),
        ("MKERNEL_CONSTANTS", "/dev/zero"),
        ("MKERNEL_ACCELERATOR", "os:system"),
    ],
    ids=lambda value: value[:40],
)
def test_settings_out_of_range_are_refused(
    refused: Callable[..., str], variable: str, value: str
) -> None:
    said = refused("plan", "ag_gemm", environment={variable: value})
    assert (value if value.startswith(("os:", "/dev")) else variable) in said


def test_the_largest_world_is_planned(command: Callable[..., Done], imports: Done) -> None:
    done = command(
        *("plan", "ag_gemm", "--accelerator", "ascend"),
        *("--nic", "cx7", "--verbs", "soft"),
        *("--nodes", "16384", "--ranks-per-node", "8", "--m", "131072"),
    )
    assert done.code == 0, done.err
    assert done.bytes - imports.bytes < MOST_BYTES


def test_an_array_that_declares_petabytes_is_refused(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "petabytes.npy"
    text = "{'descr': '<f2', 'fortran_order': False, 'shape': (1000000000000, 1000), }"
    file.write_bytes(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(118).encode())
    assert file.stat().st_size == 128
    assert file.name in refused(*RUN, "--input", str(file), "--input", str(file))


EVIL = "e\x1b]0;owned\x07\x1b[2J\u202evil\u2028\x9b31m\x7f[/red]"


@pytest.fixture
def printed(command: Callable[..., Done]) -> Callable[..., str]:
    """Gives what a command says, of which all is printable."""

    def judged(*arguments: str, code: int = 0) -> str:
        done = command(*arguments)
        assert done.code == code, done.err
        said = done.out + done.err
        assert all(line.isprintable() for line in said.split("\n")), ascii(said)
        return said

    return judged


def _machine(file: Path) -> Path:
    gpu = {"kind": "cuda", "name": EVIL}
    node = {
        "id": 0,
        "hostname": EVIL,
        "numa": [{"id": 0, "cpus": [0]}],
        "accelerators": [{**gpu, "id": f"{EVIL}{i}", "index": i} for i in range(2)],
        "nics": [{"id": f"{EVIL}n", "kind": "cx", "name": EVIL, "pci": EVIL}],
    }
    file.write_text(json.dumps({"nodes": [node]}))
    return file


@pytest.mark.parametrize("view", [[], ["--matrix"], ["--json"]])
def test_names_in_a_file_do_not_reach_the_terminal_raw(
    printed: Callable[..., str], tmp_path: Path, view: list[str]
) -> None:
    said = printed("probe", "--from", str(_machine(tmp_path / "m.json")), *view)
    assert "x1b]0;owned" in said


def test_a_plan_shows_names_as_escapes(printed: Callable[..., str], tmp_path: Path) -> None:
    file = str(_machine(tmp_path / "m.json"))
    nodes = ["--nodes", "1", "--ranks-per-node", "2"]
    said = printed("plan", "ag_gemm", "--accelerator", "streams", "--topology", file, *nodes)
    assert "x1b]0;owned" in said


def test_a_picture_shows_names_as_escapes(printed: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "m.svg"
    printed("probe", "--from", str(_machine(tmp_path / "m.json")), "--plot", str(picture))
    drawn = picture.read_text()
    assert all(line.isprintable() for line in drawn.split("\n"))


@pytest.mark.parametrize(
    "arguments",
    [
        [EVIL],
        ["plan", EVIL],
        ["plan", "ag_gemm", f"--{EVIL}"],
        ["plan", "ag_gemm", "--m", EVIL],
        ["plan", "ag_gemm", "--topology", EVIL],
        ["bench", "--peers", EVIL],
        ["bench", "--render", EVIL],
        ["conformance", "--check", EVIL],
    ],
    ids=lambda arguments: " ".join(arguments[:-1]) or "command",
)
def test_arguments_are_shown_as_escapes(printed: Callable[..., str], arguments: list[str]) -> None:
    printed(*arguments, code=2)
