"""The base of every case and oracle, and how large errors may be.

Tolerances are relative Frobenius errors (one rounding to bfloat16 gives 1.7e-3; partial sums kept
in bfloat16 give 2.4e-3, and more with atomics).

An output that is not written, or not written this time, must not pass by luck: outputs and the memory
that ops allocate are poisoned before a call (:mod:`mkernel.cases.poison`), and random inputs are fresh
in every iteration.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import Unpack

from mkernel.cases import poison
from mkernel.cases.comparison import (
    ROW_SHARE,
    Comparison,
    compare_exact,
    compare_projected,
    compare_rows,
)
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.ops.common import Execution
from mkernel.plan.arguments import UNDIVIDED
from mkernel.plan.invariance import Invariant, pairs
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.world.calls import CallRecord
from mkernel.world.lifecycle import current

TOLERANCE: dict[DtypeName, float] = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 5e-4,
    "bfloat16": 3e-3,
}
EVERY_RANK = -1
"""The ``part`` of a generator whose data all ranks share."""

Memory = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of an output."""
Rows = Callable[[int], "torch.Tensor | slice"]
"""Given how many rows an output has, says which of them are compared: ascending indices, or a slice."""
Onto = Callable[[int], torch.Tensor] | None
"""Given how many columns an output has, returns a few random columns [columns, few] in float64."""
Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""
NOWHERE: Tensors = MappingProxyType({})
"""New memory is drawn into."""


@lru_cache(maxsize=1024)  # a truth draws what every rank has, often twice
def _state(*of: int) -> int:
    """Return a generator's first state, which depends on all of these numbers."""
    return int(np.random.SeedSequence(of).generate_state(1, np.uint64)[0] >> 1)


def every_row(count: int) -> slice:
    """Select all rows."""
    return slice(count)


