"""Calls of MoE dispatch without a product on a rank, for :mod:`calls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import calls
import torch
from calls import Tensors
from moe_ranks import other_tokens

import mkernel
from mkernel.cases import case_of
from mkernel.plan.model import E4M3


@dataclass(frozen=True)
class Rows:
    """One size; ``experts`` of a rank. ``capacity``: rows, as the op takes it; 0: none. ``scales``:
    tokens are e4m3. ``again``: rows are those of a second call, by the handle of one of other
    tokens."""

    tokens: int
    hidden: int = 64
    experts: int = 2
    top_k: int = 2
    routing: str = "uniform"
    dtype: str = "bfloat16"
    capacity: int = 0
    scales: bool = False
    again: bool = False

    def work(self, seed: int = 0, device: str | None = None) -> Work:
        """Make its tensors on this rank."""
        experts = self.experts * mkernel.world().size
        sizes = {"tokens": self.tokens, "hidden": self.hidden, "experts": experts}
        dtype = E4M3 if self.scales else self.dtype
        options: dict[str, Any] = {"routing": self.routing, "id_dtype": "int32"}
        case = case_of("moe_dispatch")(
            {**sizes, "top_k": min(self.top_k, experts)}, dtype, dtype, seed=seed,  # type: ignore[arg-type]
            options=options | ({"scales": "block"} if self.scales else {}),
            device=device or calls.DEVICE,
        )  # fmt: skip
        return Work(self, case)


class Work(calls.Work):
    """A size's tensors on this rank."""

    turns = 2

    def call(self) -> Tensors:
        """Call the public op, once or twice."""
        given, shape = self.given, self.shape
        options = {
            "num_experts": self.case.sizes["experts"],
            "capacity": shape.capacity or None,
            "x_scale": given.get("x_scale"),
        }
        first = other_tokens(given["x"]) if shape.again else given["x"]
        sent = mkernel.moe_dispatch(first, given["topk_ids"], **options)
        if shape.again:
            nothing = torch.full_like(given["topk_ids"], -1)
            sent = mkernel.moe_dispatch(given["x"], nothing, handle=sent.handle, **options)
        self.sent = sent
        self.found = {"rows": sent.rows, "counts": sent.counts}
        if sent.scales is not None:
            self.found["scales"] = sent.scales
        return self.found

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say what is wrong with the results of a turn."""
        rows = int(found["counts"].sum())
        cut = {name: each if name == "counts" else each[:rows] for name, each in found.items()}
        wrong = super().wrong(turn, cut)
        if found["rows"][rows:].view(torch.uint8).count_nonzero():
            wrong.append("rows behind the last one are not zero")
        if "scales" in found and not bool((found["scales"][rows:] == 1).all()):
            wrong.append("scales behind the last row are not 1")
        return wrong
