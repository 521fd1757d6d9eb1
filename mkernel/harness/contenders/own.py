"""mkernel's op as a contender: as planned, in symmetric memory, by one path alone, in one view."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import mkernel
from mkernel.backends.contracts.instrumented import Instrumented, View
from mkernel.cases.base import Outcome
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.harness.contenders import ATTENTION_BACKWARD, DISPATCHED, EXPERTS, SUMS, Contender
from mkernel.harness.contenders.experts import kept, padded, without_padding
from mkernel.harness.contenders.norm import has_norm
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS
from mkernel.ops import moe
from mkernel.ops.around import Scaled
from mkernel.ops.gemm import GemmCall
from mkernel.ops.moe_gemm_combine import gemm_combine
from mkernel.ops.registration import group_name, ops
from mkernel.plan.ops import COMPANIONS
from mkernel.world.lifecycle import current

_SCALES = ("a_scale", "b_scale")


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
        self._normed = has_norm(problem)
        case: Any = self.problem.case
        self._eps: float = case.eps if self._normed else 0.0
        sums = {} if case.invariant is None else {"invariant": case.invariant}
        self._promise: dict[str, Any] = sums

    @classmethod
    def way(cls, problem: Problem) -> str:
        """Return the kind of the plan's schedule, of ring attention."""
        if problem.op != "ring_attention":
            return ""
        sizes: dict[str, Any] = dict(problem.case.sizes)
        schedule = mkernel.plan(problem.op, dtype=problem.case.dtype, **sizes).schedule
        return "" if schedule is None else schedule.kind

    def before(self, inputs: Inputs) -> None:
        if self.op == ATTENTION_BACKWARD:
            for name, each in self._attended(inputs).items():
                kept(inputs, name, each)
        if self.op not in COMPANIONS:
            return
        sent = self._sent(inputs)
        names = ("handle.counts", "handle.routing")
        inputs["handle"] = type(sent.handle)(*map(partial(kept, inputs), names, sent.handle))
        rows = "y" if self.op == "moe_combine" else "h"
        kept(inputs, "rows", padded(inputs[rows], self._capacity))
        if "h_scale" in inputs:
            kept(inputs, "rows_scale", padded(inputs["h_scale"], self._capacity))

    def _sent(self, inputs: Inputs) -> mkernel.MoeDispatch:
        sent: mkernel.MoeDispatch = mkernel.moe_dispatch_gemm(
            inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity,
            x_scale=inputs.get("x_scale"), w_scale=inputs.get("w_scale"), **self._promise,
        )  # fmt: skip
        return sent

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self._gemm is not None and not self._normed:
            return {"out": self._multiplied(inputs, out=outputs.get("out"))}
        if self.op in SUMS:
            return self._summed(inputs, outputs)
        if self.op in ("ring_attention", ATTENTION_BACKWARD):
            backward = self.op == ATTENTION_BACKWARD
            return self._gradients(inputs) if backward else self._attended(inputs)
        return self._of_experts(inputs)

    def _of_experts(self, inputs: Inputs) -> Tensors:
        if self.op == "moe_dispatch":
            sent = mkernel.moe_dispatch(
                inputs["x"], inputs["topk_ids"], num_experts=self.problem.case.sizes["experts"],
                capacity=self._capacity, x_scale=inputs.get("x_scale"), **self._promise,
            )  # fmt: skip
            found = {"rows": sent.rows, "counts": sent.counts}
            return found if sent.scales is None else {**found, "scales": sent.scales}
        if self.op == "moe_dispatch_gemm":
            rows, counts, _ = self._sent(inputs)
            return {"outputs": rows, "counts": counts}
        if self.op == MOE_LAYER:
            return self._layer(inputs)
        rows, handle, weights = inputs["rows"], inputs["handle"], inputs["topk_weights"]
        if self.op == "moe_combine":
            return {"out": mkernel.moe_combine(rows, handle, weights, **self._promise)}
        options = _of_home(inputs) | self._promise
        return {"out": mkernel.moe_gemm_combine(rows, inputs["w2"], handle, weights, **options)}

    def _layer(self, inputs: Inputs) -> Tensors:
        x, ids, w, w2 = (inputs[name] for name in ("x", "topk_ids", "w", "w2"))
        weights, capacity = inputs["topk_weights"], self._capacity
        if "w_scale" not in inputs:
            plain = mkernel.moe_dispatch_gemm(
                x, ids, w, capacity=capacity, activation="silu_and_mul", **self._promise
            )
            h, handle = plain.outputs, plain.handle
            return {"out": mkernel.moe_gemm_combine(h, w2, handle, weights, **self._promise)}
        sent = mkernel.moe_dispatch_gemm(
            x, ids, w, capacity=capacity, activation="silu_and_mul", quantise="block",
            x_scale=inputs["x_scale"], w_scale=inputs["w_scale"], **self._promise,
        )  # fmt: skip
        options = {"h_scale": sent.scales, "w2_scale": inputs["w2_scale"], **self._promise}
        return {"out": mkernel.moe_gemm_combine(sent.outputs, w2, sent.handle, weights, **options)}

    def _summed(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if not self._normed:
            return {"out": mkernel.all_reduce(inputs["x"], out=outputs["out"], **self._promise)}
        given: dict[str, Any] = {
            "residual": inputs["residual"],
            "norm_weight": inputs["norm_weight"],
        }
        given |= {"eps": self._eps, "out": outputs.get("out")}
        if self._gemm is None:
            out, new = mkernel.all_reduce(inputs["x"], **given, **self._promise)
        else:
            out, new = self._multiplied(inputs, **given)
        return {"out": out, "residual_out": new}

    def _multiplied(self, inputs: Inputs, **options: Any) -> Any:
        """Call the GEMM op."""
        assert self._gemm is not None
        options |= {name: inputs[name] for name in _SCALES if name in inputs} | self._promise
        return self._gemm(inputs["a"], inputs["b"], use_fast_accum=self.fast, **options)

    def _attended(self, inputs: Inputs) -> Tensors:
        out, lse = mkernel.ring_attention(
            *(inputs[name] for name in "qkv"), causal=self._causal, return_lse=True, **self._promise
        )
        return {"out": out, "lse": lse}

    def _gradients(self, inputs: Inputs) -> Tensors:
        """Call the op that autograd calls."""
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


def _of_home(inputs: Inputs) -> dict[str, Any]:
    """Return the scales that GEMM+combine takes."""
    return {"h_scale": inputs.get("rows_scale"), "w2_scale": inputs.get("w2_scale")}


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
    ops, ops_text = ("gemm_all_reduce",), "peers write to no output of this op"

    def outputs(self) -> Tensors:
        return {"out": mkernel.empty(*self.problem.memory(self.kind)["out"])}


class MkernelAllocating(Mkernel):
    """The same with outputs that the op allocates in every call, where peers write straight into them
    if the accelerator has such memory. It is not poisoned; what an earlier turn left there is wrong."""

    name = "mkernel-allocating"
    ops, ops_text = GEMMS, "the op allocates its outputs anyway"
    most_kept = 2  # such memory holds few outputs; further ones would be copied

    def outputs(self) -> Tensors:
        return {}

    def graph_pool(self) -> tuple[int, int] | None:
        return mkernel.graph_pool()


class WithOptions(Mkernel):
    """A GEMM op with options of its own call."""

    options: ClassVar[Mapping[str, str]]

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        """Return why the problem has no such options, or None."""
        claims = mkernel.capabilities()
        fused = cls.options.get("path") == "fused"
        if problem.op not in claims.library_ops or (
            fused and problem.op in claims.only_library_ops
        ):
            return "the accelerator has one path for this op: mkernel"
        return "calls with a norm take no such option" if has_norm(problem) else None

    @property
    def called_with(self) -> Mapping[str, Any]:
        """Return the options of this problem's calls."""
        return self.options

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        op: Any = import_module(f"mkernel.ops.{self.op}").OP
        out, _ = op.into(
            a=inputs["a"], b=inputs["b"], bias=None, out=outputs["out"], gathered=None,
            a_scale=inputs.get("a_scale"), b_scale=inputs.get("b_scale"), use_fast_accum=self.fast,
            dim=0, out_dtype=None, group=None, **{"chunk": None, "path": None, **self.called_with},
        )  # fmt: skip
        return {"out": out}


class MkernelFused(WithOptions):
    """The op on its fused path, whatever the planner would choose."""

    name = "mkernel-fused"
    options: ClassVar[Mapping[str, str]] = {"path": "fused"}


class MkernelLibrary(WithOptions):
    """The op on its library path: a product of torch's and a collective of ours."""

    name = "mkernel-library"
    options: ClassVar[Mapping[str, str]] = {"path": "library"}


class MkernelParts(MkernelLibrary):
    """The op by a library's products in parts beside copies: each rank's rows by themselves, in
    ``parts`` parts."""

    name = "mkernel-parts"
    parts: ClassVar[int] = 1

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        found = super().unusable(problem)
        return found or ("one rank has no parts" if problem.world == 1 else None)

    @property
    def called_with(self) -> Mapping[str, Any]:
        rows = -(-self.problem.case.sizes["m"] // self.problem.world)
        return {**self.options, "chunk": -(-rows // self.parts)}


class MkernelHalves(MkernelParts):
    """The same in two parts of each rank."""

    name = "mkernel-halves"
    parts = 2


class MkernelInvariant(Mkernel):
    """The op with the promise of invariant results that the case names."""

    name = "mkernel-invariant"
    promises = True

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if "invariant" not in problem.case.options:
            return "the run asks for no invariant results: --invariant"
        calls = EXPERTS[:2] if problem.op == MOE_LAYER else (problem.op,)
        if not {*calls} <= {*mkernel.capabilities().invariant_ops}:
            return "the accelerator does not promise it"
        return super().unusable(problem)


class MkernelSequential(Mkernel):
    """The op's exchange first, by the same NIC and kernels, then its product: between nodes, where no
    library takes that way, what overlap is compared with. Of GEMM+combine weights travel first, and
    sums behind the product either way."""

    name = "mkernel-sequential"
    ops = (*GEMMS, "moe_dispatch_gemm", "moe_gemm_combine")
    ops_text = "for GEMM ops and products of experts between nodes"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in cls.ops or problem.nodes == 1:
            return cls.ops_text
        if has_norm(problem):
            return "for calls without a norm"
        has_views = isinstance(current().accelerator, Instrumented)
        return None if has_views else "the accelerator has no such view"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "moe_dispatch_gemm":
            done = moe.dispatch(
                inputs["x"], inputs["topk_ids"], inputs["w"], capacity=self._capacity,
                x_scale=inputs.get("x_scale"), w_scale=inputs.get("w_scale"), view="sequential",
            )  # fmt: skip
            return {name: done.outputs[name] for name in DISPATCHED}
        if self.op == "moe_gemm_combine":
            rows, handle, weights = inputs["rows"], inputs["handle"], inputs["topk_weights"]
            done = gemm_combine(
                rows, inputs["w2"], handle, weights, view="sequential", **_of_home(inputs)
            )
            return {"out": done.outputs["out"]}
        op: Any = import_module(f"mkernel.ops.{self.op}").OP
        scaled = None
        if "a_scale" in inputs:
            scaled = Scaled(inputs["a_scale"], inputs["b_scale"], self.fast)
        call = GemmCall(inputs["a"], inputs["b"], out=outputs["out"], scaled=scaled)
        return {"out": op.call(call, view="sequential").outputs["out"]}
