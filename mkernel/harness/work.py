"""What a contender does in one turn, by mode: its calls, the memory they work on, and what is checked.

Calls of a loop alternate between two sets of inputs and outputs, so that a call that hands out its
predecessor's result is wrong; the last two results are checked. In every mode a turn's inputs are drawn
and its outputs poisoned just before it, also those that a captured graph reads and writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from mkernel.cases import poison
from mkernel.harness.contender import Contender
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.protocol import Clock
from mkernel.harness.spec import LOOP_CALLS, Mode

PARTS = ("communication", "bytes")
"""Kinds of work that only mode ``kernel`` times: what they give is T_m."""


@dataclass(frozen=True)
class Wanted:
    """What a result must be: the truth of a kind of work at ``problem`` on the inputs of ``turn``.

    ``promised``: which of its outputs, None: all. ``judged``: what a call's results say of them.
    """

    problem: Problem
    kind: Kind
    turn: int
    promised: tuple[str, ...] | None
    judged: Callable[[Tensors], Tensors]

    @classmethod
    def of(cls, contender: Contender, turn: int, inputs: Inputs) -> Wanted:
        """What a contender promises of these inputs."""
        judged = partial(contender.judged, inputs=inputs)
        return cls(contender.problem, contender.kind, turn, contender.promised(), judged)


class Work(ABC):
    """One contender's turns at one problem."""

    calls = 1

    def __init__(self, contender: Contender) -> None:
        self._contender = contender

    @abstractmethod
    def prepare(self, turn: int) -> list[Wanted]:
        """Fresh inputs and poisoned outputs, queued on the current stream; what the results of the
        coming :meth:`run` must be. ``turn``: the number of this turn's first set of inputs."""

    @abstractmethod
    def run(self) -> Sequence[Tensors]:
        """The calls of a turn, queued on the current stream; the results that are the last of
        :meth:`prepare`'s."""

    def limits(self) -> dict[str, float]:
        """The contender's limits."""
        return self._contender.limits()

    def close(self) -> None:
        """After the last turn, with the device idle. Collective."""
        self._contender.close()


class OneCall(Work):
    """One call on the contender's own inputs, into a new output."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._inputs = contender.inputs()
        self._outputs: Tensors = {}

    def prepare(self, turn: int) -> list[Wanted]:
        self._outputs = poisoned(self._contender, self._inputs, self._contender.outputs(), turn)
        return [Wanted.of(self._contender, turn, self._inputs)]

    def run(self) -> Sequence[Tensors]:
        return (self._contender.call(self._inputs, self._outputs),)


class Loop(Work):
    """Calls one behind another, without a wait of the host."""

    calls = LOOP_CALLS

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._sets = [(contender.inputs(), contender.outputs()) for _ in range(2)]

    def prepare(self, turn: int) -> list[Wanted]:
        for number, (inputs, outputs) in enumerate(self._sets):
            poisoned(self._contender, inputs, outputs, turn + number)
        return [
            Wanted.of(self._contender, turn + number, inputs)
            for number, (inputs, _) in enumerate(self._sets)
        ]

    def run(self) -> Sequence[Tensors]:
        before = last = None
        call = self._contender.call  # what Python does here is timed
        for inputs, outputs in self._sets * (self.calls // 2):
            before, last = last, call(inputs, outputs)
        assert before is not None
        assert last is not None
        # A contender with one result memory has overwritten the result before the last.
        one, other = (next(iter(result.values())).data_ptr() for result in (before, last))
        return (last,) if one == other else (before, last)


class Replay(Loop):
    """The same calls captured once, and replayed."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._graph: Any = None
        self._results: Sequence[Tensors] = ()

    def prepare(self, turn: int) -> list[Wanted]:
        if self._graph is None:
            super().prepare(turn)
            self._capture()
        wanted = super().prepare(turn)
        for result in self._results:
            for tensor in result.values():
                poison.fill(tensor)
        return wanted

    def run(self) -> Sequence[Tensors]:
        self._graph.replay()
        return self._results

    def close(self) -> None:
        self._graph, self._results = None, ()
        super().close()

    def _capture(self) -> None:
        cuda: Any = torch.get_device_module(self._contender.problem.device.type)
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            super().run()  # plans, workspaces and libraries are made outside of the capture
        cuda.current_stream().wait_stream(side)
        cuda.synchronize()
        self._graph = cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask the device meanwhile.
        pool = self._contender.graph_pool()
        with cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._results = super().run()


class FirstCall(Work):
    """Every turn another shape, whose first call in this process it is."""

    def __init__(self, kind: type[Contender], problem: Problem, unseen: Unseen) -> None:
        self._kind, self._problem, self._unseen = kind, problem, unseen
        self._now: OneCall | None = None

    def prepare(self, turn: int) -> list[Wanted]:
        self.close()
        problem = self._unseen.like(self._problem)
        self._now = OneCall(self._kind(problem))
        return self._now.prepare(turn)

    def run(self) -> Sequence[Tensors]:
        assert self._now is not None
        return self._now.run()

    def limits(self) -> dict[str, float]:
        assert self._now is not None
        return self._now.limits()

    def close(self) -> None:
        if self._now is not None:
            self._now.close()
        self._now = None


class Unseen:
    """Sizes that the ranks' processes have not worked on: the same ones on every rank."""

    def __init__(self, asked: Iterable[tuple[str, Mapping[str, int]]]) -> None:
        """``asked``: the ops and sizes that were asked for."""
        self._seen = {_key(op, sizes) for op, sizes in asked}

    def like(self, problem: Problem) -> Problem:
        """The problem with the least rows, tokens or positions above its own that no one asked for
        before."""
        case, world = problem.case, problem.world
        name, step = next((n, step(world)) for n, step in _GROWS.items() if n in case.sizes)
        sizes = {**case.sizes, name: case.sizes[name] + step}
        while _key(case.op, sizes) in self._seen:
            sizes[name] += step
        self._seen.add(_key(case.op, sizes))
        return replace(problem, case=case.with_(sizes=sizes))


_GROWS: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {"m": lambda world: world, "tokens": lambda _: 1, "sequence": lambda world: 2 * world}
)
"""Which size makes another shape of an op, and by how much it must grow in a world."""


def _key(op: str, sizes: Mapping[str, int]) -> tuple[str, tuple[tuple[str, int], ...]]:
    return op, tuple(sorted(sizes.items()))


def poisoned(contender: Contender, inputs: Inputs, outputs: Tensors, turn: int) -> Tensors:
    """Draw a turn's inputs; poison ``outputs`` and memory that the call may allocate."""
    problem = contender.problem
    problem.fill(contender.kind, inputs, turn)
    contender.before(inputs)
    memory = {**problem.memory(contender.kind)}
    memory |= {name: (tuple(each.shape), each.dtype) for name, each in outputs.items()}
    poison.freed(memory.values(), problem.device)
    for each in outputs.values():
        poison.fill(each)
    return outputs


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
