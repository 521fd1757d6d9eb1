"""Contenders: what each provides, how far its results may be off, and the table of those with a name.

A contender is made anew for every problem. One without a name here is named ``module:Class``, as
backends are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import ClassVar

from mkernel.cases.base import TOLERANCE
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.cases.moe_layer import MoeLayerCase
from mkernel.errors import ArgumentError
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.spec import GEMMS, LOOP_CALLS
from mkernel.plan.ops import BACKWARD

ATTENTION_BACKWARD = BACKWARD["ring_attention"]
EXPERTS = ("moe_dispatch_gemm", "moe_gemm_combine", MOE_LAYER)
"""Ops with products of experts."""
SUMS = ("all_reduce", "gemm_all_reduce")
"""Ops whose result is a sum on every rank, which may have a residual and a norm."""
DISPATCHED = ("outputs", "counts")
"""Outputs of a dispatch; its combine is an op of its own."""

NO_ROUNDING = 1e-12
"""Limit of what is only moved: below any wrong element, above what float64 loses where all rows are
compared by their products with random columns."""


class Contender(ABC):
    """One way to do a kind of work.

    The order of use: ``unusable`` (None), construction (collective: scratch memory is allocated
    here), then a :meth:`call` a turn, each with inputs and outputs that are new in content.

    Attributes:
        ops: those that it does, empty: all; and in words, for a row where it is absent.
        device: the kind of device that it runs on, as torch names it; empty: any, CPUs where ``cpu``.
        library: whether it communicates by a library, which a problem may bar.
    """

    name: ClassVar[str]
    ops: ClassVar[tuple[str, ...]] = ()
    ops_text: ClassVar[str] = ""
    device: ClassVar[str] = ""
    cpu: ClassVar[bool] = True
    library: ClassVar[bool] = False
    kind: ClassVar[Kind] = "op"
    promises: ClassVar[bool] = False
    """True where it makes the invariant results of the case's option; others have a case without it."""
    most_kept: ClassVar[int] = LOOP_CALLS
    """Results of a loop that may be alive at once."""
    shares_outputs = False
    """Calls of a turn share memory for their outputs, so that what :meth:`place` put there is lost."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem if self.promises else problem.without("invariant")
        self.op = problem.op
        self.fast = problem.fast_accum

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        """Return why it cannot take part, or None."""
        if cls.ops and problem.op not in cls.ops:
            return cls.ops_text
        if cls.device and problem.device.type != cls.device:
            return f"only on {cls.device} devices"
        if not cls.cpu and problem.device.type == "cpu":
            return "not on CPUs"
        return problem.bars_libraries if cls.library else None

    @classmethod
    def way(cls, problem: Problem) -> str:
        """Return which of several ways the op's calls take; empty: there is one, or their times do not
        depend on it."""
        return ""

    def promised(self) -> tuple[str, ...] | None:
        """Return which of the op's outputs it returns and is judged by; None: all."""
        return DISPATCHED if self.op == "moe_dispatch_gemm" else None

    def inputs(self) -> Inputs:
        """Return memory for its inputs, where it wants them somewhere; else the first turn's are
        kept."""
        return {}

    def outputs(self) -> Tensors:
        """Return new memory for the outputs that the caller gives to a call; poisoned before every
        turn. Collective."""
        return self.problem.empty(self.kind)

    def graph_pool(self) -> tuple[int, int] | None:
        """Return the pool that its graphs take memory from; None: torch's choice."""
        return None

    def before(self, inputs: Inputs) -> None:  # noqa: B027 - most have nothing to do
        """Make what a turn needs of its inputs and is not timed; may add to them. Collective."""

    def place(self, inputs: Inputs, outputs: Tensors) -> None:  # noqa: B027 - most have nothing to do
        """Put into a call's outputs, which were poisoned, what the call sums in place. It is not timed,
        since the product before a sum writes there."""

    @abstractmethod
    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        """Do the work on the current stream; return the results by name, in ``outputs`` or memory of
        its own. What Python does here is timed in some modes: it is as little for one contender as for
        another, and what can be made before is made in the constructor."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Free what it holds, after its last turn, with the device idle. Collective."""

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        """Return the op's outputs, given the results of a call; not timed. Collective."""
        return results

    def limits(self) -> dict[str, float]:
        """Return the largest relative error that counts as right, by output; an output that is missing
        here must be equal."""
        if self.problem.op in GEMMS:
            return dict.fromkeys(self.problem.memory(self.kind), library_limit(self.problem))
        oracle = self.problem.oracle(self.kind)
        variances = LAYER_VARIANCES if self.op == MOE_LAYER else 2.0
        limits = widened(oracle.tolerances(), variances)
        if isinstance(oracle, MoeLayerCase) and self.problem.case.options.get("scales"):
            limit = math.hypot(oracle.rounded * math.sqrt(variances), OTHER_STEPS)
            return dict.fromkeys(limits, limit)
        return limits


