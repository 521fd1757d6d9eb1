"""What every case provides, and how large its errors may be.

Tolerances are relative Frobenius errors (one rounding to bfloat16 gives 1.7e-3; partial sums kept
in bfloat16 give 2.4e-3, and more with atomics).

An output that is not written, or not written this time, must not pass by luck: outputs and the memory
that ops allocate are poisoned before a call (:mod:`mkernel.cases.poison`), and random inputs are fresh
in every iteration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from mkernel.backends.contracts.instrumented import View
from mkernel.cases.comparison import Comparison, compare, compare_exact
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.world.calls import CallRecord

TOLERANCE: dict[DtypeName, float] = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}
EVERY_RANK = -1
"""As a generator's ``part``: data that all ranks share."""


@dataclass(frozen=True)
class Outcome:
    """One finished call: the outputs to be judged (by name), the plan, times and trace. ``then``: of
    the call that belongs to it and came after (a dispatch's combine)."""

    outputs: Mapping[str, torch.Tensor]
    plan: LaunchPlan
    record: CallRecord
    then: CallRecord | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by kernel, of both calls."""
        seconds = dict(self.record.times.seconds)
        if self.then is not None:
            for kernel, each in self.then.times.seconds.items():
                seconds[kernel] = seconds.get(kernel, 0.0) + each
        return seconds

    @property
    def traces(self) -> tuple[bytes, ...]:
        """The instruction record of each call, where the backend kept one."""
        calls = (self.record, self.then) if self.then is not None else (self.record,)
        return tuple(call.trace for call in calls if call.trace is not None)


@dataclass(frozen=True)
class Case(ABC):
    """One op with fixed sizes; picklable, the same object on every rank.

    Attributes:
        sizes: the plan's sizes of the op (``mkernel.plan.shapes.size_names``).
        dtype, out_dtype: of inputs and output. layout: of the weight, where the op has one.
        chunk: rows or tiles a chunk; None: the planner's choice. seed: of the random data.
        options: what only some ops have (``replicate_b``, ``routing``, ``scale``, …).
    """

    op: ClassVar[str]

    sizes: Mapping[str, int]
    dtype: DtypeName
    out_dtype: DtypeName
    layout: str = "row"
    chunk: int | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def inputs(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The tensors that ``rank`` passes in an iteration: fresh in each, and any rank can make
        any rank's (the references need all)."""

    @abstractmethod
    def poisoned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs that the caller allocates, full of poison; freed memory for the others holds
        it too."""

    @abstractmethod
    def call(
        self,
        tensors: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        *,
        view: View = "pipelined",
        trace: bool = False,
        wait: bool = True,
    ) -> Outcome:
        """Call the op in the current world, with ``outputs`` as made by :meth:`poisoned`.
        Collective. Without ``wait`` a stream-ordered accelerator's call may still be under way."""

    def run(
        self, tensors: Mapping[str, torch.Tensor], *, view: View = "pipelined", trace: bool = False
    ) -> Outcome:
        """Poison the outputs and call the op in the current world, with torch filling what it
        allocates uninitialised with NaN. Collective."""
        with uninitialised_is_nan():
            return self.call(tensors, self.poisoned(tensors), view=view, trace=trace)

    @abstractmethod
    def reference(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The outputs that ``rank`` must get, in float64 (integers exact), from the same inputs."""

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """By output that is a sum over ranks: the sum of what the ranks add to it, without signs, in
        float64. What is lost where each of them is rounded is a share of it."""
        return {}

    def tolerances(self) -> dict[str, float]:
        """Largest relative Frobenius error by output; an output that is missing here must be
        equal."""
        return {"out": TOLERANCE[self.out_dtype]}

    def judge(
        self, outcome: Outcome, rank: int, world_size: int, iteration: int
    ) -> dict[str, Comparison]:
        """Each output compared with :meth:`reference`, by name."""
        tolerances = self.tolerances()
        return {
            name: (compare if name in tolerances else compare_exact)(
                outcome.outputs[name].cpu(), wanted
            )
            for name, wanted in self.reference(rank, world_size, iteration).items()
        }

    def passed(self, found: Mapping[str, Comparison]) -> bool:
        """Whether every error is within its tolerance (a NaN error is not)."""
        tolerances = self.tolerances()
        return all(each.error <= tolerances.get(name, 0.0) for name, each in found.items())

    def with_(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def generator(self, iteration: int, which: int, part: int) -> torch.Generator:
        """Random numbers that depend on (seed, iteration, which tensor, which rank) alone."""
        seed = np.random.SeedSequence((self.seed, iteration, which, part + 1))
        return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))

    @property
    def given(self) -> Mapping[str, torch.Tensor] | None:
        """The user's own whole tensors (option ``tensors``) that replace random data."""
        return self.options.get("tensors")

    def normal(self, iteration: int, which: int, part: int, *shape: int) -> torch.Tensor:
        """Standard normal data in the case's dtype."""
        data = torch.randn(shape, generator=self.generator(iteration, which, part))
        return data.to(getattr(torch, self.dtype))
