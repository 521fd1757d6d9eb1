"""What ptxas said is told only of the files that it was said of: a stand-in compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import ptxas_words

NVCC = """#!/bin/sh
# NVCC SOURCE HEADER -O3 -MF RULE -o OBJECT [...] -Xptxas -v
[ -s "$2" ] || { echo "$1:1: error: no header" >&2; exit 2; }
case "$*" in *" -Xptxas -v") ;; *) exit 3 ;; esac
printf 'kernel.o: %s \\\\\\n  %s\\n' "$1" "$(echo "$2" | sed 's/ /\\\\ /g')" > "$5"
: > "$7"
echo "ptxas info    : Compiling entry function 'k' for 'sm_90a'"
echo "    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"
echo "$1:7: warning: declared and not used" >&2
"""


class Kernel:
    def __init__(self, folder: Path) -> None:
        self.source, self.header = folder / "kernel.cu", folder / "a header.cuh"
        self.built, nvcc = folder / "kernel.o", folder / "nvcc"
        self.source.write_text("one")
        self.header.write_text("two")
        nvcc.write_text(NVCC)
        nvcc.chmod(0o755)
        files = [str(self.source), str(self.header)]
        self.command = [str(nvcc), *files, "-O3", "-MF", str(folder / "d"), "-o", str(self.built)]

    def words(self) -> str | None:
        return ptxas_words.words_of(self.built, self.source)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_what_was_said_is_kept_and_warnings_are_shown(
    kernel: Kernel, capfd: pytest.CaptureFixture[str]
) -> None:
    assert kernel.words() is None
    assert ptxas_words.main(kernel.command) == 0
    assert "4 bytes spill stores" in (kernel.words() or "")
    shown = capfd.readouterr()
    assert shown.err == f"{kernel.source}:7: warning: declared and not used\n"
    assert shown.out == ""


@pytest.mark.parametrize("which", ["source", "header"])
@pytest.mark.parametrize("now", ["other", None])
def test_nothing_is_told_of_files_that_are_others_now(
    kernel: Kernel, which: str, now: str | None
) -> None:
    assert ptxas_words.main(kernel.command) == 0
    file = getattr(kernel, which)
    before = file.read_text()
    file.write_text(now) if now else file.unlink()
    assert kernel.words() is None
    file.write_text(before)
    assert kernel.words() is not None


def test_nothing_is_told_of_another_source_or_of_kernels_compiled_quickly(kernel: Kernel) -> None:
    assert ptxas_words.main(kernel.command) == 0
    assert ptxas_words.words_of(kernel.built, kernel.source.with_name("other.cu")) is None
    others = kernel.command.copy()
    others[3] = "-O0"
    for command in (others, [*kernel.command, ptxas_words.QUICK]):
        assert ptxas_words.main(command) == 0
        assert kernel.words() is None


def test_nothing_is_kept_of_kernels_that_do_not_compile(
    kernel: Kernel, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ptxas_words.main(kernel.command) == 0
    kernel.header.write_text("")
    assert ptxas_words.main(kernel.command) == 2
    assert "error: no header" in capfd.readouterr().err
    kernel.header.write_text("two")
    assert kernel.words() is None
