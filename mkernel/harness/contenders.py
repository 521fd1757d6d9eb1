"""What takes turns: mkernel's op, the plain library path, and the parts of it alone.

A contender is made anew for every problem. Another one is named ``module:Class``, as backends are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import distributed

import mkernel
from mkernel.backends.contracts.instrumented import Instrumented, View
from mkernel.cases.base import TOLERANCE, Outcome
from mkernel.errors import ArgumentError
from mkernel.harness import library_ops
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.spec import GEMMS
from mkernel.plan.ops import COMPANIONS
from mkernel.world.lifecycle import current


class Contender(ABC):
    """One way to do a kind of work.

    The order of use: ``unusable`` (None), construction (collective: scratch memory is allocated
    here), then a :meth:`call` a turn, each with inputs and outputs that are new in content.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "op"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.op = problem.op

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        """Why it cannot take part, or None."""
        return None

    def promised(self) -> tuple[str, ...] | None:
        """Which of the op's outputs it returns and is judged by; None: all."""
        return None

    def inputs(self) -> Inputs:
        """Memory for its inputs, where it wants them somewhere; else the first turn's are kept."""
        return {}

    def outputs(self) -> Tensors:
        """Memory for the outputs that the caller gives; asked for in every turn, and poisoned before
        the call."""
        return self.problem.empty(self.kind)

    def before(self, inputs: Inputs) -> None:  # noqa: B027 - most have nothing to do
        """What a turn needs of its inputs and is not timed; may add to them. Collective."""

    @abstractmethod
    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        """Do the work on the current stream; returns the results by name, in ``outputs`` or memory of
        its own. What Python does here is timed in some modes: it is as little for one contender as for
        another, and what can be made before is made in the constructor."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """After its last turn, with the device idle. Collective."""

    def limits(self) -> dict[str, float]:
        """Largest relative error that counts as right, by output; an output that is missing here must
        be equal."""
        if self.problem.op in GEMMS:
            return {"out": library_limit(self.problem)}
        return _widened(self.problem.oracle(self.kind).tolerances(), 2.0)


def _widened(limits: Mapping[str, float], variances: float) -> dict[str, float]:
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


class Mkernel(Contender):
    """The public API on the world's accelerator.

    For a dispatch it calls what a layer does: dispatch and combine. A combine alone, and GEMM+combine,
    have their handle from a dispatch before the turn.
    """

    name = "mkernel"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._gemm = getattr(mkernel, self.op) if self.op in GEMMS else None

    def before(self, inputs: Inputs) -> None:
        if self.op in COMPANIONS:
            inputs["handle"] = mkernel.moe_dispatch_gemm(
                inputs["x"], inputs["topk_ids"], inputs["w"]
            ).handle

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self._gemm is not None:
            return {"out": self._gemm(inputs["a"], inputs["b"], out=outputs["out"])}
        if self.op == "ring_attention":
            causal = bool(self.problem.case.sizes.get("causal"))
            out, lse = mkernel.ring_attention(
                inputs["q"], inputs["k"], inputs["v"], causal=causal, return_lse=True
            )
            return {"out": out, "lse": lse}
        weights = inputs["topk_weights"]
        if self.op == "moe_combine":
            return {"out": mkernel.moe_combine(inputs["y"], inputs["handle"], weights)}
        if self.op == "moe_gemm_combine":
            h, w2, handle = inputs["h"], inputs["w2"], inputs["handle"]
            return {"out": mkernel.moe_gemm_combine(h, w2, handle, weights)}
        rows, counts, handle = mkernel.moe_dispatch_gemm(
            inputs["x"], inputs["topk_ids"], inputs["w"]
        )
        out = mkernel.moe_combine(rows, handle, weights)
        return {"outputs": rows, "counts": counts, "out": out}

    def limits(self) -> dict[str, float]:
        return self.problem.case.tolerances()

    def close(self) -> None:
        mkernel.synchronize()  # raises what the device found of the last calls


class InView(Contender):
    """The op in one view of it: a contender of ``mkernel run`` alone.

    Attributes:
        outcome: of the last call. trace: whether the backend records the next one's instructions.
    """

    outcome: Outcome
    trace = False

    def __init__(self, problem: Problem, view: View) -> None:
        super().__init__(problem)
        self._view = view

    def promised(self) -> tuple[str, ...] | None:
        return () if self._view == "compute_only" else None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self.outcome = self.problem.case.call(inputs, outputs, view=self._view, trace=self.trace)
        return dict(self.outcome.outputs)

    def limits(self) -> dict[str, float]:
        return self.problem.case.tolerances()


class MkernelSymmetric(Mkernel):
    """The same with the output in the library's symmetric memory: peers write straight into it."""

    name = "mkernel-symmetric"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._out = mkernel.empty(*problem.memory(self.kind)["out"])

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return None if problem.op == "gemm_all_reduce" else "peers write to no output of this op"

    def outputs(self) -> Tensors:
        return {"out": self._out}


