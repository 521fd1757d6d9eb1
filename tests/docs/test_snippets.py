"""What pages show runs as it is written there, and prints what they say it prints.

A block of Python has a title, the name of its file. A block of console starts with a command behind
``$``, which runs in a folder with the page's files; the lines below it are what it prints, in any
order, since ranks take turns. ``...`` stands for lines that differ from machine to machine.
Programs for torchrun run in forked ranks; tests/torch/test_starters.py has torchrun itself. Programs of
Python run in this process, whose ranks have imported what they need, but for README's. ``mkernel run``
makes one timed call instead of three.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import forked_program
import pytest
from pages import PAGES, ROOT, Block, blocks, name

RUN_BY = {
    "docs/from-nccl.md": "tests/multiprocess/test_from_nccl.py",
    "docs/writing-a-backend.md": "tests/conformance/test_plugins.py",
}
"""Pages whose blocks are steps of one program, and the tests that put them together and run them."""
LIMIT_S = 250

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """Commands of the page's console blocks, and the lines that each prints."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(page):
        if block.language != "console":
            continue
        for line in block.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def with_snippets() -> list[Path]:
    return [
        page
        for page in PAGES
        if page.is_file()
        and name(page) not in RUN_BY
        and any(block.language in ("python", "console") for block in blocks(page))
    ]


def files(page: Path) -> dict[str, Block]:
    return {block.title: block for block in blocks(page) if block.title}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return that of a user who has activated the environment that mkernel is installed in."""
    commands = tmp_path / "bin"
    commands.mkdir()
    starts = {
        "python": [sys.executable],
        "mkernel": [sys.executable, "-m", "mkernel"],
    }
    for command, words in starts.items():
        (commands / command).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        (commands / command).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKERNEL_TIMEOUT_S": "100",
        "COLUMNS": "100",
    }


@pytest.mark.parametrize("page", with_snippets(), ids=name)
def test_every_block_of_python_is_a_file_that_a_command_runs(page: Path) -> None:
    python = [block for block in blocks(page) if block.language == "python"]
    assert [block.title for block in python if block.title is None] == []
    commands = [command for command, _ in sessions(page)]
    for title in files(page):
        assert any(title in command.split() for command in commands), title


@pytest.mark.parametrize(
    ("page", "command", "printed"),
    [(page, *session) for page in with_snippets() for session in sessions(page)],
    ids=lambda value: name(value) if isinstance(value, Path) else None,
)
def test_a_command_prints_what_the_page_says(
    page: Path,
    command: str,
    printed: list[str],
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    for title, block in files(page).items():
        (folder / title).write_text(block.text)
    if "examples/" in command:
        (folder / "examples").symlink_to(ROOT / "examples")
    if started := re.fullmatch(r"torchrun --nproc-per-node (\d+) (\S+)", command):
        code, said = forked_program.run(folder / started[2], ranks=int(started[1]))
    elif page.name != "README.md" and (started := re.fullmatch(r"python (\S+)", command)):
        monkeypatch.chdir(folder)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(sys, "argv", [started[1]])
        runpy.run_path(str(folder / started[1]), run_name="__main__")
        code, said = 0, "".join(capfd.readouterr())
    else:
        command = command.replace(
            "mkernel run ag_gemm", "mkernel run ag_gemm --warmup 0 --iterations 1"
        )
        ended = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )  # fmt: skip
        code, said = ended.returncode, ended.stdout
    assert code == 0, said
    assert differs(printed, said) is None, said


LEFT_OUT = r"(?:(?!rank \d+ of )[^\n])*"


def differs(printed: list[str], output: str) -> str | None:
    """A line that is missing, or one too many; None: the output is what the page says.

    Ranks share a pipe, into which Python writes a line and its end apart, so that lines of two ranks
    may come without an end between them: what the page leaves out ends where another rank begins.
    """
    for line in sorted(filter(str.strip, printed), key=len, reverse=True):
        if line == "...":
            continue
        pattern = LEFT_OUT.join(map(re.escape, line.rstrip().split("...")))
        output, found = re.subn(pattern, "\n", output, count=1)
        if not found:
            return f"not printed: {line}"
    rest = [line.strip() for line in output.splitlines() if line.strip()]
    return f"not on the page: {rest[0]}" if rest and "..." not in printed else None


@pytest.mark.parametrize(
    ("printed", "output"),
    [
        (["rank 0", "rank 1"], "rank 1\n\nrank 0  \n"),
        (["rank 1", "rank 12"], "rank 12rank 1\n\n"),
        (["took ... s"], "took 1.2 s\n"),
        (["rank 0", "..."], "a warning\nrank 0\n"),
        (["rank 0 of 2: ...", "rank 1 of 2: ..."], "rank 0 of 2: 1e-4rank 1 of 2: 2e-4\n\n"),
    ],
)
def test_output_that_is_as_the_page_says(printed: list[str], output: str) -> None:
    assert differs(printed, output) is None


@pytest.mark.parametrize(
    ("printed", "output", "says"),
    [
        (["rank 0", "rank 1"], "rank 0\n", "not printed: rank 1"),
        (["rank 0", "rank 0"], "rank 0\n", "not printed: rank 0"),
        (["rank 0"], "rank 0\na warning\n", "not on the page: a warning"),
        (["took ... s"], "took 1.2 ms\n", "not printed: took ... s"),
    ],
)
def test_output_that_is_not(printed: list[str], output: str, says: str) -> None:
    assert differs(printed, output) == says


@pytest.mark.parametrize(("page", "test"), RUN_BY.items())
def test_other_pages_have_a_test_of_their_own(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text()


def test_every_page_with_python_is_run() -> None:
    """Blocks of other kinds show output, configuration or pieces of a class; the kinds are few."""
    kinds = {block.language for page in PAGES if page.is_file() for block in blocks(page)}
    allowed = {"", "python", "console", "json", "diff", "py", "toml", "cpp", "c", "bash", "yaml"}
    assert kinds <= allowed
    assert shutil.which("bash")
