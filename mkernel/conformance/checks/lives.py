"""Checks of worlds that follow one another in one process."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import START_TIMEOUT_S, AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical, typical_of_each
from mkernel.conformance.ranks import Judge, meeting_place, where
from mkernel.errors import PeerFailure, Unsupported, WorldError
from mkernel.world.world import World


def _next_world(last: World, port: int) -> World:
    """Join a new world like the last one, however busy the machine is."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    one, two = (
        TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False) for _ in range(2)
    )
    names = last.backends
    made = mkernel.init(
        nodes=last.identity.nodes,
        ranks_per_node=last.identity.ranks_per_node,
        accelerator=names.accelerator,
        nic=names.nic,
        verbs=names.verbs,
        settings=last.settings,
        timeout_s=START_TIMEOUT_S,
        stores=(one, two),
    )
    made.set_timeout(last.settings.timeout_s)
    return made


def two_worlds(subject: AcceleratorSubject) -> None:
    """Make calls, another world with the same and other calls, and a third."""
    for world in subject.usual_worlds():
        cases = typical_of_each(subject, world)
        with meeting_place() as port:
            subject.judge(rank_two_worlds, cases, port, world=world)


def rank_two_worlds(cases: Sequence[Case], port: int) -> list[str]:
    """Judge calls in three worlds in turn."""
    found = []
    for number in range(3):
        world = mkernel.world()
        for case in cases if number % 2 == 0 else tuple(reversed(cases)):
            judge = Judge(case)
            for iteration in (2 * number, 2 * number + 1):
                found += [f"world {number + 1}: {text}" for text in judge(iteration)]
        mkernel.finalize()
        if number < 2:
            _next_world(world, port)
    return found


def after_failure(subject: AcceleratorSubject) -> None:
    """Let a rank raise between calls; the others must get an error; then all make a new world."""
    for world in subject.worlds((1, 2), *([] if subject.quick else [subject.largest()])):
        for op in subject.claimed_in(world)[: 2 if subject.quick else None]:
            case = typical(subject, op, world[0] * world[1])
            with meeting_place() as port:
                subject.judge(rank_after_failure, case, port, world=world)


def rank_after_failure(case: Case, port: int) -> list[str]:
    """Call until the last rank, which gives up after one call, has left; then judge calls in a new
    world."""
    world, judge = mkernel.world(), Judge(case)
    found = judge(0)
    world.barrier()  # else it could end what others still have of this call
    if world.rank == world.size - 1:
        mkernel.finalize(RuntimeError("planned by the kit"))
    else:
        try:
            for iteration in range(1, 1000):
                judge(iteration)
            found.append(f"{where()}: a world that a rank has left goes on")
        except PeerFailure:
            pass
        except WorldError as error:
            found.append(
                f"{where()}: raises {type(error).__name__} for a rank that failed: {error}"
            )
        mkernel.finalize()
    _next_world(world, port)
    for iteration in range(1000, 1003):
        found += [f"in the world after a failure: {text}" for text in judge(iteration)]
    return found


def leaks(subject: AcceleratorSubject) -> None:
    """Make worlds and end them; descriptors, threads and shared memory must not pile up, even if
    Python's cyclic collector does not run."""
    for world in subject.usual_worlds():
        cases = typical_of_each(subject, world)
        with meeting_place() as port:
            subject.judge(rank_leaks, cases, port, world=world)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's cyclic collector, which programs may turn off, from freeing what worlds leave."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _held() -> dict[str, int]:
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        shared += " rw-s " in line
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared mappings": shared,
    }


_WORLDS = 5
_SETTLED = 2
"""The number of worlds after which everything that is made only once has been made."""
_ENDING_S = 5.0
"""The longest time that a thread may take to end once it was told to, on a busy machine."""
_LOOK_S = 0.1


def held_at_rest() -> dict[str, int]:
    """Count what is held once two looks in a row find the same."""
    held, late = _held(), time.monotonic() + _ENDING_S
    while time.monotonic() < late:
        time.sleep(_LOOK_S)
        before, held = held, _held()
        if held == before:
            break
    return held


def piled_up(before: Mapping[str, int], least: int) -> dict[str, int]:
    """Report what stays at least ``least`` more than ``before``, and by how many."""
    late = time.monotonic() + _ENDING_S
    while True:
        more = {what: count - before[what] for what, count in _held().items()}
        found = {what: count for what, count in more.items() if count >= least}
        if not found or time.monotonic() > late:
            return found
        time.sleep(_LOOK_S)


def rank_leaks(cases: Sequence[Case], port: int) -> list[str]:
    """Compare what is held after the second world with what is held after the last but one."""
    before: dict[str, int] = {}
    found: dict[str, int] = {}
    with without_collector():
        for number in range(1, _WORLDS + 1):
            world = mkernel.world()
            for case in cases:
                case.run(Judge(case).inputs(number - 1))
            with suppress(Unsupported):  # not every backend shows its memory as a tensor
                mkernel.empty((1024,), torch.float32)
            if number < _WORLDS:
                mkernel.finalize()
                if number == _SETTLED:
                    before = held_at_rest()
                elif number == _WORLDS - 1:
                    found = piled_up(before, number - _SETTLED)
                _next_world(world, port)
    worlds = f"after {_WORLDS - 1} worlds than after {_SETTLED}"
    return [f"{where()}: {count} more {what} {worlds}" for what, count in found.items()]


CHECKS = (
    Check("two-worlds", "worlds may follow one another in one process", two_worlds),
    Check("after-failure", "a failed world leaves the process usable", after_failure),
    Check("leaks", "a world that is gone holds nothing any more", leaks),
)