class WithOptions(Mkernel):
    """A GEMM op with options of its own call."""

    options: ClassVar[Mapping[str, str]]

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        op: Any = import_module(f"mkernel.ops.{self.op}").OP
        done = op.call(inputs["a"], inputs["b"], out=outputs["out"], **self.options)
        return {"out": done.outputs["out"]}


class MkernelFused(WithOptions):
    """The op on its fused path, whatever the planner would choose."""

    name = "mkernel-fused"
    options: ClassVar[Mapping[str, str]] = {"path": "fused"}

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op in mkernel.capabilities().library_ops:
            return None
        return "the accelerator has one path for this op: mkernel"


class MkernelLibrary(MkernelFused):
    """The op on its library path: a product of torch's and a collective of ours."""

    name = "mkernel-library"
    options: ClassVar[Mapping[str, str]] = {"path": "library"}


class MkernelSequential(WithOptions):
    """The op's exchange first, by the same NIC and kernels, then its product: between nodes, where no
    library takes that way, what overlap is compared with."""

    name = "mkernel-sequential"
    options: ClassVar[Mapping[str, str]] = {"view": "sequential"}

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in GEMMS or problem.nodes == 1:
            return "for GEMM ops between nodes"
        has_views = isinstance(current().accelerator, Instrumented)
        return None if has_views else "the accelerator has no such view"


class PartAlone(Contender):
    """A part of a GEMM op. Those of other ops are not timed alone."""

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return None if problem.op in GEMMS else "parts are timed alone for the GEMM ops only"


class Gemm(PartAlone):
    """torch.matmul alone: cuBLAS on CUDA devices. Its time is T_c."""

    name = "gemm"
    kind = "compute"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        torch.matmul(inputs["a"], inputs["b"], out=outputs["out"])
        return outputs

    def limits(self) -> dict[str, float]:
        return _widened(self.problem.case.tolerances(), 2.0)


class Collective(PartAlone):
    """torch.distributed alone: NCCL on CUDA devices, gloo on a CPU. Its time counts as T_m."""

    name = "comm"
    kind = "communication"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or problem.bars_libraries

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return {"out": collective(self.op, inputs["x"], outputs["out"])}

    def limits(self) -> dict[str, float]:
        return {"out": 0.0} if self.problem.gathers else super().limits()


