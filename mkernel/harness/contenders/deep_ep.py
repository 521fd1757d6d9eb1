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

from mkernel.harness.contenders.by_rank import Dispatched, DispatchedByRank
from mkernel.harness.contenders.experts import Sorted
from mkernel.harness.problem import Inputs, Problem

_ABSENT = "deep_ep is not installed: it is built from source against the torch that is here"
_WORLDS = (2, 4, 8)
_BLOCKS = 64
"""Thread blocks of its kernels. It takes 20 if not told, which leaves the others to products beside
them."""
_SEND_CHUNK, _RECEIVE_CHUNK = 24, 256
"""Tokens, as it takes them for two ranks."""


class DeepEp(DispatchedByRank):
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

    def sent(self, inputs: Inputs) -> Dispatched:
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
        rows, scales = tokens if scaled else (tokens, None)
        return Dispatched(rows, scales, weights, routing, handle)

    def brought_home(self, sums: torch.Tensor, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out: torch.Tensor
        out, *_ = self._buffer.combine(sums, handle, config=self._config)
        return out

    def close(self) -> None:
        self._buffer.destroy()
