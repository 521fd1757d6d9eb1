"""Commands in places that are no developer's terminal: every refusal of the system is a line that names
it, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from mkernel import failure_record, host_limits
from mkernel.cli.main import main
from mkernel.conformance import render
from mkernel.errors import ArgumentError, BackendUnavailable, MkernelError
from mkernel.user_files import write_file

HOST = "gpu·17 → 日本 😀"
"""A name that a machine's description may have."""


def _run(arguments: Sequence[str], stdout: IO[str], stderr: IO[str]) -> int:
    """Run the command line as a process does, on these streams; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mkernel", *arguments])
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        try:
            main()
        except SystemExit as exited:
            return int(exited.code or 0)
        return 0


class _Said(io.BytesIO):
    """A buffer that keeps what a stream was given when the stream is closed."""

    def close(self) -> None:
        pass

    def stream(self, encoding: str = "utf-8") -> io.TextIOWrapper:
        return io.TextIOWrapper(self, encoding=encoding)

    def text(self, encoding: str = "utf-8") -> str:
        return self.getvalue().decode(encoding)


def _printed(encoding: str, *arguments: str, code: int = 0) -> str:
    out, errors = _Said(), _Said()
    found = _run(arguments, out.stream(encoding), errors.stream(encoding))
    assert found == code, errors.text(encoding)
    return (errors if code else out).text(encoding)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "machine.json"
    gpus = [{"kind": "cuda", "name": HOST, "id": f"{HOST}{i}", "index": i} for i in range(2)]
    node = {
        "id": 0,
        "hostname": HOST,
        "numa": [{"id": 0, "cpus": [0]}],
        "accelerators": gpus,
    }
    file.write_text(json.dumps({"nodes": [node]}), encoding="utf-8")
    return file


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8"])
def test_output_is_in_any_encoding(encoding: str, machine: Path) -> None:
    file = str(machine)
    here = ["--nodes", "1", "--accelerator", "streams", "--topology", file]
    for arguments in (
        ["plan", "ag_gemm", *here, "--explain"],
        ["plan", "ag_gemm", "--accelerator", "ascend"],
        ["probe", "--from", file],
        ["probe", "--from", file, "--matrix"],
        ["--help"],
        ["run", "--help"],
    ):
        assert _printed(encoding, *arguments)
    assert "topology - 1 node" in _printed("ascii", "plan", "ag_gemm", *here)
    refused = _printed(encoding, "plan", "ag_gemm", "--topology", f"{HOST}.json", code=2)
    assert "no such file" in refused.lower()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_json_says_the_same_in_any_encoding(encoding: str, machine: Path) -> None:
    for arguments in (
        ["probe", "--from", str(machine), "--json"],
        ["plan", "ag_gemm", "--accelerator", "streams", "--topology", str(machine), "--json"],
        ["doctor", "--settings", "--json"],
    ):
        said = [json.loads(_printed(each, *arguments)) for each in (encoding, "utf-8")]
        assert said[0] == said[1]


SAID = [
    ["plan", "ag_gemm", "--accelerator", "ascend"],
    ["plan", "ag_gemm", "--accelerator", "ascend", "--json"],
    ["doctor", "--settings"],
    ["--version"],
    ["--help"],
]


@pytest.mark.parametrize("arguments", SAID, ids=" ".join)
def test_a_full_disk_is_named(arguments: list[str]) -> None:
    errors = _Said()
    with open("/dev/full", "w") as full:
        assert _run(arguments, full, errors.stream()) == 1
    said = errors.text()
    assert said == "OSError: stdout cannot be written: No space left on device; make room there\n"


@pytest.mark.parametrize("arguments", SAID, ids=" ".join)
def test_a_reader_that_has_read_enough_hears_no_more(arguments: list[str]) -> None:
    errors = _Said()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        assert _run(arguments, pipe, errors.stream()) == 1
    assert not errors.text()


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full for longer files, as ``ulimit -f`` makes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


PLAN = ["plan", "ag_gemm", "--accelerator", "streams", "--nodes", "2"]
WRITERS = {
    "--trace": [*PLAN, "--simulate", "--trace", "FILE.json"],
    "--scaling": [*PLAN, "--scaling", "FILE.svg"],
    "--plot": ["probe", "--from", "MACHINE", "--plot", "FILE.png"],
    "--report": ["doctor", "--report", "FILE.json"],
}


@pytest.mark.parametrize("option", WRITERS)
def test_a_file_is_written_whole_or_not_at_all(option: str, machine: Path, tmp_path: Path) -> None:
    if option in ("--scaling", "--plot"):
        pytest.importorskip("matplotlib")
    folder = tmp_path / "out"
    folder.mkdir()
    words = [word.replace("MACHINE", str(machine)) for word in WRITERS[option]]
    words = [word.replace("FILE", str(folder / "file")) for word in words]
    file = Path(words[-1])
    assert _run(words, _Said().stream(), _Said().stream()) == 0  # fonts and caches are there now
    file.write_text("before")
    errors = _Said()
    with _files_of_at_most(1000):
        code = _run(words, _Said().stream(), errors.stream())
    said = errors.text()
    assert code == 2, said
    assert f"{option} = {file} is not legal (File too large)" in said
    assert file.read_text() == "before"
    assert list(folder.iterdir()) == [file]


def test_what_is_kept_is_whole_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = failure_record.keep({"number": 1})
    report = tmp_path / "report.json"
    write_file(report, "before")
    with _files_of_at_most(100):
        with pytest.raises(OSError, match="too large"):
            failure_record.keep({"number": 2, "text": "x" * 1000})
        with pytest.raises(MkernelError, match=r"report\.json: cannot be written: File too large"):
            render.write(report, "x" * 1000)
    assert failure_record.last() == {"number": 1}
    assert report.read_text() == "before"
    assert {*kept.parent.iterdir(), *tmp_path.iterdir()} == {kept, report, kept.parent}


def test_a_file_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to("file")
    write_file(link, "äfter")
    assert link.is_symlink()
    assert file.read_bytes() == "äfter".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    write_file(Path("/dev/null"), "x")
    assert not Path("/dev/null").is_file()
    long = tmp_path / ("x" * 250)
    write_file(long, "x")
    assert long.read_text() == "x"


def test_sockets_lie_where_their_names_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    made: list[str] = []
    monkeypatch.setattr(
        host_limits.util, "get_temp_dir", lambda: made.append(host_limits.tempfile.gettempdir())
    )
    monkeypatch.setattr("tempfile.tempdir", str(long))
    host_limits.make_socket_folder()
    assert len(made[0]) <= 75
    assert host_limits.tempfile.gettempdir() == str(long)
    monkeypatch.setattr(host_limits.os, "access", lambda *_: False)
    with pytest.raises(ArgumentError, match=r"TMPDIR = .* at most 75 bytes"):
        host_limits.make_socket_folder()

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(BackendUnavailable, match="set TMPDIR"):
        host_limits.make_socket_folder()


def test_an_interface_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, legal in (("", True), ("lo", True), ("lo,eth99", False), ("eth99", False)):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        if legal:
            host_limits.check_gloo_interfaces()
            continue
        with pytest.raises(ArgumentError, match=f"GLOO_SOCKET_IFNAME = {given} .* host: .*lo"):
            host_limits.check_gloo_interfaces()


@pytest.mark.parametrize("reason", ["Network is unreachable", "Cannot assign requested address"])
def test_a_host_without_loopback_is_named(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(101, reason)

    class Socket(host_limits.socket.socket):  # type: ignore[name-defined,misc]
        bind = connect = refuse

    monkeypatch.setattr(host_limits.socket, "socket", Socket)
    with pytest.raises(BackendUnavailable, match=rf"127\.0\.0\.1.*{reason}.*ip link set lo up"):
        host_limits.check_loopback()


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_launch_with_too_few_descriptors_is_refused(
    few_descriptors: Callable[[int], None],
) -> None:
    errors = _Said()
    opened = {int(each) for each in os.listdir("/proc/self/fd")}  # with gaps, perhaps
    free = [each for each in range(len(opened) + 9) if each not in opened]
    few_descriptors(free[8])
    words = ["run", "ag_gemm", "--accelerator", "streams", "--nodes", "1"]
    assert _run(words, _Said().stream(), errors.stream()) == 1
    said = errors.text()
    assert "OSError: launching 2 ranks opens 24 descriptors" in said
    assert said.count("ulimit -n") == 1
