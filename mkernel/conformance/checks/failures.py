"""Checks of worlds that break: every rank must get the right error, and soon."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge, give_up_after
from mkernel.errors import MkernelError, WorldError
from mkernel.launch import report
from mkernel.plan.ops import COMPANIONS

_ABSENT_S = 1.5
"""The deadline of the ranks that wait for one that stays away."""
_Told = dict[int, tuple[str, float, str]]


def _outcomes(
    subject: AcceleratorSubject, case: Case, world: tuple[int, int], victim: int, action: str
) -> _Told:
    """Break a world, and collect what every rank but the victim raised: (error type, seconds,
    message)."""
    told: _Told = {}
    # Whatever the launcher raises, the ranks' own words are judged.
    with suppress(MkernelError):
        subject.launch(rank_outcome, case, victim, action, world=world, on_report=told.__setitem__)
    return told


def rank_outcome(case: Case, victim: int, action: str) -> None:
    """Call until the world breaks, and report the error that ended it."""
    world, judge = mkernel.world(), Judge(case)
    judge(0)
    inputs = judge.inputs(1)
    world.barrier()
    if world.rank == victim:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()  # nobody else comes to it: it ends when the world breaks
    if action == "absent":
        give_up_after(_ABSENT_S)
    start = time.monotonic()
    try:
        for _ in range(100_000):
            case.run(inputs)
        told = ("nothing", time.monotonic() - start, "")
    except WorldError as error:
        told = (type(error).__name__, time.monotonic() - start, str(error))
    report(told)
    raise WorldError("told")  # the launcher need not wait for the victim


def _judge(
    told: _Told, case: Case, size: int, victim: int, kind: str, within: tuple[float, float]
) -> list[str]:
    found = []
    for rank in range(size):
        if rank == victim:
            continue
        if rank not in told:
            found.append(f"{case.op}: rank {rank} did not notice, or not in time")
            continue
        name, seconds, message = told[rank]
        if name != kind:
            found.append(f"{case.op}: rank {rank} raised {name} instead of {kind}: {message}")
        elif not re.search(rf"\brank {victim}\b", message, re.IGNORECASE):
            found.append(f"{case.op}: rank {rank}'s {kind} does not name rank {victim}: {message}")
        elif not within[0] <= seconds <= within[1]:
            found.append(f"{case.op}: rank {rank} raised {kind} after {seconds:.1f} s")
    return found


def _broken(subject: AcceleratorSubject, action: str, kind: str) -> None:
    found = []
    world = subject.largest()
    size = world[0] * world[1]
    ops = [op for op in subject.claimed_in(world) if op not in COMPANIONS]
    for number, op in enumerate(ops[: 1 if subject.quick else None]):
        case = typical(subject, op, size)
        victim = 0 if number % 2 else size - 1
        soon_s = (
            subject.timeout_s / 2
        )  # much for a busy machine, less than a wait that is told nothing
        within = (0.0, soon_s)
        if action == "absent":
            within = (0.7 * _ABSENT_S, _ABSENT_S + soon_s)
        told = _outcomes(subject, case, world, victim, action)
        found += _judge(told, case, size, victim, kind, within)
    blame(found)


def killed_rank(subject: AcceleratorSubject) -> None:
    """Kill a rank; the others must raise PeerFailure, long before any time-out."""
    _broken(subject, "kill", "PeerFailure")


def absent_rank(subject: AcceleratorSubject) -> None:
    """Keep a rank alive that does not call; the others must raise Timeout at the deadline and name
    it."""
    _broken(subject, "absent", "Timeout")


CHECKS = (
    Check("killed-rank", "a killed rank is a PeerFailure everywhere, within seconds", killed_rank),
    Check("absent-rank", "a rank that does not come is a Timeout that names it", absent_rank),
)
