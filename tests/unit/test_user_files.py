"""Files that a user names are read within limits, and never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.backends.nics.provider import list_nics, provider_status
from mkernel.cli.main import app
from mkernel.errors import ArgumentError, InputFileError, MkernelError
from mkernel.harness import numbers, results
from mkernel.harness.shapes import shapes
from mkernel.printable import printable
from mkernel.topology.cost import load_constants
from mkernel.topology.discover import read
from mkernel.topology.model import Node
from mkernel.topology.sources.files import read_text
from mkernel.user_files import read_file

READERS: dict[str, Callable[[Path], object]] = {
    "topology": read,
    "constants": load_constants,
    "machine": load_machine,
    "shapes": lambda path: shapes(str(path), ("all_gather_gemm",), 2),
    "result": results.read,
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL: dict[str, Callable[[Path], None]] = {
    "named pipe": _pipe,
    "socket": _socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", ["nofile.json", "folder/nofile", "no.such"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_there_is_said_to_be_missing(reader: str, name: str) -> None:
    with pytest.raises(InputFileError, match=f"{name}: No such file or directory"):
        READERS[reader](Path(name))


def test_a_folder_of_results_is_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, said in (
        (tmp_path / "nowhere", "no such folder"),
        (file, "is no folder"),
        (tmp_path, "no result of"),
    ):
        with pytest.raises(InputFileError, match=f"--render {path}: {said}"):
            numbers.page(path)


def test_a_word_that_is_neither_list_nor_file_is_said_to_be_none() -> None:
    with pytest.raises(
        ArgumentError, match=r"--shapes = 'tragets'.*no such list, and no such file"
    ):
        shapes("tragets", ("all_gather_gemm",), 2)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_by_name(
    tmp_path: Path, reader: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    file = Path("special")
    SPECIAL[kind](file)
    with pytest.raises(InputFileError, match=f"special is a {kind}; expected a regular file"):
        READERS[reader](file)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_without_an_end_is_read_up_to_the_limit(tmp_path: Path, reader: str) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as made:
        made.truncate(1 << 40)
    with pytest.raises(InputFileError, match=r"sparse is larger than [14] MiB"):
        READERS[reader](file)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [b"[" * 500_000, b'{"a": NaN', b"\xff\xfe", b"1" * 5000, b""])
def test_what_is_no_json_is_refused_by_name(tmp_path: Path, reader: str, content: bytes) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    with pytest.raises(InputFileError, match=r"odd\.json"):
        READERS[reader](file)


def test_a_pipe_in_a_recorded_tree_is_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "online")
    assert read_text(tmp_path / "online") is None


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(InputFileError, match=r"topology file a\\x00b"):
        read_file(Path("a\0b"), "topology file", 1)


def test_a_file_as_large_as_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "full"
    file.write_bytes(b"x" * 1024)
    assert read_file(file, "file", 1024) == b"x" * 1024
    with pytest.raises(InputFileError, match="larger"):
        read_file(file, "file", 1023)


HOSTILE = "a\x1b[31mb\r\nc\u202ed\x07\x9b\u2028\ud800é"
SHOWN = r"a\x1b[31mb\r\nc\u202ed\x07\x9b\u2028\ud800é"


def test_control_characters_are_shown_as_escapes_once() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable(printable(HOSTILE)) == SHOWN
    assert printable("x" * 100, 10) == "x" * 10 + "… (100 characters)"


def test_errors_are_one_printable_line() -> None:
    for error in (
        ArgumentError(HOSTILE, HOSTILE, HOSTILE, why=HOSTILE),
        InputFileError(HOSTILE),
        MkernelError(HOSTILE),
    ):
        assert str(error).isprintable()
        assert SHOWN in str(error)


def test_a_value_in_an_error_is_cut() -> None:
    assert len(str(ArgumentError("--nodes", "9" * 100_000, "less"))) < 1000


def test_names_of_a_machine_are_printable() -> None:
    assert Node(id=0, hostname=HOSTILE, numa=()).hostname == SHOWN


def test_a_verbs_library_that_is_a_pipe_is_not_loaded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "libverbs.so")
    library = str(tmp_path / "libverbs.so")
    assert list_nics(library) == ()
    assert "no regular file" in provider_status(library).detail


@pytest.mark.parametrize("option", ["--trace", "--scaling"])
def test_a_plan_that_cannot_be_written_is_refused_by_name(tmp_path: Path, option: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match=f"{option} = .*No such file or directory"):
        app(
            ["plan", "ag_gemm", "--accelerator", "streams", "--nodes", "1",
             option, str(tmp_path / "gone/x.svg")],
            standalone_mode=False,
        )  # fmt: skip
