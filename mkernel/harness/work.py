"""The work of a contender in one turn, by mode: its calls, the memory they work on, and what is
checked.

Calls of a loop alternate between two sets of inputs, so that a call that hands out its predecessor's
result is wrong, and each has outputs of its own, so that all results are there to be checked. In every
mode a turn's inputs are drawn and its outputs poisoned just before it, also those that a captured graph
reads and writes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from mkernel.cases import Comparison, poison
from mkernel.cases.comparison import compare_alike
from mkernel.harness.contenders import Contender
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.protocol import Clock
from mkernel.harness.spec import LOOP_CALLS, Mode

SHARE = 1 / 24
"""Limits the share of a device's memory that the results of one contender's loop take: 3.3 GiB of
80, which is 20 results of 170 MiB."""
_KEPT_ON_CPU = 256 << 20

PARTS = ("communication", "bytes")
"""Kinds of work that only mode ``kernel`` times: what they give is T_m."""


@dataclass(frozen=True)
class Wanted:
    """The truth that a result must be: that of a kind of work at ``problem`` on the inputs of ``turn``.

    ``promised``: which of its outputs, None: all. ``judged``: what a call's results say of them.
    """

    problem: Problem
    kind: Kind
    turn: int
    promised: tuple[str, ...] | None
    judged: Callable[[Tensors], Tensors]

    @classmethod
    def of(cls, contender: Contender, turn: int, inputs: Inputs) -> Wanted:
        """Return what a contender promises of these inputs."""
        judged = partial(contender.judged, inputs=inputs)
        return cls(contender.problem, contender.kind, turn, contender.promised(), judged)


def checked(
    wanted: Sequence[Wanted], results: Sequence[Tensors], *, sampled: bool
) -> Iterator[dict[str, Comparison]]:
    """Compare the results of a turn's calls, as :meth:`Work.run` returns them, with the truth.

    The last one of each set of inputs is compared with the reference. An earlier one has the same bits,
    or is compared with the reference too, and with all elements of that last one: of ops whose large
    results are sampled that leaves no row out.
    """
    last: dict[int, tuple[Tensors, dict[str, Comparison]]] = {}
    for back, result in enumerate(reversed(results)):
        which = back % len(wanted)
        truth = wanted[-1 - which]
        judged = truth.judged(result)
        other, found = last.get(which, ({}, {}))
        if not other or not all(_same(judged[name], other[name]) for name in found):
            found = truth.problem.compared(
                truth.kind, judged, truth.turn, truth.promised, sampled=sampled
            )
            for name in found if other else ():
                if judged[name].is_floating_point():
                    found[name] += compare_alike(judged[name], other[name])
        last.setdefault(which, (judged, found))
        yield found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results have the same bits, or equal numbers."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.element_size() == 1:  # torch compares no e4m3
        one, other = one.view(torch.int8), other.view(torch.int8)
    return torch.equal(one, other)


class Work(ABC):
    """One contender's turns at one problem."""

    calls = 1

    def __init__(self, contender: Contender) -> None:
        self._contender = contender

    @abstractmethod
    def prepare(self, turn: int) -> list[Wanted]:
        """Queue fresh inputs and poisoned outputs on the current stream; return what the results of the
        coming :meth:`run` must be. ``turn``: the number of this turn's first set of inputs."""

    @abstractmethod
    def run(self) -> Sequence[Tensors]:
        """Queue the calls of a turn on the current stream; return their results that are there to be
        checked. The last is that of the last of :meth:`prepare`'s, the one before it that of the one
        before, and so on by turns."""

    def limits(self) -> dict[str, float]:
        """Return the contender's limits."""
        return self._contender.limits()

    def close(self) -> None:
        """Free what it holds, after the last turn, with the device idle. Collective."""
        self._contender.close()


