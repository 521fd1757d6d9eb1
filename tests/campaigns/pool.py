"""The campaign's rank processes as its driver sees them: started, given parts, struck, replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from campaigns.dead_memory import DeadMemory
from campaigns.draw import Turn
from campaigns.faults import Stage
from campaigns.planted import Planted
from campaigns.rank import MOST_S, Part, live, play
from campaigns.turn_judge import Outcome

from mkernel import fork_server
from mkernel.launch import host_store

_BRIEFLY_S = 3.0
"""How long a rank is stopped at most that must not be missed."""
_BEYOND_S = 60.0
"""Within which a rank says how its part ended, beyond all deadlines of its world."""
_IMPORTED = ("mkernel.backends.accelerators.ascend", "mkernel.backends.accelerators.streams")


class Member:
    """One rank process, which plays the parts that it is sent (:func:`campaigns.rank.live`)."""

    def __init__(self, number: int, folder: Path, play: Callable[..., Any] = play) -> None:
        self.number = number
        self.log = folder / f"process-{number}.log"
        self.worlds = 0
        context = fork_server.context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=live, args=(theirs, str(self.log), str(folder), play), daemon=True
        )
        self.process.start()
        theirs.close()

    def strike(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def where(self) -> str:
        """The stacks of its threads, where it is."""
        self.strike(signal.SIGCONT)
        self.strike(signal.SIGUSR1)
        time.sleep(0.5)
        return self.log.read_text() if self.log.exists() else "no log"

    def end(self) -> None:
        """It is gone when this returns."""
        self.pipe.close()
        self.strike(signal.SIGCONT)
        self.process.join(2.0)
        self.process.kill()
        self.process.join()
        self.process.close()


class Pool:
    """The processes that live; a killed one is replaced when it is next wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[Member] = []
        self._made = 0
        fork_server.also_imported[:] = [*_IMPORTED, "campaigns.rank"]
        os.environ["TORCH_CPP_LOG_LEVEL"] = (
            "ERROR"  # it warns of each store that is lost, at length
        )

    def take(self, count: int) -> list[Member]:
        """So many idle ones, those that have lived longest first."""
        while len(self._idle) < count:
            self._idle.append(Member(self._made, self._folder))
            self._made += 1
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def fallen(self) -> list[str]:
        """What became of processes that ended with nothing to do; they are replaced."""
        gone = [member for member in self._idle if not member.process.is_alive()]
        self._idle = [member for member in self._idle if member not in gone]
        return [
            f"process {member.number} ended between two worlds with {member.process.exitcode}:\n"
            f"{member.log.read_text()}"
            for member in gone
        ]

    def give_back(self, members: list[Member]) -> None:
        self._idle = [*members, *self._idle]
        while len(self._idle) > 6:
            self._idle.pop().end()

    def close(self) -> None:
        for member in self._idle:
            member.end()
        self._idle.clear()


