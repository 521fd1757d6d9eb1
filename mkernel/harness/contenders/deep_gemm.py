"""DeepGEMM's grouped product of e4m3 operands as a peer of experts, where it is installed.

Rows of each of its groups begin at a multiple of 128, so tokens are copied to such rows, and those in
between are nobody's. It compiles kernels by nvcc when they are first called.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mkernel.harness.contenders import EXPERTS
from mkernel.harness.contenders.experts import Gathered, GatheredExperts, Sorted, kept, plain
from mkernel.harness.problem import Inputs, Problem, Tensors

_ABSENT = "deep_gemm is not installed: pip install sgl-deep-gemm, SGLang's build of it"
STEP = 128
"""Rows at multiples of which its groups begin."""


def _sizes(counts: torch.Tensor) -> torch.Tensor:
    """Return how many rows each group takes."""
    return (counts + STEP - 1) // STEP * STEP


def why_not_usable() -> str | None:
    """Return why DeepGEMM cannot be used in this process, or None."""
    if find_spec("deep_gemm") is None:
        return _ABSENT
    try:
        import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:  # of another torch, or there is no nvcc
        return f"deep_gemm does not load: {error}"
    return None


class Aligned(Gathered):
    """As the base, whose rows are apart: an expert's begin at a multiple of ``STEP``.

    Attributes:
        experts: int32, of each row, also of nobody's before the next expert's; -1 after the last one's.
    """

    def __init__(self, problem: Problem, topk_ids: torch.Tensor, capacity: int | None) -> None:
        super().__init__(problem, topk_ids, capacity)
        sizes, number = _sizes(self.counts), len(self.counts)
        ends, dense = sizes.cumsum(0), self.counts.cumsum(0)
        shift = ends - sizes - (dense - self.counts)  # of an expert's rows
        rows = int(ends[-1]) if capacity is None else (-(-capacity // STEP) + number) * STEP
        at = torch.arange(rows, device=ends.device)
        owner = torch.searchsorted(ends, at, right=True)
        known = owner.clamp(max=number - 1)
        self._dense = (at - shift[known]).clamp(max=max(0, len(self.places) - 1))
        self.experts = torch.where(owner < number, owner, -1).to(torch.int32)
        self.places = self.places[self._dense]
        expert = torch.searchsorted(dense, self.home.long(), right=True)
        moved = self.home + shift[expert.clamp(max=number - 1)]
        self.home = torch.where(expert < number, moved, rows).to(torch.int32)
        self.count = torch.full_like(self.count, rows)

    def apart(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that lie one after another where this routing has them."""
        return plain(rows)[self._dense].view(rows.dtype)


class DeepGemm(GatheredExperts):
    """Gathers of all tokens, their copies to the rows of experts, DeepGEMM's product, and a
    reduce-scatter of ranks' sums."""

    name = "gather+deepgemm"
    cpu = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = import_module("deep_gemm")
        self._experts: torch.Tensor | None = None

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in EXPERTS or problem.case.options.get("scales") != "block":
            return "for products of experts in e4m3"
        return super().unusable(problem) or why_not_usable()

    def routed(self, ids: torch.Tensor) -> Aligned:
        routing = Aligned(self.problem, ids, self.capacity)
        self._experts = routing.experts
        return routing

    def keep(self, inputs: Inputs, routing: Sorted) -> None:
        super().keep(inputs, routing)
        assert isinstance(routing, Aligned)
        self._experts = kept(inputs, "experts", routing.experts)
        for name in ("rows", "rows_scale"):
            kept(inputs, f"{name}_apart", routing.apart(inputs[name]))

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        own: Inputs = {"product": self._product}
        if self.op == "moe_gemm_combine":
            own |= {name: inputs[f"{name}_apart"] for name in ("rows", "rows_scale")}
        return super().call(inputs | own, outputs)

    def _product(
        self, inputs: Inputs, name: str, rows: torch.Tensor, scale: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        w = inputs[name].transpose(1, 2), inputs[f"{name}_scale"].transpose(1, 2)
        out = rows.new_empty((len(rows), w[0].shape[1]), dtype=torch.bfloat16)
        self._library.m_grouped_fp8_gemm_nt_contiguous((rows, scale), w, out, self._experts)
        return out

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        """Return a dispatch's outputs one after another."""
        if "outputs" not in results:
            return results
        counts, first, rows = results["counts"], 0, []
        for count, size in zip(counts.tolist(), _sizes(counts).tolist(), strict=True):
            rows.append(results["outputs"][first : first + count])
            first += size
        return {**results, "outputs": torch.cat(rows)}
