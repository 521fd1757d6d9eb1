"""Contenders take turns, iteration by iteration, each on data of its own: the heart of a rank process.

A turn draws inputs and poisons outputs (:mod:`mkernel.harness.work`), is timed by a stopwatch
(:mod:`mkernel.harness.protocol`), and is then checked: every turn but those that warm up. A contender
that was wrong once is wrong. The order of peers alternates between iterations, and at the end each rank
in its turn comes late once; these turns are checked and not timed. Views take turns in their order: the
machine's mood hits all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Comparison
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.errors import ArgumentError, MkernelError, Unsupported
from mkernel.harness.contenders import OURS, named
from mkernel.harness.contenders.own import InView
from mkernel.harness.guard import Guard, Progress
from mkernel.harness.problem import Problem, Tensors
from mkernel.harness.protocol import Stopwatch
from mkernel.harness.spec import Job, Mode, size_text
from mkernel.harness.work import PARTS, OneCall, Unseen, Wanted, Work, checked, work
from mkernel.launch import report
from mkernel.world.lifecycle import current


class ContenderFailed(MkernelError, RuntimeError):
    """A contender raised; the message says which, where, and what it said. A peer that raises leaves
    its row (every rank's must); mkernel itself ends the run."""


@dataclass
class Turns:
    """The findings of one rank about one contender.

    Attributes:
        seconds: a call, of each timed turn. starts_ns: when these turns really began on this rank, by
            CLOCK_MONOTONIC; empty where that is not known.
        checks: by output, all comparisons added up. limits: the largest errors that count as right; an
            output that is missing there must be equal.
        way: which of several ways its calls take. absent: why it took no part. failed: what a peer
            raised; it left the row then.
        parts: of a view, the wall seconds of each timed call's ``comm`` and ``compute``. digest: of the
            plan that it launched. traces: instruction records of its traced call, where the backend
            keeps them (of MoE two, the dispatch's and the combine's).
    """

    seconds: list[float] = field(default_factory=list)
    checks: dict[str, Comparison] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    way: str = ""
    absent: str | None = None
    failed: str | None = None
    starts_ns: list[int] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    digest: str = ""
    traces: tuple[bytes, ...] = ()

    def add(self, found: dict[str, Comparison]) -> None:
        """Count the comparisons of one more result."""
        for name, each in found.items():
            before = self.checks.get(name)
            self.checks[name] = each if before is None else before + each


class Row:
    """The turns of one rank at one problem in one mode. Collective: ranks take every turn together.

    Args:
        guard: watches every step; None: the world's own deadlines are enough.
        turn: the number of the last turn before; every turn has inputs of its own.
    """

    def __init__(
        self,
        job: Job,
        mode: Mode,
        problem: Problem,
        watch: Stopwatch,
        guard: Guard | None,
        unseen: Unseen,
        turn: int,
    ) -> None:
        self._job, self._mode, self._problem, self.turn = job, mode, problem, turn
        self._watch, self._guard, self._unseen = watch, guard, unseen
        self._found = {name: Turns() for name in job.contenders}
        self._entered: dict[str, Work] = {}
        self._views: dict[str, InView] = {}

    def measure(self) -> dict[str, Turns]:
        """Take all turns of all contenders."""
        job = self._job
        for name in job.contenders:
            self._enter(name)
        late = 0 if job.views else self._problem.world
        for iteration in range(-job.warmup, job.iterations + late):
            names = list(self._entered)
            for name in names if job.views or iteration % 2 == 0 else reversed(names):
                self._take_turn(name, iteration)
        for name, entered in self._entered.items():
            with self._step(name, "closing"):
                entered.close()
        return self._found

    def traced(self) -> Tensors:
        """Make one more call, whose instructions the backend records; check it and return its outputs.

        It is not timed and can afford to have torch fill what the op allocates.
        """
        name: View = "pipelined"
        (wanted,) = self._entered[name].prepare(self.turn + 1)
        self._views[name].trace = True
        current().barrier()
        with uninitialised_is_nan():
            (outputs,) = self._entered[name].run()
        self._note(name)
        self._found[name].traces = self._views[name].outcome.traces
        self._check(name, [wanted], [outputs])
        return outputs

    def _enter(self, name: str) -> None:
        if self._job.views:
            self._views[name] = InView(self._problem, cast(View, name))
            self._entered[name] = OneCall(self._views[name])
            return
        kind, found = named(name), self._found[name]
        if kind.kind in PARTS and self._mode != "kernel":
            found.absent = "a part alone: timed in mode kernel"
            return
        found.absent = kind.unusable(self._problem)
        if found.absent is not None:
            return
        try:
            with self._step(name, "setting up"):
                self._entered[name] = work(self._mode, kind, self._problem, self._unseen)
                found.way = kind.way(self._problem)
        except (ContenderFailed, Unsupported) as error:
            self._failed(name, error)

    def _take_turn(self, name: str, iteration: int) -> None:
        entered, found = self._entered[name], self._found[name]
        late = iteration - self._job.iterations  # the rank that is
        what = f"iteration {iteration}" if late < 0 else f"with rank {late} late"
        try:
            with self._step(name, what):
                wanted = entered.prepare(self.turn + 1)
                self.turn += len(wanted)
                found.limits = entered.limits()
                with self._memory(late >= 0):
                    timed = self._watch.time(name, entered.run, late=late == self._problem.rank)
        except Exception as error:
            self._failed(name, error)
            return
        self._note(name)
        if iteration < 0:
            return
        if late < 0:
            found.seconds.append(timed.seconds / entered.calls)
            if timed.started_ns is not None:
                found.starts_ns.append(timed.started_ns)
            if name in self._views:
                found.parts.append(self._views[name].outcome.seconds)
        with self._step(name, f"check of {what}"):
            self._check(name, wanted, timed.results)

    def _note(self, name: str) -> None:
        """Note the end of a view's turn."""
        if name in self._views:
            self._found[name].digest = self._views[name].outcome.plan.digest()
            if self._problem.rank == 0:
                report(Progress(name))

    def _memory(self, untimed: bool) -> AbstractContextManager[None]:
        """Have torch fill what the op allocates, which turns that are not timed can afford."""
        fills = untimed and not self._problem.case.given_outputs
        return uninitialised_is_nan() if fills else nullcontext()

    def _check(self, name: str, wanted: Sequence[Wanted], results: Sequence[Tensors]) -> None:
        """Compare every result with the truth (:func:`mkernel.harness.work.checked`)."""
        for found in checked(wanted, results, sampled=not self._job.views):
            self._found[name].add(found)

    def _failed(self, name: str, error: Exception) -> None:
        """Note a contender that refuses a turn, before anything was started, as absent; a peer that
        raises leaves the row. A view that does either ends the run."""
        if isinstance(error, (Unsupported, ArgumentError)) and not self._job.views:
            self._found[name].absent = f"refused: {error}"
        elif isinstance(error, ContenderFailed) and name not in OURS:
            self._found[name].failed = str(error)
        else:
            raise error
        self._entered.pop(name, None)

    @contextmanager
    def _step(self, name: str, what: str) -> Iterator[None]:
        """Name the work on a contender where it fails or hangs."""
        if self._guard is None:
            yield
            return
        case = self._problem.case
        text = f"{name} at {case.op} {size_text(case.op, case.sizes)}, {what}"
        try:
            with self._guard.step(text, self._job.timeout_s):
                yield
        except MkernelError:
            raise
        except Exception as error:
            raise ContenderFailed(f"{text}: {type(error).__name__}: {error}") from error
