"""Worlds that break: every rank hears of it, soon, by the right name."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from typing import Any

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge
from mkernel.errors import MkernelError, WorldError
from mkernel.launch import report

_KILLED_WITHIN_S = 5.0
_ABSENT_S = 1.5
_TOLD_WITHIN_S = 3.0
_STANDING = "standing"
_Told = dict[int, tuple[str, float, str]]


def _outcomes(
    subject: AcceleratorSubject, case: Case, world: tuple[int, int], victim: int, action: str
) -> tuple[_Told, float]:
    """What every rank but the victim raised, (error type, seconds, message), and the deadline.

    A short deadline is also that of building the world. On a machine too busy for it the world is
    built again with a longer one: only worlds that have stood are judged.
    """
    told: _Told = {}
    timeout_s = _ABSENT_S if action == "absent" else 20.0
    for _ in range(3):
        told, standing = {}, set[int]()

        def take(
            rank: int, payload: Any, told: _Told = told, standing: set[int] = standing
        ) -> None:
            if payload == _STANDING:
                standing.add(rank)
            else:
                told[rank] = payload

        # Whatever the launcher raises, the ranks' own words are judged.
        with suppress(MkernelError):
            subject.launch(
                rank_outcome, case, victim, action, world=world, timeout_s=timeout_s, on_report=take
            )
        if len(standing) == world[0] * world[1]:
            break
        timeout_s *= 3
    return told, timeout_s


def rank_outcome(case: Case, victim: int, action: str) -> None:
    """Call until the world breaks, and report how."""
    world, judge = mkernel.world(), Judge(case)
    judge(0)
    inputs = judge.inputs(1)
    world.barrier()
    report(_STANDING)
    start = time.monotonic()
    if world.rank == victim:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(world.settings.timeout_s + _TOLD_WITHIN_S + 1)
        return
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
    ops = [op for op in subject.claimed() if op != "moe_combine"]
    for number, op in enumerate(ops[: 1 if subject.quick else None]):
        case = typical(subject, op, size)
        victim = 0 if number % 2 else size - 1
        told, deadline = _outcomes(subject, case, world, victim, action)
        within = (0.0, _KILLED_WITHIN_S)
        if action == "absent":
            within = (0.7 * deadline, deadline + _TOLD_WITHIN_S)
        found += _judge(told, case, size, victim, kind, within)
    blame(found)


def killed_rank(subject: AcceleratorSubject) -> None:
    """A rank is killed; the others raise PeerFailure, long before any time-out."""
    _broken(subject, "kill", "PeerFailure")


def absent_rank(subject: AcceleratorSubject) -> None:
    """A rank lives but does not call; the others raise Timeout at the deadline and name it."""
    _broken(subject, "absent", "Timeout")


CHECKS = (
    Check("killed-rank", "a killed rank is a PeerFailure everywhere, within seconds", killed_rank),
    Check("absent-rank", "a rank that does not come is a Timeout that names it", absent_rank),
)
