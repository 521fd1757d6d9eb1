"""What a contender is, and how far its results may be off."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from mkernel.cases.base import TOLERANCE
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.spec import GEMMS, LOOP_CALLS
from mkernel.plan.ops import BACKWARD

ATTENTION_BACKWARD = BACKWARD["ring_attention"]


NO_ROUNDING = 1e-12
"""Limit of what is only moved: below any wrong element, above what float64 loses where all rows are
compared by their products with random columns."""


class Contender(ABC):
    """One way to do a kind of work.

    The order of use: ``unusable`` (None), construction (collective: scratch memory is allocated
    here), then a :meth:`call` a turn, each with inputs and outputs that are new in content.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "op"
    most_kept: ClassVar[int] = LOOP_CALLS
    """Results of a loop that may be alive at once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.op = problem.op
        self.fast = problem.fast_accum

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        """Why it cannot take part, or None."""
        return None

    @classmethod
    def way(cls, problem: Problem) -> str:
        """Which of several ways the op's calls take; empty: there is one, or their times do not ask."""
        return ""

    def promised(self) -> tuple[str, ...] | None:
        """Which of the op's outputs it returns and is judged by; None: all."""
        return None

    def inputs(self) -> Inputs:
        """Memory for its inputs, where it wants them somewhere; else the first turn's are kept."""
        return {}

    def outputs(self) -> Tensors:
        """New memory for the outputs that the caller gives to a call; poisoned before every turn.
        Collective."""
        return self.problem.empty(self.kind)

    def graph_pool(self) -> tuple[int, int] | None:
        """What its graphs take memory from; None: torch's choice."""
        return None

    def before(self, inputs: Inputs) -> None:  # noqa: B027 - most have nothing to do
        """What a turn needs of its inputs and is not timed; may add to them. Collective."""

    @abstractmethod
    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        """Do the work on the current stream; returns the results by name, in ``outputs`` or memory of
        its own. What Python does here is timed in some modes: it is as little for one contender as for
        another, and what can be made before is made in the constructor."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """After its last turn, with the device idle. Collective."""

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        """What the results of a call say of the op's outputs; not timed. Collective."""
        return results

    def limits(self) -> dict[str, float]:
        """Largest relative error that counts as right, by output; an output that is missing here must
        be equal."""
        if self.problem.op in GEMMS:
            return {"out": library_limit(self.problem)}
        variances = LAYER_VARIANCES if self.op == MOE_LAYER else 2.0
        return widened(self.problem.oracle(self.kind).tolerances(), variances)


LAYER_VARIANCES = 3.5
"""Of libraries' layers of experts, as a ratio to two roundings: gate, up, SiLU and their product are
rounded, results, ranks' sums of them, and the sum of these."""


def widened(limits: Mapping[str, float], variances: float) -> dict[str, float]:
    """Limits where there may be the variance of so many roundings instead of one's."""
    return {name: limit * math.sqrt(variances) for name, limit in limits.items()}


def library_limit(problem: Problem) -> float:
    """What a library that adds in the output's dtype can reach, at the margin of our own limit.

    A product alone may be split along K, its parts rounded and their sum rounded again: twice the
    variance of one rounding. Ring and two-shot collectives round every partial product and then
    every sum of two or more terms: W + (2 + ... + W) roundings of one term's variance, where one
    rounding of the sum of W terms counts W.
    """
    world = problem.world
    rounded = 2.0 if problem.gathers else 1 + (world * (world + 1) / 2 - 1) / world
    return TOLERANCE[problem.case.out_dtype] * math.sqrt(max(2.0, rounded))
