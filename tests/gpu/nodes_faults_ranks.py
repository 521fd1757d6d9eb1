"""What rank processes of test_nodes_faults run: calls with a fault beneath the kernels, on two nodes of
one rank each.

A kernel learns of other nodes by words of its rank's signal pad, to which the proxy adds one for each
arrival (``cuda/device/network.cuh``). So a word to which this process adds one more is an arrival
that is counted once too often, whatever the NIC: from then on each call is told that its bytes are
there when those of the call before are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from calls import LATE_S, captured, spin
from hopper_ranks import Shape
from in_world import stores

import mkernel
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.transport import _transport

OVER_AT = 0
"""The first word that says that a rank needs nothing of a call any more: rank 0, then the others."""
ARRIVALS = range(32, 32 + 1024)
"""More than a test's shapes use, of every kind."""


def count_more(op: str, words: Sequence[int], times: int) -> None:
    """Add so much to each of these words of the own pad."""
    pad = mkernel.world().engine(op).heap.pad
    for word in words:
        _transport.pad_add(pad, word, times)


def told_early(port: int, shape: Shape, turns: int, planted: bool, graph: bool) -> list[str]:
    """Failures of calls on fresh inputs for which rank 1 is late, where rank 0 counts each arrival of
    the first one twice; the calls are replays of one graph, or not. Rank 0's later calls then end
    before rank 1 begins them, so that what rank 0 read cannot be right."""
    rank, (store, _) = mkernel.world().rank, stores(port)
    work = shape.work()
    work.fill(turns)
    recorded, results = captured([work.call]) if graph else (None, [])
    failures = []
    for turn in range(turns):
        work.fill(turn)
        if rank == 1 and planted and turn > 0:
            store.wait([f"call {turn} of rank 0"], timedelta(seconds=20))
        elif rank == 1:
            spin(LATE_S)
        if recorded is not None:
            recorded.replay()
        result = results[0] if results else work.call()
        torch.cuda.synchronize()  # the world knows of no replays
        mkernel.synchronize()
        if rank == 0:
            store.set(f"call {turn} of rank 0", "ended")
        failures += work.failure(turn, result)
        if planted and turn == 0 and rank == 0:
            count_more(shape.op, [OVER_AT + 1, *ARRIVALS], 1)
    mkernel.synchronize()
    return failures


def reused_early(port: int, shape: Shape, planted: bool) -> list[str]:
    """Failures of rank 0's calls, for which it is late. Rank 1 counts what rank 0 tells it twice too
    often, and so puts the rows of its third call where rank 0 has yet to read those of the second."""
    rank, (store, _) = mkernel.world().rank, stores(port)
    work, nic = shape.work(), mkernel.world().nic
    assert nic is not None
    failures = []
    for turn in range(3):
        work.fill(turn)
        if rank == 0 and planted and turn == 1:
            store.wait(["calls of rank 1"], timedelta(seconds=20))
        elif rank == 0:
            spin(LATE_S)
        result = work.call()
        mkernel.synchronize()
        if rank == 0:
            failures += work.failure(turn, result)
        elif planted and turn == 0:
            count_more(shape.op, [OVER_AT, *ARRIVALS], 2)
    if rank == 1:
        assert nic.flush(10)
        store.set("calls of rank 1", "ended")
    mkernel.synchronize()
    return failures


def asking_the_driver(shape: Shape, turns: int) -> list[str]:
    """Failures of calls in whose middle the rank gives memory back, which waits for the running kernel,
    which waits for the other rank's bytes: that rank is late."""
    rank, size = mkernel.world().rank, mkernel.world().size
    work, failures = shape.work(), []
    for turn in range(turns):
        work.fill(turn)
        spare = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        del spare
        if turn % size == rank:
            time.sleep(5 * LATE_S)
        result = work.call()
        torch.cuda.empty_cache()
        mkernel.synchronize()
        failures += work.failure(turn, result)
    return failures


def of_each(shapes: Sequence[Shape]) -> list[list[str]]:
    """Failures of a call of each shape."""
    found = []
    for work in [shape.work() for shape in shapes]:
        work.fill(0)
        result = work.call()
        mkernel.synchronize()
        found.append(work.failure(0, result))
    return found


def unflushed(shapes: Sequence[Shape], flush: bool) -> list[str]:
    """Failures on an emulated NIC that holds back what it wrote until a flush; it may be left out."""
    if not flush:
        DeviceMemory.flush = lambda self: 0  # type: ignore[method-assign]
    return [text for failures in of_each(shapes) for text in failures]
