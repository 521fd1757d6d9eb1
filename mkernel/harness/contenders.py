"""What takes turns: mkernel's op, the plain library path, and the parts of it alone.

A contender is made anew for every problem. Another one is named ``module:Class``, as backends are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import distributed

import mkernel
from mkernel.backends.contracts.instrumented import Instrumented, View
from mkernel.backends.contracts.scaled import block_product, padded_blocks
from mkernel.cases.all_reduce import EPS
from mkernel.cases.base import TOLERANCE, Outcome
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.errors import ArgumentError
from mkernel.harness import (
    library_attention,
    library_attention_backward,
    library_moe,
    library_sums,
)
from mkernel.harness.collectives import all_gather, collective
from mkernel.harness.library_moe import kept
from mkernel.harness.problem import Inputs, Kind, Problem, Tensors
from mkernel.harness.spec import GEMMS
from mkernel.ops import moe
from mkernel.ops.moe_gemm_combine import gemm_combine
from mkernel.ops.registration import group_name, ops
from mkernel.ops.scales import Scaled
from mkernel.plan.model import ScaleMode
from mkernel.plan.ops import BACKWARD, COMPANIONS
from mkernel.plan.scales import scale_sizes
from mkernel.world.lifecycle import current

_EXPERTS = ("moe_dispatch_gemm", "moe_gemm_combine")
_SCALES = ("a_scale", "b_scale")
_ATTENTION: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    "ring_attention": library_attention.call,
    "ring_attention_backward": library_attention_backward.call,
}
"""Attention by a library alone, by op."""
_LIBRARIES: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    "all_reduce": library_sums.call,
    **_ATTENTION,
    **library_moe.CALLS,
}
"""All of such an op by libraries."""
_ON_PARTS: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    "ring_attention": library_attention.alone,
    "ring_attention_backward": library_attention_backward.alone,
}
"""The same on parts that are there."""


def product(a: torch.Tensor, inputs: Inputs, out: torch.Tensor, *, fast: bool) -> None:
    """out = a @ b of the inputs, by torch; of e4m3 ones with their scales, and as ``use_fast_accum``
    says."""
    if "a_scale" not in inputs:
        torch.matmul(a, inputs["b"], out=out)
        return
    of_a, of_b = inputs["a_scale"], inputs["b_scale"]
    if of_b.numel() > 1 and of_b.shape != (1, out.shape[1]):  # by blocks
        block_product(a, inputs["b"], of_a, padded_blocks(of_b), out)
        return
    if len(of_a) > 1 and of_b.numel() == 1:  # ranks' single scales, by rows
        of_b = of_b.expand(1, out.shape[1]).contiguous()
    torch._scaled_mm(
        a, inputs["b"], scale_a=of_a, scale_b=of_b.flatten()[None], out_dtype=out.dtype,
        use_fast_accum=fast, out=out,
    )  # fmt: skip


def scales_without_product(problem: Problem) -> str | None:
    """Why there is no product of torch's for the problem, or None."""
    if problem.case.options.get("scales") != "block" or problem.device.type == "cuda":
        return None
    return "torch has no product with scales by blocks here"


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
        self.fast = problem.fast_accum

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

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        """What the results of a call say of the op's outputs; not timed. Collective."""
        return results

    def limits(self) -> dict[str, float]:
        """Largest relative error that counts as right, by output; an output that is missing here must
        be equal."""
        if self.problem.op in GEMMS:
            return {"out": library_limit(self.problem)}
        variances = _LAYER_VARIANCES if self.op == MOE_LAYER else 2.0
        return _widened(self.problem.oracle(self.kind).tolerances(), variances)


