"""What every case provides, and how a result is compared with the truth.

Tolerances are relative Frobenius errors (one rounding to bfloat16 gives 1.7e-3; partial sums kept
in bfloat16 give 2.4e-3, and more with atomics). A NaN or infinity must stand exactly where the
reference has one; the error is taken over the rest.

An output that is not written, or not written this time, must not pass by luck. Where an op takes its
output from the caller, the case passes one full of NaN. Where the op allocates it, :meth:`Case.run`
has torch fill uninitialised memory with NaN (:func:`uninitialised_is_nan`). Timed calls cannot afford
that: for them NaN-filled memory of that size is freed first (:func:`poison_freed`), so that allocators
which reuse blocks hand out NaN, others zeros or an earlier call's values. None of the three equals a
reference of random inputs that are fresh in every iteration.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from mkernel.backends.base import View
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.world import CallRecord

TOLERANCE: dict[DtypeName, float] = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}
POISON = float("nan")
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
        """The outputs that the caller allocates, full of NaN; memory for the others is poisoned."""

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

    def errors(
        self, outcome: Outcome, rank: int, world_size: int, iteration: int
    ) -> dict[str, float]:
        """Relative Frobenius error by output: infinite where shapes or non-finite values differ,
        and where an output that must be equal is not."""
        found = {}
        tolerances = self.tolerances()
        for name, wanted in self.reference(rank, world_size, iteration).items():
            got = outcome.outputs[name].cpu()
            if name in tolerances:
                found[name] = compare(got, wanted)
            else:
                found[name] = 0.0 if torch.equal(got, wanted.to(got.dtype)) else float("inf")
        return found

    def passed(self, errors: Mapping[str, float]) -> bool:
        """Whether every error is within its tolerance (a NaN error is not)."""
        tolerances = self.tolerances()
        return all(error <= tolerances.get(name, 0.0) for name, error in errors.items())

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


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """torch.empty and its kin give NaN (integers: the largest value), on every thread."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    _set_deterministic(True, warn_only=True)
    try:
        yield
    finally:
        _set_deterministic(before, warn_only=warn_only)


def _set_deterministic(mode: bool, *, warn_only: bool) -> None:
    """``torch.use_deterministic_algorithms`` without its import of torch's compiler, which takes
    every rank process two seconds and which nothing here uses."""
    setter = getattr(torch._C, "_set_deterministic_algorithms", None)
    if setter is None or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        setter(mode, warn_only=warn_only)


def poison_freed(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]], device: Any) -> None:
    """Fill memory of these shapes with NaN and free it: what an op then allocates uninitialised
    holds NaN wherever the allocator reuses blocks."""
    blocks = [torch.full(shape, POISON, dtype=dtype, device=device) for shape, dtype in shapes]
    del blocks


def badness(error: float) -> tuple[bool, float]:
    """Orders errors; nothing is worse than NaN."""
    return math.isnan(error), error


def compare(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error; infinite where shapes or the places of NaN and infinity differ."""
    if result.shape != reference.shape:
        return float("inf")
    wide = result.to(torch.float64)
    finite = torch.isfinite(reference)
    odd = ~finite
    if not torch.equal(torch.isfinite(wide), finite) or not torch.equal(
        torch.nan_to_num(wide[odd], nan=1.0, posinf=2.0, neginf=3.0),
        torch.nan_to_num(reference[odd], nan=1.0, posinf=2.0, neginf=3.0),
    ):
        return float("inf")
    gap = float(torch.linalg.vector_norm((wide - reference)[finite]))
    norm = float(torch.linalg.vector_norm(reference[finite]))
    return gap / norm if norm else gap
