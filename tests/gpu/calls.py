"""Calls of an op on one rank, on fresh inputs, judged in float64; and what ranks do with many of them.

Everything here runs in rank processes. A *shape* names an op and its sizes, and makes a :class:`Work`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch

import mkernel
from mkernel.cases import Case, poison
from mkernel.plan import planner

DEVICE = "cuda"
LATE_S = 0.02
"""How long a late rank is late."""
Tensors = dict[str, torch.Tensor]
Decisions = Mapping[str, Mapping[str, Any]]
"""Values that functions of tuning return, by module."""


class Shape(Protocol):
    """An op at one size."""

    def work(self, seed: int = 0) -> Work:
        """Make its tensors on this rank."""


def spin(seconds: float) -> None:
    """Keep the current stream busy."""
    cuda: Any = torch.cuda
    cuda._sleep(int(seconds * 1.98e9))


class Work:
    """A case's tensors on this rank, refilled in place for every turn. ``turns``: how many calls
    :func:`judged` makes."""

    turns = 1

    def __init__(self, shape: Any, case: Case) -> None:
        world = mkernel.world()
        self.rank, self.world, self.shape, self.case = world.rank, world.size, shape, case
        self.given: Tensors = case.inputs(self.rank, self.world, 0)
        memory = case.results(self.world)
        self.outs: Tensors = {
            name: torch.empty(memory[name][0], dtype=memory[name][1], device=DEVICE)
            for name in case.given_outputs
        }
        self._allocated = [memory[name] for name in memory if name not in case.given_outputs]
        self.found: Tensors = {}

    def fill(self, turn: int, results: Tensors | None = None) -> None:
        """Draw fresh inputs where the last ones lie; poison the outputs that the caller gives, memory
        that the op may allocate, and ``results``, in stream order."""
        for name, drawn in self.case.inputs(self.rank, self.world, turn, self.given).items():
            if drawn.data_ptr() != self.given[name].data_ptr():
                self.given[name].copy_(drawn)
        for tensor in (*self.outs.values(), *(results or {}).values()):
            if not self._lies_in(tensor, self.given):
                poison.fill(tensor)
        poison.freed(self._allocated, DEVICE)

    def call(self) -> Tensors:
        """Call the public op; return its results."""
        raise NotImplementedError

    def kept(self) -> Tensors:
        """Return the last call's results where no later call writes them."""
        return {
            name: tensor.clone() if self._lies_in(tensor, self.outs | self.given) else tensor
            for name, tensor in self.found.items()
        }

    def failure(
        self, turn: int, found: Tensors | torch.Tensor | None = None, what: str = ""
    ) -> list[str]:
        """Say what is wrong with the results of a turn, by default those of the last call."""
        found = self.found if found is None else found
        found = {"out": found} if isinstance(found, torch.Tensor) else found
        text = f"rank {self.rank} {self.shape} turn {turn} {what}:"
        return [f"{text} {wrong}" for wrong in self.wrong(turn, found)]

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say what is wrong with the results of a turn."""
        limits = self.case.tolerances()
        compared = self.case.compared(found, self.rank, self.world, turn, tuple(found))
        return [
            f"{name} is off by {one.error:.2e} {one.why}"
            for name, one in compared.items()
            if not one.error <= limits.get(name, 0.0)
            and not (name in limits and not one.why and self.rounded(name, found[name], turn))
        ]

    def rounded(self, name: str, got: torch.Tensor, turn: int) -> bool:
        """Return whether few elements are off by no more than their declared roundings: limits are of
        norms of many."""
        return False

    @staticmethod
    def _lies_in(tensor: torch.Tensor, others: Tensors) -> bool:
        return any(tensor.data_ptr() == each.data_ptr() for each in others.values())


@contextmanager
def deciding(decisions: Decisions) -> Iterator[None]:
    """Have functions of tuning return these values within it, of every plan: one that this
    process has made before, in another world too, would be taken again."""
    planner._planned.cache_clear()
    asked: dict[str, mock.Mock] = {}
    try:
        with ExitStack() as stack:
            for module, returned in decisions.items():
                mocks = {name: mock.Mock(return_value=each) for name, each in returned.items()}
                for backend in ("cuda", "hopper"):
                    found = importlib.import_module(
                        f"mkernel.backends.accelerators.{backend}.{module}"
                    )
                    for name, each in mocks.items():
                        if hasattr(found, name):
                            stack.enter_context(mock.patch.object(found, name, each))
                asked |= mocks
            yield
    finally:
        planner._planned.cache_clear()
    never = [name for name, each in asked.items() if not each.called]
    assert not never, f"no plan asked for {', '.join(never)}"


def decided(decisions: Decisions, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``fn`` :func:`deciding` so."""
    with deciding(decisions):
        return fn(*arguments)


class _Native:
    """The native module, with some functions of a test's."""

    def __init__(self, native: Any, functions: Mapping[str, Any]) -> None:
        self.__dict__ |= {"_native": native, **functions}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


@contextmanager
def native_with(*modules: Any, **functions: Any) -> Iterator[None]:
    """Have these modules of a backend call other native functions within it."""
    with ExitStack() as stack:
        for module in modules:
            wrong = _Native(module.native(), functions)
            stack.enter_context(mock.patch.object(module, "native", lambda wrong=wrong: wrong))
        yield