_LAYER_VARIANCES = 3.5
"""Of libraries' layers of experts, as a ratio to two roundings: gate, up, SiLU and their product are
rounded, results, ranks' sums of them, and the sum of these."""


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

    A combine, and GEMM+combine, have their handle from a dispatch before the turn. With a capacity,
    which the case's options name, nothing of MoE waits for the host.
    """

    name = "mkernel"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._gemm = getattr(mkernel, self.op) if self.op in GEMMS else None
        self._capacity: int | None = problem.case.options.get("capacity")
        self._causal = bool(problem.case.sizes.get("causal"))
        self._group = group_name(None)

    def promised(self) -> tuple[str, ...] | None:
        return DISPATCHED if self.op == "moe_dispatch_gemm" else None

    def before(self, inputs: Inputs) -> None:
        if self.op == ATTENTION_BACKWARD:
            for name, each in self._attended(inputs).items():
                kept(inputs, name, each)
        if self.op not in COMPANIONS:
            return
        sent = mkernel.moe_dispatch_gemm(
            inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity
        )
        names = ("handle.counts", "handle.routing")
        inputs["handle"] = type(sent.handle)(*map(partial(kept, inputs), names, sent.handle))
        rows = "y" if self.op == "moe_combine" else "h"
        kept(inputs, "rows", padded(inputs[rows], self._capacity))

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self._gemm is not None:
            scales = {name: inputs[name] for name in _SCALES if name in inputs}
            out = self._gemm(
                inputs["a"], inputs["b"], out=outputs["out"], use_fast_accum=self.fast, **scales
            )
            return {"out": out}
        if self.op == "all_reduce":
            return self._summed(inputs, outputs)
        if self.op in _ATTENTION:
            backward = self.op == ATTENTION_BACKWARD
            return self._gradients(inputs) if backward else self._attended(inputs)
        return self._of_experts(inputs)

    def _of_experts(self, inputs: Inputs) -> Tensors:
        if self.op == "moe_dispatch_gemm":
            rows, counts, _ = mkernel.moe_dispatch_gemm(
                inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity
            )
            return {"outputs": rows, "counts": counts}
        if self.op == MOE_LAYER:
            return self._layer(inputs)
        rows, handle, weights = inputs["rows"], inputs["handle"], inputs["topk_weights"]
        if self.op == "moe_combine":
            return {"out": mkernel.moe_combine(rows, handle, weights)}
        return {"out": mkernel.moe_gemm_combine(rows, inputs["w2"], handle, weights)}

    def _layer(self, inputs: Inputs) -> Tensors:
        sent = mkernel.moe_dispatch_gemm(
            inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity,
            activation="silu_and_mul",
        )  # fmt: skip
        weights = inputs["topk_weights"]
        return {"out": mkernel.moe_gemm_combine(sent.outputs, inputs["w2"], sent.handle, weights)}

    def _summed(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if "norm_weight" not in inputs:
            return {"out": mkernel.all_reduce(inputs["x"], out=outputs["out"])}
        residual, weight = inputs["residual"], inputs["norm_weight"]
        out, new = mkernel.all_reduce(
            inputs["x"], residual=residual, norm_weight=weight, eps=EPS, out=outputs["out"]
        )
        return {"out": out, "residual_out": new}

    def _attended(self, inputs: Inputs) -> Tensors:
        out, lse = mkernel.ring_attention(
            *(inputs[name] for name in "qkv"), causal=self._causal, return_lse=True
        )
        return {"out": out, "lse": lse}

    def _gradients(self, inputs: Inputs) -> Tensors:
        """By the op that autograd calls."""
        found = ops.ring_attention_backward(
            inputs["grad_out"], None, *(inputs[name] for name in "qkv"), None, inputs["out"],
            inputs["lse"], causal=self._causal, group=self._group,
        )  # fmt: skip
        return {f"grad_{name}": each for name, each in zip("qkv", found, strict=True)}

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        return without_padding(results)

    def limits(self) -> dict[str, float]:
        return self.problem.case.tolerances()

    def close(self) -> None:
        mkernel.synchronize()  # raises what the device found of the last calls


ATTENTION_BACKWARD = BACKWARD["ring_attention"]
DISPATCHED = ("outputs", "counts")
"""Outputs of a dispatch; its combine is an op of its own."""


def padded(rows: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """As many rows as the capacity says, those at the end being zero."""
    if capacity is None:
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, capacity - len(rows)))


def without_padding(results: Tensors) -> Tensors:
    """A dispatch's results with the rows that its counts name, of those that a capacity gave."""
    if "counts" not in results:
        return results
    return {**results, "outputs": results["outputs"][: int(results["counts"].sum())]}


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
        scaled = None
        if "a_scale" in inputs:
            scaled = Scaled(inputs["a_scale"], inputs["b_scale"], self.fast)
        done = op.call(inputs["a"], inputs["b"], out=outputs["out"], scaled=scaled, **self.options)
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
    library takes that way, what overlap is compared with. Of GEMM+combine weights travel first, and
    sums behind the product either way."""

    name = "mkernel-sequential"
    options: ClassVar[Mapping[str, str]] = {"view": "sequential"}

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in (*GEMMS, *_EXPERTS) or problem.nodes == 1:
            return "for GEMM ops and products of experts between nodes"
        has_views = isinstance(current().accelerator, Instrumented)
        return None if has_views else "the accelerator has no such view"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "moe_dispatch_gemm":
            done = moe.dispatch(
                inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity,
                view="sequential",
            )  # fmt: skip
            return {name: done.outputs[name] for name in DISPATCHED}
        if self.op == "moe_gemm_combine":
            rows, handle, weights = inputs["rows"], inputs["handle"], inputs["topk_weights"]
            done = gemm_combine(rows, inputs["w2"], handle, weights, view="sequential")
            return {"out": done.outputs["out"]}
        return super().call(inputs, outputs)


class PartAlone(Contender):
    """A part of a GEMM op. Those of other ops are not timed alone."""

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return None if problem.op in GEMMS else "parts are timed alone for the GEMM ops only"


class Gemm(Contender):
    """The op's products alone, by torch: cuBLAS on CUDA devices. Of MoE grouped ones, of attention the
    library's on parts, whose merge is not timed. Its time is T_c."""

    name = "gemm"
    kind = "compute"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op in ("all_reduce", "moe_combine"):
            return "the op has no product"
        if problem.op not in GEMMS and problem.bars_libraries:
            return problem.bars_libraries
        return scales_without_product(problem)

    def promised(self) -> tuple[str, ...] | None:
        return ("outputs",) if self.op == "moe_dispatch_gemm" else None

    def before(self, inputs: Inputs) -> None:
        if self.op in _ATTENTION:
            kept(inputs, "kv", library_attention.gathered(self.problem, inputs))
            if self.op == ATTENTION_BACKWARD:
                library_attention_backward.forward(self.problem, inputs)
        elif self.op not in GEMMS:
            routing = library_moe.Exchanged(self.problem, inputs["topk_ids"])
            inputs["routing"] = routing
            kept(inputs, "counts", routing.counts)
            rows = inputs["h"] if self.op == "moe_gemm_combine" else routing.send(inputs["x"])
            kept(inputs, "rows", padded(rows, self.problem.case.options.get("capacity")))

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op in GEMMS:
            product(inputs["a"], inputs, outputs["out"], fast=self.fast)
            return outputs
        if self.op in _ATTENTION:
            return _ON_PARTS[self.op](self.problem, inputs)
        rows, counts = inputs["rows"], inputs["counts"]
        if self.op == MOE_LAYER:
            return {"rows": library_moe.gated_products(rows, inputs["w"], inputs["w2"], counts)}
        w = inputs["w" if self.op == "moe_dispatch_gemm" else "w2"]
        return {"rows": library_moe.products(rows, w, counts)}

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        if self.op in GEMMS:
            return results
        if self.op == "ring_attention":
            return library_attention.merged_alone(self.problem, results)
        if self.op == ATTENTION_BACKWARD:
            return library_attention_backward.merged_alone(self.problem, inputs, results)
        rows = results["rows"][: int(inputs["counts"].sum())]
        if self.op == "moe_dispatch_gemm":
            return {"outputs": rows}
        return {"out": inputs["routing"].bring_home(rows, inputs["topk_weights"])}


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
            case = problem.case
            dtype = getattr(torch, case.dtype if problem.gathers else case.out_dtype)
            self._between = torch.empty(shape, dtype=dtype, device=problem.device)
            mode: ScaleMode = case.options.get("scales") or "tensor"
            rows = problem.world if mode == "tensor" else sizes["m"]
            (_, columns), _ = scale_sizes(mode, rows, sizes["n"], sizes["k"])
            self._scales = torch.empty((rows, columns), device=problem.device)
            self._repeat = sizes["m"] // rows

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.device.type != cls.device:
            return f"only on {cls.device} devices"
        return problem.bars_libraries or scales_without_product(problem)

    def promised(self) -> tuple[str, ...] | None:
        return DISPATCHED if self.op == "moe_dispatch_gemm" else None

    def before(self, inputs: Inputs) -> None:
        if self.op in COMPANIONS:
            inputs["routing"] = library_moe.Exchanged(self.problem, inputs["topk_ids"])
        if self.op == ATTENTION_BACKWARD:
            library_attention_backward.forward(self.problem, inputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        op = self.op
        if op == "all_gather_gemm":
            collective(op, inputs["a"], self._between)
            if "a_scale" in inputs:
                inputs = {**inputs, "a_scale": self._gathered_scales(inputs["a_scale"])}
            product(self._between, inputs, outputs["out"], fast=self.fast)
            return outputs
        if op == "gemm_all_reduce":
            product(inputs["a"], inputs, outputs["out"], fast=self.fast)
            distributed.all_reduce(outputs["out"])
            return outputs
        if op == "gemm_reduce_scatter":
            product(inputs["a"], inputs, self._between, fast=self.fast)
            collective(op, self._between, outputs["out"])
            return outputs
        return _LIBRARIES[op](self.problem, inputs)

    def _gathered_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Of all ranks' rows; a single one of each rank for each of its rows."""
        all_gather(self._scales, scale)
        return (
            self._scales if self._repeat == 1 else self._scales.repeat_interleave(self._repeat, 0)
        )


class NcclCublas(Sequential):
    """The plain library path on CUDA devices."""

    name = "nccl+cublas"
    device = "cuda"


class GlooMatmul(Sequential):
    """The plain library path on a CPU."""

    name = "gloo+matmul"
    device = "cpu"


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
    "symm_mem-one-shot": "mkernel.harness.symm_mem_sums:OneShot",
    "symm_mem-two-shot": "mkernel.harness.symm_mem_sums:TwoShot",
    "deepep": "mkernel.harness.deep_ep:DeepEp",
    "gather+grouped": "mkernel.harness.library_peers:GatheredExperts",
    "ring": "mkernel.harness.library_peers:Ring",
    "context-parallel": "mkernel.harness.context_parallel:ContextParallel",
    "context-parallel-alltoall": "mkernel.harness.context_parallel:ContextParallelAllToAll",
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
