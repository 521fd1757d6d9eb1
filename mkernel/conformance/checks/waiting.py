"""Checks that calls wait for what they need, and for nothing less."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore

import mkernel
from mkernel.backends.contracts.instrumented import Instrumented, View
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import WORLD_TIMEOUT_S, AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import judge_typical, typical_of_each
from mkernel.conformance.ranks import Judge, describe, meeting_place, seconds_apart
from mkernel.harness.outcome import CheckSkipped
from mkernel.launch import report

_LATE_S = 1.0
"""The time for which a late rank stays away once all others are in the call."""


def waits(subject: AcceleratorSubject) -> None:
    """Let one rank call late: nobody may be done before it has called, and all must get the
    truth."""
    found: list[str] = []
    for world in subject.usual_worlds():
        size = world[0] * world[1]
        late = range(size) if not subject.quick else (size - 1,)
        cases = typical_of_each(subject, world)
        with meeting_place() as port:
            told = subject.launch(rank_late, cases, tuple(late), port, world=world)
        for number, (case, last) in enumerate((case, last) for case in cases for last in late):
            called, _ = told[last][0][number]
            early = [
                rank for rank in range(size) if rank != last and told[rank][0][number][1] < called
            ]
            if early:
                found.append(
                    f"{describe(case)} on {world[0]}x{world[1]}: rank {early[0]} returned before "
                    f"rank {last}, whose data it needs, had called: it does not wait"
                )
        found += [text for _, problems in told for text in problems]
    blame(found)


def rank_late(
    cases: Sequence[Case], late: Sequence[int], port: int
) -> tuple[list[tuple[float, float]], list[str]]:
    """Record when each call was entered and left, on the clock that all processes share; return
    these times and what was wrong.

    Plans are known before (ranks meet in a plan's first call whatever the backend does).
    """
    world = mkernel.world()
    others = TCPStore("127.0.0.1", port, wait_for_workers=False)
    times: list[tuple[float, float]] = []
    found: list[str] = []
    for case in cases:
        judge = Judge(case)
        found += judge(0)
        for iteration, last in enumerate(late, 1):
            inputs = judge.inputs(iteration)
            outputs = case.poisoned(inputs)
            world.barrier()
            if world.rank == last:
                _stay_away(others, len(times), world.size - 1)
            else:
                others.add(f"entered/{len(times)}", 1)
            called = time.monotonic()
            outcome = case.call(inputs, outputs)
            times.append((called, time.monotonic()))
            if world.rank != last:
                others.add(f"returned/{len(times) - 1}", 1)
            found += judge.problems(outcome, iteration)
    return times, found


def _stay_away(others: TCPStore, number: int, size: int) -> None:
    """Wait until all others have returned from a call, which they must not, or have been in it for
    long."""
    end = time.monotonic() + WORLD_TIMEOUT_S
    while others.add(f"entered/{number}", 0) < size and time.monotonic() < end:
        time.sleep(0.001)
    end = time.monotonic() + _LATE_S
    while others.add(f"returned/{number}", 0) < size and time.monotonic() < end:
        time.sleep(0.001)


def paused_ranks(subject: AcceleratorSubject) -> None:
    """Stop one rank for a while in every call, so that the others run ahead."""
    world = subject.largest()
    cases = typical_of_each(subject, world)
    with _Wakes(subject.seed) as wakes:
        told = subject.launch(
            rank_paused, cases, 6 if subject.quick else 30, world=world, on_report=wakes.add
        )
    blame([text for problems in told for text in problems])


def rank_paused(cases: Sequence[Case], calls: int) -> list[str]:
    """Stop this process when it is its turn, about when the call begins; the kit's process wakes
    it."""
    world = mkernel.world()
    report(os.getpid())
    found = []
    for case in cases:
        judge = Judge(case)
        for iteration in range(calls):
            drawn = random.Random(f"{case.seed} {case.op} {iteration}")  # the same on every rank
            victim, after_s = drawn.randrange(world.size), drawn.uniform(0, 0.005)
            stop = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGSTOP))
            if world.rank == victim:
                stop.start()
            found += judge(iteration)
            if world.rank == victim:
                stop.join()
    return found


class _Wakes:
    """Wakes rank processes that have stopped themselves, some ten milliseconds later."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ranks: dict[int, int] = {}  # process → descriptor of it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, rank: int, process: int) -> None:
        """Note which process a rank is, as it has reported."""
        self._ranks[process] = os.pidfd_open(process)

    def __enter__(self) -> _Wakes:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        for descriptor in self._ranks.values():
            os.close(descriptor)

    def _run(self) -> None:
        while not self._over.wait(0.002):
            for process, descriptor in list(self._ranks.items()):
                with suppress(ProcessLookupError, FileNotFoundError):
                    stat = Path(f"/proc/{process}/stat").read_text()
                    if stat.rpartition(")")[2].split()[0] == "T":
                        self._over.wait(self._random.uniform(0.06, 0.12))
                        signal.pidfd_send_signal(descriptor, signal.SIGCONT)


def views(subject: AcceleratorSubject) -> None:
    """Check that pipelined and sequential calls give the truth, in any order, and that compute-only
    ones return."""
    if not all(isinstance(backend, Instrumented) for backend in subject.backends):
        raise CheckSkipped("not instrumented: calls run as the product does, and tell no times")
    judge_typical(subject, rank_views, worlds=[subject.largest()])


_VIEWS: tuple[View, ...] = (
    "sequential", "pipelined", "compute_only", "compute_only", "pipelined", "compute_only",
    "sequential",
)  # fmt: skip
"""One and two calls without communication follow one with it, whichever parity their number has."""


def rank_views(case: Case) -> Iterator[str]:
    """Make one call in each of the views above."""
    judge = Judge(case)
    for iteration, view in enumerate(_VIEWS):
        seconds_apart(case, iteration, 0.01)
        outcome = case.run(judge.inputs(iteration), view=view)
        if view != "compute_only":
            for text in judge.problems(outcome, iteration):
                yield f"view {view}: {text}"
        if not outcome.record.times.seconds:
            yield f"{describe(case)}: view {view} tells no times"


CHECKS = (
    Check("waits", "no rank returns before the data it needs was sent", waits),
    Check("paused-ranks", "ranks that fall behind are not overrun", paused_ranks),
    Check("views", "all three views work, in any order", views),
)