class OneCall(Work):
    """One call on the contender's own inputs, into a new output."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._inputs, self._outputs = contender.inputs(), contender.outputs()

    def prepare(self, turn: int) -> list[Wanted]:
        poisoned(self._contender, self._inputs, [self._outputs], turn)
        return [Wanted.of(self._contender, turn, self._inputs)]

    def run(self) -> Sequence[Tensors]:
        return (self._contender.call(self._inputs, self._outputs),)


class Loop(Work):
    """Calls one behind another, without a wait of the host: into memory of their own, as many as
    :func:`kept` says, and by turns where there are more."""

    calls = LOOP_CALLS

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._kept = kept(contender, self.calls)
        contender.shares_outputs = self._kept < self.calls
        self._inputs = [contender.inputs() for _ in range(2)]
        self._outputs = [contender.outputs() for _ in range(self._kept)]
        self._arguments = [
            (self._inputs[call % 2], self._outputs[call % self._kept]) for call in range(self.calls)
        ]

    def prepare(self, turn: int) -> list[Wanted]:
        for number, inputs in enumerate(self._inputs):
            poisoned(self._contender, inputs, self._outputs[number::2], turn + number)
        return [
            Wanted.of(self._contender, turn + number, inputs)
            for number, inputs in enumerate(self._inputs)
        ]

    def run(self) -> Sequence[Tensors]:
        results: deque[Tensors] = deque(maxlen=self._kept)
        call, keep = self._contender.call, results.append  # what Python does here is timed
        for inputs, outputs in self._arguments:
            keep(call(inputs, outputs))
        return _apart(results)

    def close(self) -> None:
        super().close()
        self._inputs, self._outputs, self._arguments = [], [], []  # before what they are from


def kept(contender: Contender, calls: int) -> int:
    """Return how many of a loop's last results are kept, an even number: all of them unless they
    take more than a :data:`SHARE` of the memory of a device."""
    problem = contender.problem
    memory = problem.memory(contender.kind).values()
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in memory)
    most = min(calls, contender.most_kept)
    return min(most, max(2, _most_kept_bytes(problem.device) // max(1, nbytes) // 2 * 2))


def _most_kept_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _KEPT_ON_CPU
    module: Any = torch.get_device_module(device)
    return int(SHARE * module.get_device_properties(device).total_memory)


def _apart(results: Sequence[Tensors]) -> Sequence[Tensors]:
    """Return the last results that have memory of their own; a contender with less memory has
    overwritten those before them."""
    found: dict[int, Tensors] = {}
    for result in reversed(results):
        address = next(iter(result.values())).data_ptr()
        if address in found:
            break
        found[address] = result
    return tuple(reversed(found.values()))


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
        for result in self._results:
            for tensor in result.values():
                poison.fill(tensor)
        return super().prepare(turn)

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
        """Begin with the ops and sizes that were asked for."""
        self._seen = {_key(op, sizes) for op, sizes in asked}

    def like(self, problem: Problem) -> Problem:
        """Return the problem with the least rows, tokens or positions above its own that no one asked
        for before."""
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
"""The size that makes another shape of an op, and by how much it must grow in a world."""


def _key(op: str, sizes: Mapping[str, int]) -> tuple[str, tuple[tuple[str, int], ...]]:
    return op, tuple(sorted(sizes.items()))


def poisoned(contender: Contender, inputs: Inputs, outputs: Sequence[Tensors], turn: int) -> None:
    """Draw a turn's inputs; poison each call's outputs and memory that calls may allocate, and place
    what calls sum in place."""
    problem = contender.problem
    problem.fill(contender.kind, inputs, turn)
    contender.before(inputs)
    memory = {**problem.memory(contender.kind)}
    memory |= {name: (tuple(each.shape), each.dtype) for name, each in outputs[0].items()}
    poison.freed(memory.values(), problem.device)
    for of_call in outputs:
        for each in of_call.values():
            poison.fill(each)
        contender.place(inputs, of_call)


def work(mode: Mode, kind: type[Contender], problem: Problem, unseen: Unseen) -> Work:
    """Make a contender's work at a problem in a mode. Collective."""
    if mode == "first":
        return FirstCall(kind, problem, unseen)
    made = kind(problem)
    if mode == "eager":
        return Loop(made)
    return Replay(made) if mode == "graph" else OneCall(made)


def clock(mode: Mode, launches: bool) -> Clock:
    """Return how a mode is timed."""
    if mode in ("eager", "first"):
        return "host"
    return "counted" if launches and mode == "kernel" else "hidden"
