"""The plain library path as a contender, and the parts of it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import distributed

from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.harness.contenders import (
    ATTENTION_BACKWARD,
    EXPERTS,
    NO_ROUNDING,
    SUMS,
    Contender,
    attention,
    experts,
)
from mkernel.harness.contenders.collectives import all_gather, collective
from mkernel.harness.contenders.experts import kept, padded
from mkernel.harness.contenders.norm import AddAndNorm
from mkernel.harness.contenders.products import product, scales_without_product
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.model import ScaleMode
from mkernel.plan.ops import COMPANIONS

_LIBRARIES: Mapping[str, Callable[[Problem, Inputs], Tensors]] = {
    **attention.CALLS,
    **experts.CALLS,
}
"""An op by libraries, where it is neither a GEMM nor a sum."""


def place_rows(contender: Contender, inputs: Inputs, outputs: Tensors) -> None:
    """Put x where a plain sum is made in place (:meth:`Contender.place`)."""
    if contender.op == "all_reduce" and not contender.shares_outputs:
        outputs["out"].copy_(inputs["x"])


def summed_rows(contender: Contender, inputs: Inputs, out: torch.Tensor) -> None:
    """Write what a rank adds to a sum to ``out``: its product, or x unless it was placed there."""
    if contender.op == "gemm_all_reduce":
        product(inputs["a"], inputs, out, fast=contender.fast)
    elif contender.shares_outputs:
        out.copy_(inputs["x"])


class PartAlone(Contender):
    """A part of a GEMM op. Those of other ops are not timed alone."""

    ops, ops_text = GEMMS, "parts are timed alone for the GEMM ops only"


class Gemm(Contender):
    """The op's products alone, by torch: cuBLAS on CUDA devices. Of MoE grouped ones, of attention the
    library's on parts, whose merge is not timed. Its time is T_c."""

    name = "gemm"
    kind = "compute"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op in ("all_reduce", "moe_dispatch", "moe_combine"):
            return "the op has no product"
        if problem.op in attention.CALLS and problem.bars_libraries:
            return problem.bars_libraries
        return scales_without_product(problem)

    def promised(self) -> tuple[str, ...] | None:
        return ("outputs",) if self.op == "moe_dispatch_gemm" else None

    def before(self, inputs: Inputs) -> None:
        if self.op in attention.CALLS:
            kept(inputs, "kv", attention.gathered_keys(self.problem, inputs))
            if self.op == ATTENTION_BACKWARD:
                attention.forward(self.problem, inputs)
        elif self.op not in GEMMS:
            capacity: int | None = self.problem.case.options.get("capacity")
            experts.keep_scales(inputs, capacity)
            device = self.problem.device
            routing = experts.Exchanged(self.problem, self._exchangeable(inputs["topk_ids"]))
            inputs["routing"] = routing
            kept(inputs, "counts", routing.counts.to(device))
            if self.op == "moe_gemm_combine":
                rows = inputs["h"]
            else:
                rows = routing.send(self._exchangeable(inputs["x"])).to(device)
            kept(inputs, "rows", padded(rows, capacity))
            if "x_scale" in inputs and self.op != "moe_gemm_combine":
                scale = routing.send(self._exchangeable(inputs["x_scale"])).to(device)
                kept(inputs, "rows_scale", padded(scale, capacity))

    def _exchangeable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the process group takes: where libraries are barred it is gloo's, of tensors on
        the host. Nothing of it is timed."""
        return tensor.cpu() if self.problem.bars_libraries else tensor

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op in GEMMS:
            product(inputs["a"], inputs, outputs["out"], fast=self.fast)
            return outputs
        if self.op in attention.ALONE:
            return attention.ALONE[self.op](self.problem, inputs)
        rows, scale, counts = inputs["rows"], inputs.get("rows_scale"), inputs["counts"]
        if self.op == MOE_LAYER:
            return {"rows": experts.gated_products(inputs, rows, scale, counts)}
        name = "w" if self.op == "moe_dispatch_gemm" else "w2"
        return {"rows": experts.of_experts(inputs, name, rows, scale, counts)}

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        if self.op in GEMMS:
            return results
        if self.op == "ring_attention":
            return attention.merged_alone(self.problem, results)
        if self.op == ATTENTION_BACKWARD:
            return attention.gradients_merged_alone(self.problem, inputs, results)
        rows = results["rows"][: int(inputs["counts"].sum())]
        if self.op == "moe_dispatch_gemm":
            return {"outputs": rows}
        home = map(self._exchangeable, (rows, inputs["topk_weights"]))
        return {"out": inputs["routing"].bring_home(*home).to(rows.device)}


class Collective(PartAlone):
    """torch.distributed alone: NCCL on CUDA devices, gloo on a CPU. Its time counts as T_m."""

    name = "comm"
    kind = "communication"
    library = True

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return {"out": collective(self.op, inputs["x"], outputs["out"])}

    def limits(self) -> dict[str, float]:
        return {"out": NO_ROUNDING} if self.problem.gathers else super().limits()


class Sequential(Contender):
    """torch's products and torch.distributed's collectives, one after the other. Sums are in place, as
    torch has them: the rows of a plain one lie in the output before the call."""

    name = "sequential"
    library = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._between = torch.empty(0)
        self._norm = AddAndNorm(problem)
        if problem.op in GEMMS:
            sizes = problem.case.sizes
            shape = sizes["m"], sizes["k" if problem.gathers else "n"]
            case = problem.case
            dtype = getattr(torch, case.dtype if problem.gathers else case.out_dtype)
            if problem.op != "gemm_all_reduce":
                self._between = self._memory(shape, dtype)
            mode: ScaleMode = case.options.get("scales") or "tensor"
            rows = problem.world if mode == "tensor" else sizes["m"]
            (_, columns), _ = scale_sizes(mode, rows, sizes["n"], sizes["k"])
            self._scales = torch.empty((rows, columns), device=problem.device)
            self._repeat = sizes["m"] // rows

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory that a collective reads or writes."""
        return torch.empty(shape, dtype=dtype, device=self.problem.device)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or scales_without_product(problem)

    def before(self, inputs: Inputs) -> None:
        if self.op in EXPERTS:
            experts.keep_scales(inputs)
        if self.op in COMPANIONS:
            inputs["routing"] = experts.Exchanged(self.problem, inputs["topk_ids"])
        if self.op == ATTENTION_BACKWARD:
            attention.forward(self.problem, inputs)

    def place(self, inputs: Inputs, outputs: Tensors) -> None:
        place_rows(self, inputs, outputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        op = self.op
        if op == "all_gather_gemm":
            collective(op, inputs["a"], self._between)
            if "a_scale" in inputs:
                inputs = {**inputs, "a_scale": self._gathered_scales(inputs["a_scale"])}
            product(self._between, inputs, outputs["out"], fast=self.fast)
            return outputs
        if op in SUMS:
            summed_rows(self, inputs, outputs["out"])
            distributed.all_reduce(outputs["out"])
            return self._norm(outputs["out"], inputs)
        if op == "gemm_reduce_scatter":
            product(inputs["a"], inputs, self._between, fast=self.fast)
            collective(op, self._between, outputs["out"])
            return outputs
        return _LIBRARIES[op](self.problem, inputs)

    def _gathered_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Gather the scales of all ranks' rows; a rank's single one is repeated for each of its
        rows."""
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
