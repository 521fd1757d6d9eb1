"""Calls wait for what they need, and for nothing less."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence

import mkernel
from mkernel.backends.base import View
from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge, describe, seconds_apart
from mkernel.launch import report

_LATE_S = 0.25


def waits(subject: AcceleratorSubject) -> None:
    """One rank calls late: nobody can be done before it has called, and all get the truth."""
    found: list[str] = []
    for world in subject.usual_worlds():
        size = world[0] * world[1]
        late = range(size) if not subject.quick else (size - 1,)
        cases = [typical(subject, op, size) for op in subject.claimed()]
        told = subject.launch(rank_late, cases, tuple(late), world=world)
        found += [text for _, problems in told for text in problems]
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
    blame(found)


def rank_late(
    cases: Sequence[Case], late: Sequence[int]
) -> tuple[list[tuple[float, float]], list[str]]:
    """When each call was entered and left, on the clock that all processes share; what was wrong.

    Plans are known before (ranks meet in a plan's first call whatever the backend does).
    """
    world = mkernel.world()
    times, found = [], []
    for case in cases:
        judge = Judge(case)
        found += judge(0)
        for iteration, last in enumerate(late, 1):
            inputs = judge.inputs(iteration)
            outputs = case.poisoned(inputs)
            world.barrier()
            if world.rank == last:
                time.sleep(_LATE_S)
            called = time.monotonic()
            outcome = case.call(inputs, outputs)
            times.append((called, time.monotonic()))
            found += judge.problems(outcome, iteration)
    return times, found


def paused_ranks(subject: AcceleratorSubject) -> None:
    """Ranks are stopped in mid-call, again and again, while the others run ahead."""
    world = subject.largest()
    cases = [typical(subject, op, world[0] * world[1]) for op in subject.claimed()]
    with _Pauses(subject.seed) as pauses:
        told = subject.launch(
            rank_paused, cases, 6 if subject.quick else 30, world=world, on_report=pauses.add
        )
    blame([text for problems in told for text in problems])


def rank_paused(cases: Sequence[Case], calls: int) -> list[str]:
    """Call without pauses of its own; the kit's process stops this one now and then."""
    report(os.getpid())
    found = []
    for case in cases:
        judge = Judge(case)
        for iteration in range(calls):
            found += judge(iteration)
    return found


class _Pauses:
    """Stops one rank process at a time for some ten milliseconds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ranks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, rank: int, process: int) -> None:
        """A rank has said which process it is."""
        self._ranks[rank] = os.pidfd_open(process)

    def __enter__(self) -> _Pauses:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        for descriptor in self._ranks.values():
            os.close(descriptor)

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(0.005, 0.05)):
            known = list(self._ranks.values())
            if not known:
                continue
            victim = self._random.choice(known)
            try:
                signal.pidfd_send_signal(victim, signal.SIGSTOP)
                self._over.wait(self._random.uniform(0.02, 0.08))
                signal.pidfd_send_signal(victim, signal.SIGCONT)
            except ProcessLookupError:
                continue


def views(subject: AcceleratorSubject) -> None:
    """Pipelined and sequential calls give the truth, in any order; compute-only ones return."""
    world = subject.largest()
    cases = [typical(subject, op, world[0] * world[1]) for op in subject.claimed()]
    subject.judge(rank_views, cases, world=world)


_VIEWS: tuple[View, ...] = (
    "sequential", "pipelined", "compute_only", "pipelined", "compute_only", "sequential",
)  # fmt: skip


def rank_views(cases: Sequence[Case]) -> list[str]:
    """One call in each of the views above."""
    found = []
    for case in cases:
        judge = Judge(case)
        for iteration, view in enumerate(_VIEWS):
            seconds_apart(case, iteration, 0.01)
            outcome = case.run(judge.inputs(iteration), view=view)
            if view != "compute_only":
                found += [f"view {view}: {text}" for text in judge.problems(outcome, iteration)]
            if not outcome.record.times.seconds:
                found.append(f"{describe(case)}: view {view} tells no times")
    return found


CHECKS = (
    Check("waits", "no rank returns before the data it needs was sent", waits),
    Check("paused-ranks", "ranks that fall behind are not overrun", paused_ranks),
    Check("views", "all three views work, in any order", views),
)
