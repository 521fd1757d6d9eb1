"""The case of a whole MoE layer: gate and up in one product, SiLU, down, and the combine.

It is two ops of MoE, not one of its own, so only ``mkernel bench`` takes it.
"""

from __future__ import annotations

import math

import torch

from mkernel.backends.contracts.scaled import dequantised, quantised_blocks
from mkernel.cases.base import NOWHERE, Outcome, Tensors, times
from mkernel.cases.moe import HomeCase, RankIteration, Wanted, dispatched, gated, wide
from mkernel.ops import moe_gemm_combine
from mkernel.ops.common import Execution
from mkernel.plan.invariance import encoded
from mkernel.plan.model import DTYPE_BYTES

OP = "moe_layer"
_W, _W2, _W2_SCALE = 7, 8, 13  # after the tensors of the other cases
_ROUNDINGS = 2  # of what comes between the products, and of out
_OTHER_STEPS = 7e-3
"""The error of what is quantised to another step because its sum of blocks was off by 1.9e-4. As drawn
scales differ by 20 times, few elements decide it: with sums that are off so it is at most 3.7e-3 of
1536 features and 6.4e-3 of 256, of 14 seeds each (tests/unit/cases/test_projections.py tries some)."""
_ROW_STEPS = 10.0
"""A row may be off by so many times the tolerance, because still fewer elements decide it: there the
worst is by 4.6 times."""


class MoeLayerCase(HomeCase):
    """Sizes: tokens, hidden, features (the width between the products), experts, top_k.

    Weights have columns of unit norm, so that nothing overflows float16. The reference rounds nothing.
    What comes between the products is rounded once, and so is ``out``: two errors of the size of one
    rounding. What travels in 16 bits counts as in GEMM+combine, whose tolerance has room for it.

    With scales, what comes between is quantised to e4m3, by the reference too: few sums of an op fall
    on the other side of a step. Of float32 sums that does not show; but matrix units add the products
    of a block with 14 bits, which 16-bit results allow for (``_OTHER_STEPS``). Weights are then as
    drawn, and their scales keep results small.
    """

    op = OP

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x, topk_ids, topk_weights, w (the gates' columns, then the ups'), w2 of ``rank``."""
        of = rank, world_size, iteration
        return {
            "x": self._x(rank, iteration),
            "topk_ids": self._ids(rank, iteration),
            "topk_weights": self._weights(rank, iteration),
            "w": self._laid_out(self._gate_up(of, into.get("w"))),
            "w2": self._laid_out(self._down(of, into.get("w2"))),
            **self._dispatch_scales(*of),
            **self._down_scales(of),
        }

    def _columns(self) -> int:
        return 2 * self._features()

    def _down_scales(self, of: RankIteration) -> dict[str, torch.Tensor]:
        rank, world_size, iteration = of
        sizes = self.sizes["experts"] // world_size, self._features(), self._hidden()
        found = self.scales_of((iteration, _W2_SCALE, rank), *sizes)
        return {"w2_scale": found[0]} if found else {}

    def _gate_up(self, of: RankIteration, into: torch.Tensor | None = None) -> torch.Tensor:
        return self._experts(_W, of, (self._hidden(), 2 * self._features()), into)

    def _down(self, of: RankIteration, into: torch.Tensor | None = None) -> torch.Tensor:
        return self._experts(_W2, of, (self._features(), self._hidden()), into)

    def _experts(
        self, which: int, of: RankIteration, shape: tuple[int, int], into: torch.Tensor | None
    ) -> torch.Tensor:
        rank, world_size, iteration = of
        into = into if self.layout == "row" else None
        whole = (self.sizes["experts"] // world_size, *shape)
        drawn = self.normal(iteration, which, rank, *whole, into=into)
        return drawn if self._scaled else drawn.mul_(shape[0] ** -0.5)

    @property
    def _scaled(self) -> bool:
        return self.options.get("scales") is not None

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Make both calls; plan and record are the dispatch's, what came ``then`` is the combine's."""
        between = torch.float8_e4m3fn if self._scaled else None
        promise = encoded(self.invariant)
        sent = dispatched(
            tensors, activation="silu_and_mul", out_dtype=between, invariant=promise, **execution
        )
        home = moe_gemm_combine.gemm_combine(
            sent.outputs["outputs"],
            tensors["w2"],
            sent.outputs["handle"],
            tensors["topk_weights"],
            h_scale=sent.outputs.get("scales"),
            w2_scale=tensors.get("w2_scale"),
            out_dtype=getattr(torch, self.out_dtype),
            invariant=promise,
            **execution,
        )
        return Outcome(home.outputs, sent.plan, sent.record, then=home.record)

    def made(self, rows: Wanted, columns: torch.Tensor | None) -> torch.Tensor:
        width = self._hidden() if columns is None else columns.shape[1]
        y = torch.empty(len(rows.x), width, device=self.device, dtype=torch.float64)
        up = wide(self._gate_up(rows.of), self._dispatch_scales(*rows.of).get("w_scale"))
        down = wide(self._down(rows.of), self._down_scales(rows.of).get("w2_scale"))
        for expert, (first, second) in enumerate(zip(up, down, strict=True)):
            here = rows.expert == expert
            between = gated(rows.x[here].double() @ first.double())
            if self._scaled:
                between = dequantised(*quantised_blocks(between), torch.float64)
            y[here] = between @ times(second.double(), columns)
        return y

    @property
    def row_share(self) -> float:
        """Return by how many times the tolerance a row may be off, on other steps most."""
        return _ROW_STEPS if self._scaled else super().row_share

    @property
    def rounded(self) -> float:
        """Return the error of so many roundings."""
        return super().tolerance * math.sqrt(_ROUNDINGS)

    @property
    def tolerance(self) -> float:
        """Allow roundings, and other steps."""
        narrow = self._scaled and DTYPE_BYTES[self.out_dtype] == 2
        return math.hypot(self.rounded, _OTHER_STEPS) if narrow else self.rounded