def judged(shapes: Sequence[Shape], seed: int) -> list[str]:
    """Return failures of a call, or a few, of each shape."""
    failures = []
    for number, shape in enumerate(shapes):
        work = shape.work(seed)
        for turn in range(number, number + work.turns):
            work.fill(turn)
            work.call()
            failures += work.failure(turn)
    mkernel.synchronize()
    return failures


def skewed(shapes: Sequence[Shape], rounds: int, seed: int) -> list[str]:
    """Return failures of many calls that reuse all memory, ranks late by turns, shapes mixed."""
    works = [shape.work(seed) for shape in shapes]
    chance = random.Random(seed)  # the same on every rank
    failures = []
    for turn in range(rounds):
        work = chance.choice(works)
        late = chance.randrange(work.world + 1)
        work.fill(turn)
        if late == work.rank:
            spin(LATE_S)
        work.call()
        failures += work.failure(turn, what=f"with rank {late} late")
    mkernel.synchronize()
    return failures


def faulty(
    shapes: Sequence[Shape],
    faults: Sequence[str],
    planted: Callable[[str, Any], AbstractContextManager[object]],
) -> list[str]:
    """Return the faults that calls of these shapes show, each after a right call. Rank 1 is late: what
    rank 0 sends without waiting lies where it has not been read."""
    seen = []
    for seed, fault in enumerate(faults):
        failures = []
        for shape in shapes:
            work = shape.work(seed)
            work.fill(0)
            work.call()
            before = work.failure(0)
            assert not before, before
            mkernel.synchronize()
            with planted(fault, work):
                work.fill(1)
                if work.rank == 1:
                    spin(LATE_S)
                work.call()
                mkernel.synchronize()
            failures += work.failure(1)
        seen += [fault] if failures else []
    return seen


def queued(shapes: Sequence[Shape], rounds: int, seed: int) -> list[str]:
    """Return failures of calls between which the host waits for nothing, judged at the end."""
    works = [shape.work(seed) for shape in shapes]
    kept = []
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % work.world == work.rank:
            spin(LATE_S / 10)
        work.call()
        kept.append((work, turn, work.kept()))
    mkernel.synchronize()
    return [text for work, turn, found in kept for text in work.failure(turn, found, "queued")]


def two_streams(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """Return failures of calls that are queued on two streams at once, in the same order on all
    ranks."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    works = [[shape.work(seed) for shape in shapes] for seed in range(2)]
    torch.cuda.synchronize()
    kept = []
    for turn in range(rounds):
        for number, stream in enumerate(streams):
            work = works[number][turn % len(shapes)]
            with torch.cuda.stream(stream):
                work.fill(turn)
                if (turn + number) % work.world == work.rank:
                    spin(LATE_S / 10 * (1 + number))
                work.call()
                kept.append((work, turn, work.kept(), number))
    mkernel.synchronize()
    torch.cuda.synchronize()
    return [
        text
        for work, turn, found, number in kept
        for text in work.failure(turn, found, f"stream {number}")
    ]


def captured(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Return a graph of these calls, and what they return in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # plans, workspaces and libraries are made outside of the capture
    mkernel.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def replayed(shapes: Sequence[Shape], replays: int) -> list[str]:
    """Return failures of a captured graph of all shapes' calls, with new inputs before every replay,
    and a plain call behind every tenth."""
    works = [shape.work() for shape in shapes]
    for work in works:
        work.fill(0)
    graph, results = captured([work.call for work in works])
    failures = []
    for turn in range(1, replays + 1):
        for work, found in zip(works, results, strict=True):
            work.fill(turn, found)
        if turn % (works[0].world + 1) == works[0].rank:
            spin(LATE_S / 4)
        graph.replay()
        for work, found in zip(works, results, strict=True):
            failures += work.failure(turn, found, "replayed")
        if turn % 10 == 0:
            other = -turn % (1 << 31)
            works[0].fill(other)
            failures += works[0].failure(other, works[0].call(), "between replays")
    mkernel.synchronize()
    return failures


def same_bits(shapes: Sequence[Shape], times: int) -> tuple[list[str], list[int]]:
    """Return failures of calls that are repeated on the same inputs, ranks late by turns, and a
    checksum of each shape's results."""
    failures, sums = [], []
    for shape in shapes:
        work = shape.work()
        first: Tensors = {}
        for turn in range(times):
            work.fill(0)
            if turn % work.world == work.rank:
                spin(LATE_S * (turn % 3) / 3)
            work.call()
            if not first:
                first = {name: each.clone() for name, each in work.found.items()}
                failures += work.failure(0)
            failures += [
                f"rank {work.rank} {shape}: {name} of call {turn} has other bits"
                for name, each in work.found.items()
                if not torch.equal(bits(each), bits(first[name]))
            ]
        sums.append(checksum(first))
    mkernel.synchronize()
    return failures, sums


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, which tell zeros of unlike signs."""
    return tensor.contiguous().flatten().view(torch.uint8)


def checksum(found: Tensors) -> int:
    """Return a sum of bytes that depends on their places; it wraps, the same way every time."""
    each = [bits(tensor).to(torch.int64) for tensor in found.values()]
    return sum(int((one * torch.arange(1, len(one) + 1, device=one.device)).sum()) for one in each)
