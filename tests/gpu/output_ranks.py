"""What rank processes on GPUs run of AllReduces into outputs that peers may write."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from calls import LATE_S, spin
from hopper_ranks import Shape

import mkernel
from mkernel.backends.accelerators.cuda.output_pool import OutputPool
from mkernel.backends.contracts.memory import SymmetricMemory

SHIFT = 64 << 10
FREED_S = 20.0


def pool() -> OutputPool:
    """The world's; from the first call on that wants one."""
    accelerator: Any = mkernel.world()._membership.engine.accelerator
    found: OutputPool = accelerator._open_session()._context.outputs
    return found


def place(result: torch.Tensor) -> tuple[int, int] | None:
    """Where peers write it."""
    return pool().memory.place_of(result.data_ptr(), result.nbytes)


def kept(
    shapes: Sequence[Shape], rounds: int, seed: int
) -> tuple[list[str], list[tuple[int, int] | None]]:
    """Failures of calls without ``out`` whose results each rank keeps for times of its own, and where
    these lay: at different places, or in ordinary memory where there was no room."""
    world = mkernel.world()
    works, chance = [shape.work() for shape in shapes], random.Random(1000 * seed + world.rank)
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []
    failures, places = [], []
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % (world.size + 1) == world.rank:
            spin(LATE_S / 4)
        result = work.public()
        failures += work.failure(turn, result, "kept")
        places.append(place(result))
        alive.append((result, result.clone()))
        del result
        while len(alive) > 5 or (alive and chance.random() < 0.6):
            mine, before = alive.pop(chance.randrange(len(alive)))
            if not torch.equal(mine, before):
                failures.append(f"rank {world.rank} turn {turn}: a result was written to later")
            del mine, before
    mkernel.synchronize()
    return failures, places


def queued(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """The same without any wait of the host between calls, on two streams by turns."""
    works, kept = [shape.work() for shape in shapes], []
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % work.world == work.rank:
            spin(LATE_S / 10)
        if turn % 3 == 2:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                result = work.public()
            main.wait_stream(side)
            result.record_stream(main)
        else:
            result = work.public()
        kept.append((work, turn, result.clone()))
    mkernel.synchronize()
    return [text for work, turn, result in kept for text in work.failure(turn, result, "queued")]


def replayed(shape: Shape, replays: int, own: bool) -> tuple[list[str], bool]:
    """Failures of a graph's calls, the first of which leaves free memory behind, with new inputs before
    every replay, and of other calls between; whether peers write its output. ``own``: the graph takes
    its memory from a pool of the world's."""
    work = shape.work()
    work.fill(0)
    for _ in range(2):
        work.public()
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=mkernel.graph_pool() if own else None):
        work.public()
        result = work.public()
    failures: list[str] = []
    between = at_first = result.clone()
    for turn in range(1, replays + 1):
        work.fill(turn)
        if turn % (work.world + 1) == work.rank:
            spin(LATE_S / 4)
        graph.replay()
        failures += work.failure(turn, result, "replayed")
        if not torch.equal(between, at_first):
            failures.append(f"turn {turn}: a replay wrote to the output of a call before it")
        before = result.clone()
        other = -turn % (1 << 31)
        work.fill(other)
        between = work.public()
        failures += work.failure(other, between, "between replays")
        at_first = between.clone()
        if not torch.equal(result, before):
            failures.append(f"turn {turn}: a call between replays wrote to the graph's output")
    mkernel.synchronize()
    return failures, place(result) is not None


def outlived(shape: Shape) -> list[str]:
    """What is wrong of a result behind the end of its world, whose memory goes with it."""
    work, failures = shape.work(), []
    work.fill(0)
    work.public()
    result = work.public()
    failures += work.failure(0, result)
    if place(result) is None:
        failures.append("the output is in ordinary memory")
    before = result.clone()
    mkernel.finalize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if not torch.equal(result, before):
        failures.append("the result went with its world")
    nbytes = result.nbytes
    del result
    torch.cuda.empty_cache()
    deadline = time.monotonic() + FREED_S
    while torch.cuda.mem_get_info()[0] - free < nbytes:
        if time.monotonic() > deadline:
            failures.append("the memory of outputs was not freed")
            break
        time.sleep(0.01)  # the other rank may have it mapped yet
    return failures


def shifted(shape: Shape) -> int:
    """Wrong results where peers take this rank's memory to begin elsewhere."""
    honest = OutputPool.add

    def add(self: OutputPool, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        rank = mkernel.world().rank
        moved = {each: at + SHIFT * (each != rank) for each, at in everywhere.items()}
        return honest(self, own, moved)

    OutputPool.add = add  # type: ignore[method-assign]
    try:
        work, failures = shape.work(), []
        for turn in range(4):
            work.fill(turn)
            failures += work.failure(turn, work.public())
        mkernel.synchronize()
        return len(failures)
    finally:
        OutputPool.add = honest  # type: ignore[method-assign]