LAYER_VARIANCES = 3.5
"""The variance of libraries' layers of experts, as a ratio to two roundings': gate, up, SiLU and their
product are rounded, results, ranks' sums of them, and the sum of these."""
OTHER_STEPS = 2e-2
"""The error of libraries' layers in e4m3 because gate and up were rounded to bfloat16 before they were
quantised, some to another step: emulated up to 1.5e-2, and 1.8e-2 where the product's operands were
rounded, too. A layer that quantises nothing is off by 2.6e-2."""


def widened(limits: Mapping[str, float], variances: float) -> dict[str, float]:
    """Return limits where there may be the variance of so many roundings instead of one's."""
    return {name: limit * math.sqrt(variances) for name, limit in limits.items()}


def library_limit(problem: Problem) -> float:
    """Return what a library that adds in the output's dtype can reach, at the margin of our own limit.

    A product alone may be split along K, its parts rounded and their sum rounded again: twice the
    variance of one rounding. Ring and two-shot collectives round every partial product and then
    every sum of two or more terms: W + (2 + ... + W) roundings of one term's variance, where one
    rounding of the sum of W terms counts W.
    """
    world = problem.world
    rounded = 2.0 if problem.gathers else 1 + (world * (world + 1) / 2 - 1) / world
    return TOLERANCE[problem.case.out_dtype] * math.sqrt(max(2.0, rounded))


_CLASSES = {
    "mkernel": "own:Mkernel",
    "mkernel-symmetric": "own:MkernelSymmetric",
    "mkernel-allocating": "own:MkernelAllocating",
    "mkernel-fused": "own:MkernelFused",
    "mkernel-library": "own:MkernelLibrary",
    "gemm": "library:Gemm",
    "comm": "library:Collective",
    "copy": "symm_mem:Copy",
    "mkernel-parts": "own:MkernelParts",
    "mkernel-halves": "own:MkernelHalves",
    "mkernel-sequential": "own:MkernelSequential",
    "mkernel-invariant": "own:MkernelInvariant",
    "nccl+cublas": "library:NcclCublas",
    "gloo+matmul": "library:GlooMatmul",
    "nccl-windows": "nccl_windows:NcclWindows",
    "symm_mem": "symm_mem:SymmMem",
    "symm_mem-one-shot": "symm_mem:OneShot",
    "symm_mem-two-shot": "symm_mem:TwoShot",
    "flashinfer-one-shot": "flash_infer:OneShot",
    "flashinfer-two-shot": "flash_infer:TwoShot",
    "host-puts": "host_puts:HostPuts",
    "host-puts-by-rank": "host_puts:HostPutsByRank",
    "deepep": "deep_ep:DeepEp",
    "gather+grouped": "experts:GatheredExperts",
    "gather+dequantised": "experts:DequantisedExperts",
    "gather+scaled": "experts:ScaledGroupedExperts",
    "gather+deepgemm": "deep_gemm:DeepGemm",
    "invariant-unfused": "invariant:Unfused",
    "ring": "attention:Ring",
    "context-parallel": "context_parallel:ContextParallel",
    "context-parallel-alltoall": "context_parallel:ContextParallelAllToAll",
}
"""Modules of this package and their classes, by name."""
NAMES = tuple(_CLASSES)
ALWAYS = ("gemm", "comm", "copy")
"""The parts alone, which give T_c and T_m."""
OURS = (
    "mkernel", "mkernel-symmetric", "mkernel-allocating", "mkernel-fused", "mkernel-library",
    "mkernel-parts", "mkernel-halves", "mkernel-sequential", "mkernel-invariant",
)  # fmt: skip
PROMISING = ("mkernel-invariant", "invariant-unfused")
"""Contenders of invariant results, ours first; no peers of what promises none."""
PEERS = (
    *(name for name in NAMES if name not in (*OURS, *ALWAYS, *PROMISING)),
    "mkernel-sequential",
)
"""The contenders that take part unless others are named. One with a promise of its own does so by name
alone."""
SEQUENTIAL = ("nccl+cublas", "gloo+matmul", "mkernel-sequential")


def named(name: str) -> type[Contender]:
    """Return the contender of that name, or at ``module:Class``. ArgumentError."""
    known = _CLASSES.get(name)
    module, colon, attribute = (f"{__name__}.{known}" if known else name).partition(":")
    if not colon:
        raise ArgumentError("--peers", repr(name), f"one of: {', '.join(NAMES)}; or module:Class")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("--peers", name, "module:Class", why=str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Contender)):
        raise ArgumentError("--peers", name, "a class that derives from Contender")
    return found


def chosen(
    peers: Sequence[str] | None, with_mkernel: bool, invariant: bool = False
) -> tuple[str, ...]:
    """Return the contenders of a run in their order: mkernel, those of invariant results where it has
    them, the peers (default: all; beside invariant results none), the parts."""
    wanted = (() if invariant else PEERS) if peers is None else tuple(peers)
    for name in wanted:
        named(name)
    first = ("mkernel",) if with_mkernel else ()
    promising = PROMISING[not with_mkernel :] if invariant else ()
    return tuple(dict.fromkeys((*first, *promising, *wanted, *ALWAYS)))
