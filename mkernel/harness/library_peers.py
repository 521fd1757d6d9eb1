"""Peers of MoE and attention whose communication is not one step before or behind their compute;
torch's context parallelism is in :mod:`.context_parallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.harness import expert_rows, library_attention
from mkernel.harness.collectives import reduce_scatter
from mkernel.harness.contender import Contender
from mkernel.harness.library_moe import (
    DISPATCHED,
    Gathered,
    gated_products,
    gathered,
    gathering,
    kept,
    padded,
    products,
    without_padding,
)
from mkernel.harness.problem import Inputs, Problem, Tensors


class GatheredExperts(Contender):
    """A peer that sends all tokens to all ranks, each of which takes the rows of its experts: a
    gather, a copy and a grouped product. Results come home as sums of ranks, by a reduce-scatter.
    Gathers overlap with what does not need them."""

    name = "gather+grouped"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._capacity: int | None = problem.case.options.get("capacity")

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in ("moe_dispatch_gemm", "moe_gemm_combine", MOE_LAYER):
            return "for products of experts"
        return problem.bars_libraries

    def promised(self) -> tuple[str, ...] | None:
        return DISPATCHED if self.op == "moe_dispatch_gemm" else None

    def before(self, inputs: Inputs) -> None:
        if self.op == "moe_gemm_combine":
            ids = gathered(inputs["topk_ids"], self.problem.world)
            routing = Gathered(self.problem, ids, self._capacity)
            for name in ("counts", "count", "home"):
                kept(inputs, name, getattr(routing, name))
            kept(inputs, "rows", padded(inputs["h"], self._capacity))

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        world = self.problem.world
        if self.op == "moe_gemm_combine":
            weights, coming = gathering(inputs["topk_weights"], world)
            rows = products(inputs["rows"], inputs["w2"], inputs["counts"])
            coming.wait()
            return self._brought_home(
                expert_rows.summed(rows, weights, inputs["home"], inputs["count"])
            )
        ids, coming_first = gathering(inputs["topk_ids"], world)
        tokens, coming = gathering(inputs["x"], world)  # while ids are sorted
        coming_first.wait()
        routing = Gathered(self.problem, ids, self._capacity)
        coming.wait()
        if self.op == "moe_dispatch_gemm":
            rows = products(routing.copied(tokens), inputs["w"], routing.counts)
            return {"outputs": rows, "counts": routing.counts}
        weights, coming = gathering(inputs["topk_weights"], world)
        rows = gated_products(routing.copied(tokens), inputs["w"], inputs["w2"], routing.counts)
        coming.wait()
        return self._brought_home(routing.summed(rows, weights))

    def _brought_home(self, sums: torch.Tensor) -> Tensors:
        out = sums.new_empty(len(sums) // self.problem.world, sums.shape[1])
        reduce_scatter(out, sums)
        return {"out": out}

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        return without_padding(results)

    def limits(self) -> dict[str, float]:
        """Results, then ranks' sums of them, then their sum are rounded: each time as large an error,
        in all, as one rounding of the sum."""
        if self.op == MOE_LAYER:
            return super().limits()
        tolerances = self.problem.case.tolerances()
        return {name: 3**0.5 * each for name, each in tolerances.items()}


class Ring(Contender):
    """Keys and values go round while the library attends to those before, and results are merged."""

    name = "ring"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op != "ring_attention":
            return "for attention"
        return problem.bars_libraries

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        problem, q = self.problem, inputs["q"]
        here, parts = library_attention.own(inputs), []
        for source in library_attention.order(problem):
            coming, under_way = here, []
            if source != (problem.rank + 1) % problem.world:  # the last to come
                coming = torch.empty_like(here)
                under_way = self._passed_on(here, coming)
            parts.append(library_attention.part(problem, q, here, source))
            for each in under_way:
                each.wait()
            here = coming
        return self.merged(parts, q.dtype)

    def merged(self, parts: list[library_attention.Part], dtype: torch.dtype) -> Tensors:
        """The parts' results as of one attention."""
        return library_attention.merged(parts, dtype)

    def _passed_on(self, here: torch.Tensor, coming: torch.Tensor) -> list[Any]:
        rank, world = self.problem.rank, self.problem.world
        found: list[Any] = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, here, (rank + 1) % world),
                distributed.P2POp(distributed.irecv, coming, (rank - 1) % world),
            ]
        )
        return found
