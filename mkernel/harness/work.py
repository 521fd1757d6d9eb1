"""What a contender does in one turn, by mode: its calls, the memory they work on, and what is checked.

Calls of a loop alternate between two sets of inputs and outputs, so that a call that hands out its
predecessor's result is wrong; the last two results are checked. In every mode a turn's inputs are drawn
and its outputs poisoned just before it, also those that a captured graph reads and writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkernel.cases import poison
from mkernel.harness.contenders import Contender
from mkernel.harness.problem import Problem, Tensors
from mkernel.harness.protocol import Clock
from mkernel.harness.spec import LOOP_CALLS, Mode, Shape

PARTS = ("communication", "bytes")
"""Kinds of work that only mode ``kernel`` times: what they give is T_m."""


@dataclass(frozen=True)
class Wanted:
    """What a result must be: the truth of ``problem`` on the inputs of ``turn``."""

    problem: Problem
    turn: int


class Work(ABC):
    """One contender's turns at one problem."""

    calls = 1

    @abstractmethod
    def prepare(self, turn: int) -> list[Wanted]:
        """Fresh inputs and poisoned outputs, queued on the current stream; what the results of the
        coming :meth:`run` must be. ``turn``: the number of this turn's first set of inputs."""

    @abstractmethod
    def run(self) -> Sequence[torch.Tensor]:
        """The calls of a turn, queued on the current stream; the results that are the last of
        :meth:`prepare`'s."""

    @abstractmethod
    def limit(self) -> float:
        """Largest relative error that counts as right. After the first :meth:`prepare`."""

    @abstractmethod
    def close(self) -> None:
        """After the last turn, with the device idle. Collective."""


class OneCall(Work):
    """One call on the contender's own inputs, into a new output."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._inputs = contender.inputs()
        self._out: torch.Tensor | None = None

    def prepare(self, turn: int) -> list[Wanted]:
        self._out = poisoned(self._contender, self._inputs, self._contender.output(), turn)
        return [Wanted(self._contender.problem, turn)]

    def run(self) -> Sequence[torch.Tensor]:
        assert self._out is not None
        return (self._contender.call(self._inputs, self._out),)

    def limit(self) -> float:
        return self._contender.limit()

    def close(self) -> None:
        self._contender.close()


class Loop(Work):
    """Calls one behind another, without a wait of the host."""

    calls = LOOP_CALLS

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._sets = [(contender.inputs(), contender.output()) for _ in range(2)]

    def prepare(self, turn: int) -> list[Wanted]:
        for number, (inputs, out) in enumerate(self._sets):
            poisoned(self._contender, inputs, out, turn + number)
        return [Wanted(self._contender.problem, turn + number) for number in range(2)]

    def run(self) -> Sequence[torch.Tensor]:
        before = last = None
        for call in range(self.calls):
            inputs, out = self._sets[call % 2]
            before, last = last, self._contender.call(inputs, out)
        assert before is not None
        assert last is not None
        # A contender with one result memory has overwritten the result before the last.
        return (last,) if before.data_ptr() == last.data_ptr() else (before, last)

    def limit(self) -> float:
        return self._contender.limit()

    def close(self) -> None:
        self._contender.close()


class Replay(Loop):
    """The same calls captured once, and replayed."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._graph: Any = None
        self._results: Sequence[torch.Tensor] = ()

    def prepare(self, turn: int) -> list[Wanted]:
        if self._graph is None:
            super().prepare(turn)
            self._capture()
        wanted = super().prepare(turn)
        for result in self._results:
            poison.fill(result)
        return wanted

    def run(self) -> Sequence[torch.Tensor]:
        self._graph.replay()
        return self._results

    def close(self) -> None:
        self._graph, self._results = None, ()
        super().close()

    def _capture(self) -> None:
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            super().run()  # plans, workspaces and libraries are made outside of the capture
        cuda.current_stream().wait_stream(side)
        cuda.synchronize()
        self._graph = cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask the device meanwhile.
        with cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = super().run()


class FirstCall(Work):
    """Every turn another shape, whose first call in this process it is."""

    def __init__(self, kind: type[Contender], problem: Problem, unseen: Unseen) -> None:
        self._kind, self._problem, self._unseen = kind, problem, unseen
        self._now: OneCall | None = None

    def prepare(self, turn: int) -> list[Wanted]:
        self.close()
        problem = replace(self._problem, m=self._unseen.rows(self._problem))
        self._now = OneCall(self._kind(problem))
        return self._now.prepare(turn)

    def run(self) -> Sequence[torch.Tensor]:
        assert self._now is not None
        return self._now.run()

    def limit(self) -> float:
        assert self._now is not None
        return self._now.limit()

    def close(self) -> None:
        if self._now is not None:
            self._now.close()
        self._now = None


class Unseen:
    """Sizes that the ranks' processes have not worked on: the same ones on every rank."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._seen: set[tuple[str, int, int, int]] = {
            (each.op, each.m, each.n, each.k) for each in shapes
        }

    def rows(self, problem: Problem) -> int:
        """The least M above the problem's that no one asked for before."""
        m = problem.m + problem.world
        while (problem.op, m, problem.n, problem.k) in self._seen:
            m += problem.world
        self._seen.add((problem.op, m, problem.n, problem.k))
        return m


def poisoned(contender: Contender, inputs: Tensors, out: torch.Tensor, turn: int) -> torch.Tensor:
    """Draw a turn's inputs and poison ``out`` and memory that the call may allocate."""
    problem = contender.problem
    problem.fill(inputs, problem.rank, turn)
    poison.freed([(tuple(out.shape), out.dtype)], problem.device)
    return poison.fill(out)


def work(mode: Mode, kind: type[Contender], problem: Problem, unseen: Unseen) -> Work:
    """A contender at a problem in a mode. Collective."""
    if mode == "first":
        return FirstCall(kind, problem, unseen)
    made = kind(problem)
    if mode == "eager":
        return Loop(made)
    return Replay(made) if mode == "graph" else OneCall(made)


def clock(mode: Mode, launches: bool) -> Clock:
    """How a mode is timed."""
    if mode in ("eager", "first"):
        return "host"
    return "counted" if launches and mode == "kernel" else "hidden"
