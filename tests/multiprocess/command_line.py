"""The `mkernel` command for tests: in this process, or in one of its own."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mkernel.cli.main import main

MKERNEL = str(Path(sys.executable).parent / "mkernel")
PATIENCE_S = 120.0
"""With what must end, however busy the machine is."""

Done = subprocess.CompletedProcess[str]


def mkernel_alone(*arguments: str) -> Done:
    """In a process of its own, as a user runs it."""
    return subprocess.run(
        [MKERNEL, *arguments],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )


def mkernel(*arguments: str) -> Done:
    """In this process, which has imported what it needs: that is seconds less."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [MKERNEL, *arguments])
        try:
            main()
        except SystemExit as exited:
            code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    return Done(arguments, code, stdout.getvalue(), stderr.getvalue())


def group_of(leader: int) -> list[str]:
    """Process ids of a process group."""
    return subprocess.run(
        ["pgrep", "-g", str(leader)], capture_output=True, text=True, check=False
    ).stdout.split()


def ends(leader: int) -> bool:
    """Whether nothing of a process group is left after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while group_of(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not group_of(leader)
