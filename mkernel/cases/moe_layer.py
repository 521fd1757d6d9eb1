"""The case of a whole MoE layer: gate and up in one product, SiLU, down, and the combine.

It is two ops of MoE, not one of its own, so only ``mkernel bench`` takes it.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import silu

from mkernel.cases.base import NOWHERE, TOLERANCE, Memory, Onto, Outcome, Rows, Tensors, every_row
from mkernel.cases.moe import MoeCase
from mkernel.ops import moe, moe_gemm_combine
from mkernel.ops.common import Execution

OP = "moe_layer"
_W, _W2 = 7, 8  # after the tensors of the other cases
_ROUNDINGS = 2  # of what comes between the products, and of out


class MoeLayerCase(MoeCase):
    """Sizes: tokens, hidden, features (the width between the products), experts, top_k.

    Weights have columns of unit norm, so that nothing overflows float16. The reference rounds nothing.
    What comes between the products is rounded once, and so is ``out``: two errors of the size of one
    rounding. What travels in 16 bits counts as in GEMM+combine, whose tolerance has room for it.
    """

    op = OP

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """x, topk_ids, w, topk_weights, w2 of ``rank``; w has the gates' columns, then the ups'."""
        weights = {
            "w": self._gate_up(rank, world_size, iteration, into.get("w")),
            "w2": self._down(rank, world_size, iteration, into.get("w2")),
        }
        if self.layout == "column":
            weights = {
                name: each.transpose(1, 2).contiguous().transpose(1, 2)
                for name, each in weights.items()
            }
        return {
            "x": self._x(rank, iteration),
            "topk_ids": self._ids(rank, iteration),
            "topk_weights": self._weights(rank, iteration),
            **weights,
        }

    def _gate_up(
        self, rank: int, world_size: int, iteration: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = (self._hidden(), 2 * self._features())
        return self._experts(_W, rank, world_size, iteration, shape, into)

    def _down(
        self, rank: int, world_size: int, iteration: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = (self._features(), self._hidden())
        return self._experts(_W2, rank, world_size, iteration, shape, into)

    def _experts(
        self,
        which: int,
        rank: int,
        world_size: int,
        iteration: int,
        shape: tuple[int, int],
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        into = into if self.layout == "row" else None
        whole = (self.sizes["experts"] // world_size, *shape)
        drawn = self.normal(iteration, which, rank, *whole, into=into)
        return drawn.mul_(shape[0] ** -0.5)

    def results(self, world_size: int) -> dict[str, Memory]:
        """out."""
        shape = (self.sizes["tokens"], self._hidden())
        return {"out": (shape, getattr(torch, self.out_dtype))}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Both calls; plan and record are the dispatch's, what came ``then`` is the combine's."""
        sent = moe.dispatch(
            tensors["x"], tensors["topk_ids"], tensors["w"], activation="silu_and_mul", **execution
        )
        home = moe_gemm_combine.gemm_combine(
            sent.outputs["outputs"],
            tensors["w2"],
            sent.outputs["handle"],
            tensors["topk_weights"],
            out_dtype=getattr(torch, self.out_dtype),
            **execution,
        )
        return Outcome(home.outputs, sent.plan, sent.record, then=home.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """out [T, H]."""
        return {"out": self._made(rank, world_size, iteration, rows)}

    def projected(
        self, rank: int, world_size: int, iteration: int, onto: Onto
    ) -> dict[str, torch.Tensor]:
        """out [T, few]: the first products take their time, the second ones none."""
        columns = onto(self._hidden())
        return {"out": self._made(rank, world_size, iteration, every_row, columns)}

    def _made(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        rows: Rows,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        at = rows(self.sizes["tokens"])
        x, ids = self._x(rank, iteration)[at].double(), self._ids(rank, iteration)[at]
        weights = self._weights(rank, iteration)[at].float().double()
        width = self._hidden() if columns is None else columns.shape[1]
        out = torch.zeros(len(x), width, device=self.device).double()
        own = self.sizes["experts"] // world_size
        for owner in range(world_size):
            first = self._gate_up(owner, world_size, iteration)
            second = self._down(owner, world_size, iteration)
            for expert in range(own):
                token, slot = (ids == owner * own + expert).nonzero(as_tuple=True)
                gate, up = (x[token] @ first[expert].double()).chunk(2, dim=-1)
                down = second[expert].double()
                y = (silu(gate) * up) @ (down if columns is None else down @ columns)
                out.index_add_(0, token, weights[token, slot, None] * y)
        return out

    def tolerances(self) -> dict[str, float]:
        """Of so many roundings."""
        return {"out": TOLERANCE[self.out_dtype] * math.sqrt(_ROUNDINGS)}
