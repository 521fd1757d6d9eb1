"""Life after life: a world's ranks, one of which is killed at the end of each and replaced."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from campaigns.flat import limits
from campaigns.life import NOTICED_S, TIMEOUT_S, Life, live
from campaigns.life_judge import Ended, judge, over_lives
from campaigns.neighbour import neighbour
from campaigns.planted import Planted
from campaigns.pool import Member
from campaigns.sample import Sample

from mkernel import fork_server
from mkernel.launch import host_store

_BEYOND_S = 120.0
"""Within which ranks say how a life ended, beyond all deadlines of its worlds."""
_JOINING_S = 120.0
"""Within which all ranks are warm, on a machine that is busy."""
_IMPORTED = ("mkernel.backends.accelerators.ascend", "mkernel.backends.accelerators.streams")

_OF_OTHERS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "LRU_CACHE_CAPACITY": "8",
    "TORCH_FR_BUFFER_SIZE": "64",
    "NCCL_RAS_ENABLE": "0",
}
"""What libraries would keep, or open late, so that a leak of ours could not be told from it.

- Programs that torch compiles for products of half precision on CPUs, one for each number of rows:
  it keeps 1,024 of each kind, which take hundreds of MiB, and come in thousands of calls (a loop of
  ``torch.mm`` alone: 489 MiB in 2,400 calls; with these 4 MiB in 30, then flat).
- Records of the last 2,000 collectives of NCCL, which torch's flight recorder keeps: a life of a minute
  makes about as many, and what malloc has given out grows with each.
- Sockets of NCCL's RAS, by which processes of a job watch each other as long as they live. One that
  joins a ring with a dead process in it opens another socket once it has not reached that for five
  seconds.
"""


def libraries() -> dict[str, str]:
    """Return these settings; those of the environment go first."""
    return {name: os.environ.get(name, value) for name, value in _OF_OTHERS.items()}


@dataclass(frozen=True)
class Plan:
    """A soak, drawn from its seed.

    Attributes:
        seconds: in all. life_s: of one life, at whose end a rank is killed.
        lives: at most. ranks, step_calls, cases: as :class:`campaigns.life.Life` has them.
        beside: how many other soaks use the same devices meanwhile.
        planted: a mistake of the last rank in the first life, after so many calls.
    """

    seed: int
    accelerator: str
    seconds: float
    life_s: float = 60.0
    ranks: int = 3
    lives: int | None = None
    step_calls: int = 12
    cases: int = 4
    beside: int = 0
    planted: Planted | None = None
    planted_after: int = 0

    @property
    def allowed(self) -> dict[str, int]:
        """Return by how many bytes each kind of memory may grow."""
        return limits(self.accelerator, self.beside)


@dataclass
class Soaked:
    """The samples of each process between its lives, by its number."""

    processes: dict[int, list[Sample]] = field(default_factory=dict)
    neighbour: list[str] = field(default_factory=list)


def soak(plan: Plan, folder: Path, soaked: Soaked) -> Iterator[tuple[Ended, list[str]]]:
    """Yield each life and what was wrong with it. ``soaked`` gets what only the whole soak shows."""
    fork_server.also_imported[:] = [*_IMPORTED, "campaigns.life"]
    os.environ.update(libraries())  # before the server starts, whose forks ranks are
    members: dict[int, Member] = {}
    beside = _Beside()
    made = 0
    end = time.monotonic() + plan.seconds
    number = 0
    try:
        while True:
            for rank in range(plan.ranks):
                if rank not in members:
                    members[rank] = Member(made, folder, live)
                    made += 1
            left_s = end - time.monotonic()
            last = left_s < 1.5 * plan.life_s or number + 1 == plan.lives
            life = _Played(plan, number, members, min(left_s, plan.life_s) if last else None)
            ended = life.play()
            for rank, lived in ended.lived.items():
                if lived.after is not None:
                    soaked.processes.setdefault(members[rank].number, []).append(lived.after)
            for rank in set(members) - set(ended.lived):
                members.pop(rank).end()
            wrong = judge(ended) + beside.problems()
            yield ended, wrong
            if last:
                return
            number += 1
    finally:
        for member in members.values():
            member.end()
        beside.end()


def overall(plan: Plan, soaked: Soaked) -> list[str]:
    """Return what is wrong with the whole soak."""
    return over_lives(soaked.processes, plan.allowed)


class _Beside:
    """The second process, which works on the same device or CPUs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=neighbour, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def problems(self) -> list[str]:
        """Return what it found wrong with its own results since the last call."""
        found: list[str] = []
        if not self._process.is_alive():
            return [f"the process beside them ended with {self._process.exitcode}"]
        while self._pipe.poll():
            found.append(self._pipe.recv())
        return found

    def end(self) -> None:
        """End the process; it is gone when this returns."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class _Played:
    """One life under way."""

    def __init__(
        self, plan: Plan, number: int, members: dict[int, Member], seconds: float | None
    ) -> None:
        """``seconds``: after which all leave; None: one is killed."""
        chance = random.Random(f"{plan.seed}/{number}/end")
        self.ended = Ended(number, plan.allowed)
        self._members = members
        self._victim = chance.randrange(plan.ranks) if seconds is None else None
        self._kill_after_s = plan.life_s * chance.uniform(0.75, 1.0)
        self._due: float | None = None
        self._store, port = host_store(plan.ranks, TIMEOUT_S)
        lasts = plan.life_s if seconds is None else max(0.0, seconds)
        self._end = time.monotonic() + lasts + TIMEOUT_S + NOTICED_S + _JOINING_S + _BEYOND_S
        for rank, member in members.items():
            planted = plan.planted if number == 0 and rank == plan.ranks - 1 else None
            member.pipe.send(
                Life(
                    plan.seed,
                    number,
                    rank,
                    plan.ranks,
                    port,
                    plan.accelerator,
                    seconds,
                    plan.step_calls,
                    plan.cases,
                    planted,
                    plan.planted_after,
                )
            )

    def play(self) -> Ended:
        """Wait until all ranks have reported, or are gone."""
        while waited := self._open():
            now = time.monotonic()
            if now > self._end:
                for rank in waited:
                    self.ended.silent[rank] = self._members[rank].where()
                break
            self._strike(now)
            pipes = {self._members[rank].pipe: rank for rank in waited}
            for pipe in wait(list(pipes), 0.2):
                self._receive(pipes[pipe], pipe)
        self._store = None
        return self.ended

    def _open(self) -> list[int]:
        known = self.ended.lived.keys() | self.ended.died.keys()
        return [rank for rank in self._members if rank not in known]

    def _strike(self, now: float) -> None:
        if self._victim is None or self.ended.victim is not None:
            return
        if self._due is None and len(self.ended.samples) == len(self._members):
            self._due = now + self._kill_after_s  # all are warm
        if self._due is not None and now > self._due:
            self.ended.victim, self.ended.killed_at = self._victim, now
            self._members[self._victim].strike(signal.SIGKILL)

    def _receive(self, rank: int, pipe: Any) -> None:
        try:
            kind, told = pipe.recv()
        except (EOFError, ConnectionError):
            member = self._members[rank]
            member.process.join(5)
            self.ended.died[rank] = f"exit code {member.process.exitcode}"
            if rank != self.ended.victim and member.log.exists():
                self.ended.died[rank] += f"\n{member.log.read_text()}"
            return
        if kind == "stage":
            self.ended.samples.setdefault(rank, []).append(told)
        else:
            self.ended.lived[rank] = told