def times(matrix: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return a matrix, multiplied by columns where there are some."""
    return matrix if columns is None else matrix @ columns


@dataclass(frozen=True)
class Outcome:
    """One finished call: the outputs to be judged (by name), the plan, times and trace. ``then`` is the
    record of the call that belongs to it and came after (a dispatch's combine)."""

    outputs: Tensors
    plan: LaunchPlan
    record: CallRecord
    then: CallRecord | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Return the wall seconds by kernel, of both calls."""
        seconds = dict(self.record.times.seconds)
        if self.then is not None:
            for kernel, each in self.then.times.seconds.items():
                seconds[kernel] = seconds.get(kernel, 0.0) + each
        return seconds

    @property
    def traces(self) -> tuple[bytes, ...]:
        """Return the instruction record of each call for which the backend kept one."""
        calls = (self.record, self.then) if self.then is not None else (self.record,)
        return tuple(call.trace for call in calls if call.trace is not None)


class Oracle(ABC):
    """Makes the inputs of some work for any rank and iteration, and knows in float64 what comes out.

    Inputs are fresh in every iteration, and any rank can make any other's: references need them all.
    """

    row_axis: ClassVar[int] = 0
    """The dimension of the outputs that rows are counted along."""
    given_outputs: ClassVar[tuple[str, ...]] = ()
    """The outputs whose memory the caller gives."""

    @abstractmethod
    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that ``rank`` passes in an iteration.

        ``into``: tensors of an earlier iteration, by name; data may be drawn into their memory. Whether
        it was shows in the addresses.
        """

    @abstractmethod
    def results(self, world_size: int) -> dict[str, Memory]:
        """Return the memory of a rank's outputs; where only the routing decides how much that is, as
        much as balanced routing needs."""

    @abstractmethod
    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute what ``rank`` must get, in float64 (integers exact), from the same inputs.

        Of outputs that have a tolerance, only ``rows`` are computed, or, times the columns of ``onto``,
        all rows of those that :meth:`projects` has. Exact outputs come whole.
        """

    @abstractmethod
    def tolerances(self) -> dict[str, float]:
        """Return the largest relative Frobenius error by output; an output that is missing here must be
        equal."""

    @property
    def row_share(self) -> float:
        """Return by how many times the tolerance a single row may be off."""
        return ROW_SHARE

    def projects(self, names: Collection[str]) -> bool:
        """Return whether the reference of these outputs times a few columns takes less time than the
        whole one. It does where their last step is linear: the columns multiply its last factor."""
        return False

    def truths(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        promised: Collection[str] | None = None,
        rows: Rows = every_row,
        onto: Onto = None,
    ) -> dict[str, torch.Tensor]:
        """Compute the reference of the outputs that are promised, or of all that there are."""
        found = self.reference(rank, world_size, iteration, rows, onto)
        return {name: each for name, each in found.items() if promised is None or name in promised}

    def compared(
        self,
        outputs: Tensors,
        rank: int,
        world_size: int,
        iteration: int,
        promised: Collection[str] | None = None,
        rows: Rows = every_row,
        onto: Onto = None,
    ) -> dict[str, Comparison]:
        """Compare outputs with the reference, by name: those promised, or all that there are. With
        ``onto``, all rows are compared by their products with its columns."""
        tolerances, memory = self.tolerances(), self.results(world_size)
        truths = self.truths(rank, world_size, iteration, promised, rows, onto)
        found = {}
        for name, wanted in truths.items():
            output = outputs[name].to(wanted.device)
            if name not in tolerances:
                found[name] = compare_exact(output, wanted)
            elif onto is not None:
                columns = onto(memory[name][0][-1])
                found[name] = compare_projected(output, wanted, columns, self.row_share)
            else:
                found[name] = compare_rows(output, wanted, rows, self.row_axis)
        return found

    def passed(self, found: Mapping[str, Comparison]) -> bool:
        """Return whether every error is within its tolerance (a NaN error is not)."""
        tolerances = self.tolerances()
        return all(each.within(tolerances.get(name, 0.0)) for name, each in found.items())


@dataclass(frozen=True)
class Case(Oracle):
    """One op with fixed sizes; picklable, the same object on every rank.

    Attributes:
        sizes: the plan's sizes of the op (``mkernel.plan.shapes.size_names``).
        dtype, out_dtype: of inputs and output. layout: of the weight, where the op has one.
        chunk: rows or tiles a chunk; None: the planner's choice. seed: of the random data.
        options: what only some ops have (``replicate_b``, ``routing``, ``scale``, …).
        device: where random data is drawn and references are computed, as torch names it.
    """

    op: ClassVar[str]

    sizes: Mapping[str, int]
    dtype: DtypeName
    out_dtype: DtypeName
    layout: str = "row"
    chunk: int | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def poisoned(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the outputs that the caller gives, full of poison. Where the op allocates them, freed
        memory of their sizes holds poison instead."""
        memory = self.results(current().size)
        device = next(iter(tensors.values())).device
        given = {name: poison.full(*memory.pop(name), device) for name in self.given_outputs}
        poison.freed(memory.values(), device)
        return given

    @abstractmethod
    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op."""

    def call(self, tensors: Tensors, outputs: Tensors, **execution: Unpack[Execution]) -> Outcome:
        """Call the op in the current world, with ``outputs`` as made by :meth:`poisoned`.
        Collective. With ``wait=False`` a stream-ordered accelerator's call may still be under way."""
        return self.called(tensors, outputs, {"wait": True, **execution})

    def run(self, tensors: Tensors, **execution: Unpack[Execution]) -> Outcome:
        """Poison the outputs and call the op in the current world, with torch filling what it
        allocates uninitialised with NaN. Collective."""
        with uninitialised_is_nan():
            return self.call(tensors, self.poisoned(tensors), **execution)

    @property
    def rounds_partials(self) -> bool:
        """Return whether the op itself says that what is added to ``out`` was rounded before."""
        return False

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return for each output that is a sum over ranks the sum of what the ranks add to it, without
        signs, in float64. Where each of these is rounded, what is lost is a share of it."""
        return {}

    def near_ties(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return how far elements of an output may be off, in float64.

        Where the reference rounds sums on the way to an output as the op does, such a sum may lie so
        near the middle between two numbers of its dtype that its own rounding errors decide which of
        them it becomes.
        """
        return {}

    @property
    def invariant(self) -> Invariant | None:
        """Return the sum of invariant results, the option ``invariant``; None: the world's."""
        return self.options.get("invariant")

    @property
    def rounding(self) -> float:
        """Allow one rounding of a result, or those of a sum."""
        return TOLERANCE[self.out_dtype] if self.op in UNDIVIDED else self.rounding_of_sum

    @property
    def rounding_of_sum(self) -> float:
        """Allow one rounding of a result; of an invariant sum also those of each level of its tree,
        which are independent: each level's nodes are together as large as the result."""
        once = TOLERANCE[self.out_dtype]
        if self.invariant is None:
            return once
        each = TOLERANCE[self.invariant.partial_of(self.out_dtype)]
        return math.hypot(once, each * math.sqrt(len(pairs(self.invariant.segments)) + 1))

    @property
    def tolerance(self) -> float:
        """Allow the roundings of a result."""
        return self.rounding

    def tolerances(self) -> dict[str, float]:
        """Return that of ``out``."""
        return {"out": self.tolerance}

    def judge(
        self, outcome: Outcome, rank: int, world_size: int, iteration: int
    ) -> dict[str, Comparison]:
        """Compare the outputs of a call with :meth:`reference`, by name."""
        return self.compared(outcome.outputs, rank, world_size, iteration)

    def with_(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def generator(self, iteration: int, which: int, part: int) -> torch.Generator:
        """Return random numbers that depend on (seed, iteration, which tensor, which rank) alone."""
        state = _state(self.seed, iteration, which, part + 1)
        return torch.Generator(self.device).manual_seed(state)

    @property
    def on_cpu(self) -> bool:
        """Return whether random data is drawn by the CPU."""
        return self.device == "cpu"

    @property
    def given(self) -> Mapping[str, torch.Tensor] | None:
        """Return the user's own whole tensors (option ``tensors``) that replace random data."""
        return self.options.get("tensors")

    def normal(
        self,
        iteration: int,
        which: int,
        part: int,
        *shape: int,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw standard normal data in the case's dtype, row-major; on devices in ``into``, which has
        this shape, where it is given."""
        chance, dtype = self.generator(iteration, which, part), getattr(torch, self.dtype)
        if dtype == torch.float8_e4m3fn:  # torch draws none
            wide = torch.randn(shape, generator=chance, device=self.device)
            return wide.to(dtype) if into is None or self.on_cpu else into.copy_(wide)
        if self.on_cpu:  # it draws halves from few random bits
            return torch.randn(shape, generator=chance).to(dtype)
        if into is None:
            into = torch.empty(shape, dtype=dtype, device=self.device)
        return into.normal_(generator=chance)

    def drawn_scale(self, iteration: int, which: int, part: int, *shape: int) -> torch.Tensor:
        """Draw scales below 0.32, each at most a third of its neighbours' or three times as much: those
        beside it, in the next call, and of the next rank."""
        chance = self.generator(iteration, which, part)
        fine = 1 + torch.rand(shape, generator=chance, device=self.device) / 4
        rows, columns = (torch.arange(size, device=self.device) for size in shape)
        step = (rows[:, None] + columns + iteration + part) % 3
        return fine * 0.25 ** (1 + step)