class Sequential(Contender):
    """torch's products and torch.distributed's collectives, one after the other."""

    name = "sequential"
    device: ClassVar[str] = "cpu"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._between = torch.empty(0)
        if problem.op in GEMMS:
            sizes = problem.case.sizes
            shape = sizes["m"], sizes["k" if problem.gathers else "n"]
            dtype = getattr(torch, problem.case.dtype)
            self._between = torch.empty(shape, dtype=dtype, device=problem.device)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.device.type != cls.device:
            return f"only on {cls.device} devices"
        return problem.bars_libraries

    def promised(self) -> tuple[str, ...] | None:
        return ("out",) if self.problem.op == "ring_attention" else None

    def before(self, inputs: Inputs) -> None:
        if self.op in COMPANIONS:
            inputs["routing"] = library_ops.Routing(self.problem, inputs["topk_ids"])
        elif self.op == "ring_attention" and "mask" not in inputs:
            inputs["mask"] = library_ops.mask(self.problem)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        op = self.op
        if op == "all_gather_gemm":
            collective(op, inputs["a"], self._between)
            torch.matmul(self._between, inputs["b"], out=outputs["out"])
            return outputs
        if op == "gemm_all_reduce":
            distributed.all_reduce(torch.matmul(inputs["a"], inputs["b"], out=outputs["out"]))
            return outputs
        if op == "gemm_reduce_scatter":
            torch.matmul(inputs["a"], inputs["b"], out=self._between)
            collective(op, self._between, outputs["out"])
            return outputs
        return library_ops.CALLS[op](self.problem, inputs)


class NcclCublas(Sequential):
    """The plain library path on CUDA devices."""

    name = "nccl+cublas"
    device = "cuda"


class GlooMatmul(Sequential):
    """The plain library path on a CPU."""

    name = "gloo+matmul"
    device = "cpu"


def collective(op: str, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The op's collective by torch.distributed, into ``out``. ``source`` may be summed in place."""
    if op == "all_gather_gemm":
        _ALL_GATHER(out, source)
    elif op == "gemm_reduce_scatter":
        _REDUCE_SCATTER(out, source)
    else:
        distributed.all_reduce(source)
        return source
    return out


def _newest(*names: str) -> Callable[..., Any]:
    """torch.distributed's function under the first of its names that this torch knows."""
    found: Callable[..., Any] = next(
        getattr(distributed, name) for name in names if hasattr(distributed, name)
    )
    return found


_ALL_GATHER = _newest("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _newest("reduce_scatter_single", "reduce_scatter_tensor")


_KNOWN = {
    **{
        kind.name: f"{__name__}:{kind.__name__}"
        for kind in (Mkernel, MkernelSymmetric, MkernelFused, MkernelLibrary, Gemm, Collective)
    },
    "copy": "mkernel.harness.symm_mem:Copy",
    "mkernel-sequential": f"{__name__}:MkernelSequential",
    "nccl+cublas": f"{__name__}:NcclCublas",
    "gloo+matmul": f"{__name__}:GlooMatmul",
    "symm_mem": "mkernel.harness.symm_mem:SymmMem",
}
NAMES = tuple(_KNOWN)
ALWAYS = ("gemm", "comm", "copy")
"""What gives T_c and T_m."""
OURS = ("mkernel", "mkernel-symmetric", "mkernel-fused", "mkernel-library", "mkernel-sequential")
PEERS = (*(name for name in NAMES if name not in (*OURS, *ALWAYS)), "mkernel-sequential")
"""Who takes part unless others are named."""
SEQUENTIAL = ("nccl+cublas", "gloo+matmul", "mkernel-sequential")


def named(name: str) -> type[Contender]:
    """The contender of that name, or at ``module:Class``. ArgumentError."""
    module, colon, attribute = _KNOWN.get(name, name).partition(":")
    if not colon:
        raise ArgumentError("--peers", repr(name), f"one of: {', '.join(NAMES)}; or module:Class")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("--peers", name, "module:Class", why=str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Contender)):
        raise ArgumentError("--peers", name, "a class that derives from Contender")
    return found


def chosen(peers: Sequence[str] | None, with_mkernel: bool) -> tuple[str, ...]:
    """The contenders of a run in their order: mkernel, the peers (default: all), the parts alone."""
    wanted = PEERS if peers is None else tuple(peers)
    for name in wanted:
        named(name)
    first = ("mkernel",) if with_mkernel else ()
    return tuple(dict.fromkeys((*first, *wanted, *ALWAYS)))
