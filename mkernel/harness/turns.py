"""Contenders take turns, iteration by iteration, each on data of its own: the heart of a rank process.

A turn draws inputs and poisons outputs (:mod:`mkernel.harness.work`), is timed by a stopwatch
(:mod:`mkernel.harness.protocol`), and is then checked: every turn but those that warm up. A contender
that was wrong once is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from mkernel.cases import Comparison
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.harness.problem import Problem, Tensors
from mkernel.harness.protocol import Stopwatch
from mkernel.harness.work import Wanted, Work


@dataclass
class Turns:
    """What one rank found of one contender.

    Attributes:
        seconds: a call, of each timed turn. starts_ns: when these turns really began on this rank, by
            CLOCK_MONOTONIC; empty where that is not known.
        checks: by output, all comparisons added up. limits: the largest errors that count as right; an
            output that is missing there must be equal.
        absent: why it took no part. failed: what a peer raised; it left the row then.
    """

    seconds: list[float] = field(default_factory=list)
    checks: dict[str, Comparison] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    absent: str | None = None
    failed: str | None = None
    starts_ns: list[int] = field(default_factory=list)

    def add(self, found: dict[str, Comparison]) -> None:
        """Count the comparisons of one more result."""
        for name, each in found.items():
            before = self.checks.get(name)
            self.checks[name] = each if before is None else before + each


class Rotation:
    """The turns of one rank at one problem. Collective: ranks take every turn together.

    Args:
        turn: the number of the last turn before; every turn has inputs of its own.
        late: how many turns come after the timed ones in which a rank, each once, comes late to the
            call; these are checked and not timed.
        sampled: of large results only some rows are checked.
    """

    def __init__(
        self,
        problem: Problem,
        watch: Stopwatch,
        *,
        warmup: int,
        iterations: int,
        late: int = 0,
        turn: int = 0,
        sampled: bool = False,
    ) -> None:
        self.problem, self.turn = problem, turn
        self.found: dict[str, Turns] = {}
        self.entered: dict[str, Work] = {}
        self._watch, self._sampled = watch, sampled
        self._warmup, self._iterations, self._late = warmup, iterations, late

    def take_turns(self) -> dict[str, Turns]:
        """All turns of all contenders that entered."""
        for iteration in range(-self._warmup, self._iterations + self._late):
            for name in self.order(iteration):
                self._take_turn(name, iteration)
        for name, work in self.entered.items():
            with self.step(name, "closing"):
                work.close()
        return self.found

    def order(self, iteration: int) -> Iterable[str]:
        """Who takes turns in an iteration, one after another."""
        return list(self.entered)

    def step(self, name: str, what: str) -> AbstractContextManager[None]:
        """Work on a contender, named where it fails or hangs."""
        return nullcontext()

    def failed(self, name: str, error: Exception) -> None:
        """A contender raised: leave it out, or raise."""
        raise error

    def done(self, name: str) -> None:
        """A turn has ended."""

    def _take_turn(self, name: str, iteration: int) -> None:
        entered, found = self.entered[name], self.found[name]
        late = iteration - self._iterations  # the rank that is
        what = f"iteration {iteration}" if late < 0 else f"with rank {late} late"
        try:
            with self.step(name, what):
                wanted = entered.prepare(self.turn + 1)
                self.turn += len(wanted)
                found.limits = entered.limits()
                with self._memory(late >= 0):
                    timed = self._watch.time(name, entered.run, late=late == self.problem.rank)
        except Exception as error:
            self.failed(name, error)
            return
        self.done(name)
        if iteration < 0:
            return
        if late < 0:
            found.seconds.append(timed.seconds / entered.calls)
            if timed.started_ns is not None:
                found.starts_ns.append(timed.started_ns)
        with self.step(name, f"check of {what}"):
            for each, outputs in zip(wanted[-len(timed.results) :], timed.results, strict=True):
                self.check(name, each, outputs)

    def _memory(self, untimed: bool) -> AbstractContextManager[None]:
        """Where the op allocates its outputs, turns that are not timed can afford to have torch fill
        them."""
        fills = untimed and not self.problem.case.given_outputs
        return uninitialised_is_nan() if fills else nullcontext()

    def check(self, name: str, wanted: Wanted, outputs: Tensors) -> None:
        """Compare a result with the truth."""
        found = wanted.problem.compared(
            wanted.kind, outputs, wanted.turn, wanted.promised, sampled=self._sampled
        )
        self.found[name].add(found)
