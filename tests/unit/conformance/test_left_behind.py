"""A file in /dev/shm that sessions leave is counted, however they held it; what other processes leave
there is not. Nor is a thread that is about to end counted with what worlds leave."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
from _multiprocessing import SemLock
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from mkernel.backends.contracts.nic import NicSession
from mkernel.conformance.check import Result, run_check
from mkernel.conformance.checks import lives
from mkernel.conformance.nic_faults.wrappers import Opener, Session
from mkernel.conformance.nic_life_checks import LIFE_CHECKS
from mkernel.harness.nic_ranks import NicSubject

_PREFIX = f"mkernel-test-{os.getpid()}-"
"""The prefix of names of files, also in the ranks, which are forked."""
_numbers = itertools.count()


def _leaves(make: Callable[[str], contextlib.AbstractContextManager[Any]]) -> type[Opener]:
    """A backend whose sessions each make a file in /dev/shm, hold it until they are closed, and do not
    remove it."""

    class Leaves(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.held = contextlib.ExitStack()
            self.held.enter_context(make(f"{_PREFIX}{os.getpid()}-{next(_numbers)}"))

        def close(self) -> None:
            self.held.close()
            super().close()

    return type("Leaves", (Opener,), {"session": Leaves})


LeavesFile = _leaves(lambda name: FileIO(f"/dev/shm/{name}", "x"))
LeavesSemaphore = _leaves(lambda name: SemLock(1, 1, 1, f"/{name}", False))
"""Mapped, not open, and under the name that the file had before it was finished."""
BesideOthers = _leaves(lambda name: subprocess.Popen(["touch", f"/dev/shm/{name}"]))


def _reopened(backend: str) -> Result:
    """The verdict of the check that opens one session after another."""
    (reopen,) = (check for check in LIFE_CHECKS if check.name == "reopen")
    subject = NicSubject(f"{__name__}:{backend}", quick=True, timeout_s=2.0, start="fork")
    return run_check(reopen, subject)


@pytest.fixture
def files() -> Iterator[Callable[[], list[Path]]]:
    """Those in /dev/shm that are left."""

    def left() -> list[Path]:
        return list(Path("/dev/shm").glob(f"*{_PREFIX}*"))

    yield left
    for file in left():
        file.unlink()


@pytest.mark.parametrize("backend", ["LeavesFile", "LeavesSemaphore"])
def test_files_that_sessions_leave_are_counted(
    backend: str, files: Callable[[], list[Path]]
) -> None:
    result = _reopened(backend)
    assert result.message.startswith("4 files in /dev/shm more than before"), result
    assert len(files()) == 2 * 6


def test_files_that_other_processes_leave_are_not(files: Callable[[], list[Path]]) -> None:
    result = _reopened("BesideOthers")
    assert result.outcome == "passed", result.message
    assert len(files()) == 2 * 6


def test_only_threads_that_stay_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look finds one less, and what is held at rest is found after that."""
    before = lives.held_at_rest()
    told, looks = threading.Event(), iter((False, True))
    late = threading.Thread(target=told.wait, daemon=True)
    late.start()
    held = lives._held

    def ends_late() -> dict[str, int]:
        if next(looks, False):
            told.set()
            late.join()
        return held()

    monkeypatch.setattr(lives, "_held", ends_late)
    assert lives.piled_up(before, 1) == {}
    told.clear()
    monkeypatch.setattr(lives, "_held", held)
    monkeypatch.setattr(lives, "_ENDING_S", 0.3)
    stays = threading.Thread(target=told.wait, daemon=True)
    stays.start()
    try:
        assert lives.piled_up(before, 1) == {"threads": 1}
        assert lives.piled_up(before, 2) == {}
        assert lives.held_at_rest()["threads"] == before["threads"] + 1
    finally:
        told.set()
        stays.join()
