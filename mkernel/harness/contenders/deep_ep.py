"""DeepEP's kernels inside a node as a peer of the MoE ops, where it is installed.

It is version 1, built from source without NVSHMEM; this repository has no build of it. Tokens go once
to each rank that has an expert of theirs. One kernel (:mod:`.expert_rows`) copies them to the rows of
their experts, torch multiplies, and one kernel adds a rank's results for a token in float32; DeepEP
adds those of ranks. Sizes are the worst case, so that nothing waits for the host and graphs capture it;
but e4m3 experts have a product each, for which the host waits.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed

from mkernel.harness.contenders import expert_rows
from mkernel.harness.contenders.experts import (
    ExpertPeer,
    Sorted,
    gated_products,
    keep_scales,
    kept,
    of_experts,
)
from mkernel.harness.problem import Inputs, Problem, Tensors

_ABSENT = "deep_ep is not installed: it is built from source against the torch that is here"
_WORLDS = (2, 4, 8)
_BLOCKS = 64
"""Thread blocks of its kernels. It takes 20 if not told, which leaves the others to products beside
them."""
_SEND_CHUNK, _RECEIVE_CHUNK = 24, 256
"""Tokens, as it takes them for two ranks."""
_HANDLE = 6
"""Tensors that a combine needs of its dispatch."""


class DeepEp(ExpertPeer):
    """DeepEP's dispatch and combine before and behind torch's grouped product."""

    name = "deepep"
    cpu = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._experts = problem.case.sizes["experts"]
        self._library: Any = import_module("deep_ep")
        self._config = self._library.Config(_BLOCKS, _SEND_CHUNK, _RECEIVE_CHUNK)
        row_bytes = problem.case.sizes["hidden"] * 2
        self._buffer = self._library.Buffer(
            distributed.group.WORLD,
            self._config.get_nvl_buffer_size_hint(row_bytes, problem.world),
            explicitly_destroy=True,
        )

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        found = super().unusable(problem)
        if found is not None:
            return found
        if find_spec("deep_ep") is None:
            return _ABSENT
        if problem.case.dtype != "bfloat16" and problem.case.options.get("scales") != "block":
            return "adds bfloat16 alone"
        return None if problem.world in _WORLDS else "for 2, 4 or 8 ranks"

    def before(self, inputs: Inputs) -> None:
        keep_scales(inputs, self.capacity)
        if self.op != "moe_gemm_combine":
            return
        _, _, weights, routing, handle = self._sent(inputs)
        for number, each in enumerate(handle):
            kept(inputs, f"handle{number}", each)
        kept(inputs, "weights", weights)
        self.keep(inputs, routing)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "moe_gemm_combine":
            scale = inputs.get("rows_scale")
            rows = of_experts(inputs, "w2", inputs["rows"], scale, inputs["counts"])
            sums = expert_rows.summed(rows, inputs["weights"], inputs["home"], inputs["count"])
            return self._brought_home(sums, tuple(inputs[f"handle{n}"] for n in range(_HANDLE)))
        tokens, scales, weights, routing, handle = self._sent(inputs)
        rows, counts = routing.copied(tokens), routing.counts
        scale = None if scales is None else routing.copied(scales)
        if self.op == "moe_dispatch":
            found = {"rows": rows, "counts": counts}
            return found if scale is None else {**found, "scales": scale}
        if self.op == "moe_dispatch_gemm":
            return {"outputs": of_experts(inputs, "w", rows, scale, counts), "counts": counts}
        rows = gated_products(inputs, rows, scale, counts)
        return self._brought_home(routing.summed(rows, weights), handle)

    def _sent(
        self, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Sorted, tuple[Any, ...]]:
        """Dispatch; return the tokens that came, by source and number, in room for all, the scales of
        e4m3 ones, their slots' weights, the routing, and what the way home needs."""
        ids = inputs["topk_ids"].to(self._library.topk_idx_t)
        on_ranks, _, of_experts, wanted, _ = self._buffer.get_dispatch_layout(ids, self._experts)
        x, scaled = inputs["x"], "x_scale" in inputs
        tokens, local, weights, _, handle, _ = self._buffer.dispatch(
            (x, inputs["x_scale"]) if scaled else x,
            num_tokens_per_rank=on_ranks,
            is_token_in_rank=wanted,
            num_tokens_per_expert=of_experts,
            topk_idx=ids,
            topk_weights=inputs["topk_weights"].float(),
            num_worst_tokens=len(ids) * self.problem.world,
            config=self._config,
        )
        routing = Sorted(local, self._experts // self.problem.world, self.capacity)
        return *(tokens if scaled else (tokens, None)), weights, routing, handle

    def _brought_home(self, sums: torch.Tensor, handle: tuple[Any, ...]) -> Tensors:
        out, *_ = self._buffer.combine(sums, handle, config=self._config)
        return {"out": out}

    def close(self) -> None:
        self._buffer.destroy()
