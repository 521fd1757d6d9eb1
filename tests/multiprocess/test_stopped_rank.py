"""A rank that was stopped while or before it began a call, until the others had given the world up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mkernel
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.errors import Timeout

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

TIMEOUT_S = 2.0
LONG_S = 60.0


def gathers() -> None:
    rows = torch.ones(64, 64)
    mkernel.all_gather_gemm(rows, rows)


def goes_on_late(folder: Path) -> list[str]:
    """Rank 1 stops before its kernels start; what it then writes into memory of rank 0, and what it
    raises. Its watchdog says nothing until the kernels are over."""
    world = mkernel.world()
    gathers()
    world.barrier()
    world.set_timeout(TIMEOUT_S)
    if world.rank == 0:
        with pytest.raises(Timeout):
            gathers()
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        awaited(folder / "over")
        return []
    found: list[str] = []
    late(world, folder, found)
    with contextlib.suppress(Timeout):  # its own part may come to an end
        gathers()
    with pytest.raises(Timeout, match="rank 0"):
        world.barrier()
    (folder / "over").touch()
    return found


def late(world: Any, folder: Path, found: list[str]) -> None:
    """Stop in the launch of the next call."""
    accelerator, watchdog = world.accelerator, world._failure._watchdog
    launch, heard, over = accelerator.launch, watchdog._on_notice, threading.Event()

    def hear(notice: object) -> None:
        over.wait(LONG_S)
        heard(notice)

    def launched(call: Call) -> Launch:
        watchdog._on_notice = hear
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "pid").rename(folder / "stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        before = theirs(call)
        begun: Launch = launch(call)
        began = time.monotonic()
        while not begun.wait(0.1) and time.monotonic() - began < 2 * TIMEOUT_S:
            pass
        found.extend(name for name, told in theirs(call).items() if told != before[name])
        over.set()
        return begun

    accelerator.launch = launched


def theirs(call: Call) -> dict[str, bytes]:
    """Signals of rank 0, and the begin of its workspace."""
    peer = call.peers[0]
    return {
        "signals": ctypes.string_at(peer.pad + 4096, 1 << 16),
        "workspace": ctypes.string_at(peer.workspace, 1 << 14),
    }


def awaited(file: Path) -> None:
    end = time.monotonic() + LONG_S
    while not file.exists():
        assert time.monotonic() < end, f"no {file.name}"
        time.sleep(0.01)


def test_it_writes_into_no_memory_of_ranks_that_have_left(tmp_path: Path) -> None:
    told = mkernel.launch(
        goes_on_late, tmp_path, ranks_per_node=2, accelerator="ascend", timeout_s=LONG_S
    )
    assert told == [[], []]


def starts_late(folder: Path) -> tuple[int, int]:
    """Rank 1 stops before a call that native code would start, and its watchdog says nothing. How many
    calls native code started before that, and then."""
    world = mkernel.world()
    started = world.accelerator.started  # type: ignore[attr-defined]
    reduces()
    reduces()
    world.synchronize()
    known = len(started)
    world.barrier()
    world.set_timeout(TIMEOUT_S)
    if world.rank == 0:
        reduces()
        with pytest.raises(Timeout):
            world.synchronize()
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        awaited(folder / "over")
        return known, 0
    world._failure._watchdog._on_notice = lambda notice: None
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "pid").rename(folder / "stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with pytest.raises(Timeout):
            reduces()
    finally:
        (folder / "over").touch()
    return known, len(started) - known


def reduces() -> None:
    rows = torch.ones(64, 64)
    mkernel.gemm_all_reduce(rows, rows)


def test_native_code_starts_no_call_of_a_world_that_was_given_up(tmp_path: Path) -> None:
    told = mkernel.launch(
        starts_late,
        tmp_path,
        ranks_per_node=2,
        accelerator="starting_backend:Starting",
        timeout_s=LONG_S,
    )
    assert told == [(1, 0), (1, 0)]