class Scene:
    """One turn under way: its ranks' processes, and what has come of it so far."""

    def __init__(
        self,
        pool: Pool,
        turn: Turn,
        planted: Planted | None = None,
        beyond_s: float = MOST_S + _BEYOND_S,
    ) -> None:
        """``planted``: what its last rank does wrong. ``beyond_s``: how long a rank may say nothing,
        beyond the deadline of its world."""
        self.turn = turn
        self.outcome = Outcome()
        self._dead = DeadMemory()
        self._pool = pool
        self._members = dict(enumerate(pool.take(turn.world.size)))
        self._reached: dict[int, set[str]] = {rank: set() for rank in self._members}
        self._todo: list[tuple[Stage, float, Callable[[], None]]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._store, port = host_store(turn.world.size, turn.timeout_s)
        self._end = time.monotonic() + turn.timeout_s + beyond_s
        for rank, member in self._members.items():
            member.worlds += 1
            wrong = planted if rank == turn.world.size - 1 else None
            member.pipe.send(Part(turn, rank, port, wrong))
        if turn.fault.of.by == "driver":
            self.at(turn.fault.stage, turn.fault.delay_s, self._strike)

    def at(self, stage: Stage, delay_s: float, action: Callable[[], None]) -> None:
        """Do something so long after all ranks have reached a stage (or the first, the last one)."""
        self._todo.append((stage, delay_s, action))

    def _strike(self) -> None:
        fault = self.turn.fault
        self.outcome.struck_at = time.monotonic()
        if fault.kind == "store-lost":
            self._store = None
            return
        how = signal.SIGINT if fault.kind == "interrupted" else signal.SIGSTOP
        how = signal.SIGKILL if fault.of.dies else how
        for rank in fault.victims:
            self._members[rank].strike(how)
        if fault.kind == "stopped-briefly":
            again = self.outcome.struck_at + fault.amount * _BRIEFLY_S
            self._due.append((again, self.resume))

    def resume(self) -> None:
        """Let stopped ranks go on; what they find of a world that has ended is poisoned."""
        if self.turn.fault.resumes:
            self._dead.poison()
        self._end = max(self._end, time.monotonic() + self.turn.timeout_s + _BEYOND_S)
        for rank in self.turn.fault.victims:
            if rank in self._members:
                self._members[rank].strike(signal.SIGCONT)

    def play(self, without: tuple[int, ...] = ()) -> None:
        """Go on until all ranks but those ``without`` have said what came of it, or are gone."""
        while waited := [rank for rank in self._open() if rank not in without]:
            now = time.monotonic()
            self._act(now)
            if self.turn.fault.resumes and self.outcome.struck_at:
                others = [rank for rank in waited if rank not in self.turn.fault.victims]
                self._dead.keep([self._members[rank].process.pid or 0 for rank in others])
            if now > self._end:
                for rank in waited:
                    self._give_up(rank)
                return
            soon = min([self._end, now + 1.0, *(due for due, _ in self._due)])
            pipes = {self._members[rank].pipe: rank for rank in self._open()}
            for pipe in wait(list(pipes), max(0.0, soon - now)):
                self._receive(pipes[pipe], pipe)

    def _open(self) -> list[int]:
        known = self.outcome.told.keys() | self.outcome.died.keys() | self.outcome.silent.keys()
        return [rank for rank in self._members if rank not in known]

    def _act(self, now: float) -> None:
        for one in list(self._todo):
            stage, delay_s, action = one
            there = [
                stage in reached or rank in self.outcome.told
                for rank, reached in self._reached.items()
            ]
            if any(there) if stage == "leave" else all(there):
                self._todo.remove(one)
                self._due.append((now + delay_s, action))
        for each in sorted(self._due, key=lambda due: due[0]):
            if each[0] <= now:
                self._due.remove(each)
                each[1]()

    def _receive(self, rank: int, pipe: Any) -> None:
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            process = self._members[rank].process
            process.join(5)
            self.outcome.died[rank] = f"exit code {process.exitcode}"
            if rank not in self.turn.fault.victims or not self.turn.fault.of.dies:
                self.outcome.died[rank] += f"\n{self._members[rank].where()}"
            return
        if kind == "stage":
            self._reached[rank].add(value)
            if value == "leave":
                self.outcome.leaving.add(rank)
        else:
            self.outcome.told[rank] = value

    def _give_up(self, rank: int) -> None:
        self.outcome.silent[rank] = self._members[rank].where()

    def written_late(self) -> list[str]:
        """What resumed ranks have written into memory of the world that had ended without them."""
        return self._dead.written()

    def close(self) -> None:
        """Give processes back that can take another part; end the others."""
        if self.turn.fault.kind == "stopped-briefly":  # perhaps as its part ended
            self.resume()
        fault = self.turn.fault
        killed = fault.victims if fault.of.dies and self.outcome.struck_at else ()
        good = self.outcome.told.keys() - {*killed}  # one may have told before it was struck
        for rank, member in self._members.items():
            if rank not in good:
                member.end()
        given = [self._members[rank] for rank in sorted(good)]
        self._members.clear()
        self._store = None
        self._pool.give_back(given)
