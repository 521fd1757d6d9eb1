"""Peers that send a token once to each rank that has an expert of its, and bring ranks' sums home."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from mkernel.harness.contenders import expert_rows
from mkernel.harness.contenders.experts import (
    ExpertPeer,
    Sorted,
    gated_products,
    keep_scales,
    kept,
    of_experts,
)
from mkernel.harness.problem import Inputs, Tensors


@dataclass(frozen=True)
class Dispatched:
    """The tokens that came to a rank, by source and number, with what is known of them.

    ``scales``: of e4m3 ones. ``weights``: of their slots. ``routing``: their slots that this rank's
    experts take. ``handle``: what the way home needs."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor
    routing: Sorted
    handle: tuple[torch.Tensor, ...]


class DispatchedByRank(ExpertPeer):
    """A dispatch and a combine by rank before and behind torch's grouped product."""

    @abstractmethod
    def sent(self, inputs: Inputs) -> Dispatched:
        """Send this rank's tokens; return what came. Collective."""

    @abstractmethod
    def brought_home(self, sums: torch.Tensor, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Send ranks' sums of the tokens that came back; return the sums of these. Collective."""

    def before(self, inputs: Inputs) -> None:
        keep_scales(inputs, self.capacity)
        if self.op != "moe_gemm_combine":
            return
        came = self.sent(inputs)
        for number, each in enumerate(came.handle):
            kept(inputs, f"handle{number}", each)
        kept(inputs, "weights", came.weights)
        self.keep(inputs, came.routing)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "moe_gemm_combine":
            scale = inputs.get("rows_scale")
            rows = of_experts(inputs, "w2", inputs["rows"], scale, inputs["counts"])
            sums = expert_rows.summed(rows, inputs["weights"], inputs["home"], inputs["count"])
            names = sorted(name for name in inputs if name.startswith("handle"))
            return {"out": self.brought_home(sums, tuple(inputs[each] for each in names))}
        came = self.sent(inputs)
        routing = came.routing
        rows, counts = routing.copied(came.tokens), routing.counts
        scale = None if came.scales is None else routing.copied(came.scales)
        if self.op == "moe_dispatch":
            found = {"rows": rows, "counts": counts}
            return found if scale is None else {**found, "scales": scale}
        if self.op == "moe_dispatch_gemm":
            return {"outputs": of_experts(inputs, "w", rows, scale, counts), "counts": counts}
        rows = gated_products(inputs, rows, scale, counts)
        return {"out": self.brought_home(routing.summed(rows, came.weights), came.handle)}
