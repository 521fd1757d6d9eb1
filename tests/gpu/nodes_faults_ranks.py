"""What rank processes of test_nodes_faults run: calls with a fault beneath the kernels, on two nodes of
one rank each.

A kernel learns of other nodes by words of its rank's signal pad, to which the proxy adds one for each
arrival (``hopper/device/network.cuh``). So a word to which this process adds one more is an arrival
that is counted once too often, whatever the NIC: from then on each call is told that its bytes are
there when those of the call before are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hopper_ranks import LATE_S, Shape, Work, spin

import mkernel
from mkernel.backends.cuda.memory import DeviceMemory
from mkernel.backends.transport import _transport

FIRST_ARRIVAL = 32
"""The words before say that ranks need nothing of a call any more: word r for rank r."""
ARRIVALS = range(FIRST_ARRIVAL, FIRST_ARRIVAL + 1024)
"""More than a test's shapes use, of every kind."""


def count_once_more(op: str, words: Sequence[int]) -> None:
    """Add 1 to each of these words of the own pad."""
    pad = mkernel.world().engine(op).heap.pad
    for word in words:
        _transport.pad_add(pad, word, 1)


def told_early(shape: Shape, turns: int, planted: bool, graph: bool) -> list[str]:
    """Failures of calls on fresh inputs for which rank 1 is late, where rank 0 counts each arrival of
    the first one twice; the calls are replays of one graph, or not."""
    rank = mkernel.world().rank
    work = Work(shape)
    call = _recorded(work) if graph else work.call
    failures = []
    for turn in range(turns):
        work.fill(turn)
        if rank == 1:
            spin(LATE_S)
        result = call()
        mkernel.synchronize()  # before what loads kernels or takes memory: see docs/softverbs.md
        failures += work.failure(turn, result)
        if planted and turn == 0 and rank == 0:
            count_once_more(shape.op, ARRIVALS)
    mkernel.synchronize()
    return failures


def _recorded(work: Work) -> Callable[[], torch.Tensor]:
    """One call's graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work.fill(1_000)
        work.call()  # plans and memory are made outside of the capture
    mkernel.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work.call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def unflushed(shapes: Sequence[Shape], flush: bool) -> list[str]:
    """Failures on an emulated NIC that holds back what it wrote until a flush; it may be left out."""
    if not flush:
        DeviceMemory.flush = lambda self: 0  # type: ignore[method-assign]
    failures = []
    for work in [Work(shape) for shape in shapes]:
        work.fill(0)
        result = work.call()
        mkernel.synchronize()
        failures += work.failure(0, result)
    return failures
