"""The case of GEMM+combine: random rows ``h`` of experts through the handle of a dispatch.

Options beside those of :mod:`mkernel.cases.moe`: ``returns`` and ``partial_dtype`` (its name), as the
op takes them.
"""

from __future__ import annotations

import torch

from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.base import NOWHERE, Outcome, Tensors, every_row, times
from mkernel.cases.moe import HomeCase, Wanted, dispatched, wide
from mkernel.ops import moe_gemm_combine
from mkernel.ops.common import Execution
from mkernel.plan.invariance import encoded
from mkernel.plan.model import DTYPE_BYTES, sums_of
from mkernel.plan.paths import partials_of_experts

_H, _W2, _H_SCALE, _W2_SCALE = 5, 6, 11, 12  # after the tensors of MoeCase


class MoeGemmCombineCase(HomeCase):
    """Sizes: tokens, hidden, features, experts, top_k. The dispatch is of the same case, and its
    outputs are not judged.

    The reference rounds nothing. Results that travel in a narrower dtype than sums are rounded before
    they are added: as many errors of one rounding, independent of each other, as there are terms, which
    together are as large as that of ``out``'s own rounding. Both stay within one tolerance.
    """

    op = "moe_gemm_combine"

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x, topk_ids, w, topk_weights, h, w2 of ``rank``, and scales of e4m3 operands."""
        w2 = self._laid_out(self._w2(rank, world_size, iteration))
        h = self._h(rank, world_size, iteration)
        given = {**self._dispatch_inputs(rank, world_size, iteration), "h": h, "w2": w2}
        return given | self._home_scales(rank, world_size, iteration, len(h))

    def _home_scales(
        self, rank: int, world_size: int, iteration: int, rows: int
    ) -> dict[str, torch.Tensor]:
        features, experts = self._features(), self.sizes["experts"] // world_size
        of_h = self.scales_of((iteration, _H_SCALE, rank), rows, features)
        of_w2 = self.scales_of((iteration, _W2_SCALE, rank), experts, features, self._hidden())
        return {"h_scale": of_h[0], "w2_scale": of_w2[0]} if of_h else {}

    def _h(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        source, token, slot, _ = self._rows(rank, world_size, iteration)
        if self.given is not None:  # by places, [T * W, k, I]
            return self.given["h"][source * self.sizes["tokens"] + token, slot]
        return self.normal(iteration, _H, rank, len(source), self._features())

    def _w2(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        shape = (self.sizes["experts"] // world_size, self._features(), self._hidden())
        if self.given is not None:
            return self.given["w2"][rank * shape[0] : (rank + 1) * shape[0]]
        return self.normal(iteration, _W2, rank, *shape)

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call a pipelined dispatch for its handle, then the op, whose record it is."""
        sent = dispatched(tensors, wait=execution["wait"])
        partial = self.options.get("partial_dtype")
        done = moe_gemm_combine.gemm_combine(
            tensors["h"],
            tensors["w2"],
            sent.outputs["handle"],
            tensors["topk_weights"],
            h_scale=tensors.get("h_scale"),
            w2_scale=tensors.get("w2_scale"),
            out_dtype=getattr(torch, self.out_dtype),
            partial_dtype=None if partial is None else getattr(torch, partial),
            returns=self.options.get("returns"),
            invariant=encoded(self.invariant),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def made(self, rows: Wanted, columns: torch.Tensor | None) -> torch.Tensor:
        h = self._h(*rows.of)
        scales = self._home_scales(*rows.of, len(h))
        h = dequantised(h, scales["h_scale"], torch.float64) if scales else h
        h = h[rows.at].double()
        width = self._hidden() if columns is None else columns.shape[1]
        y = h.new_empty(len(h), width)
        for number, w2 in enumerate(wide(self._w2(*rows.of), scales.get("w2_scale"))):
            here = rows.expert == number
            y[here] = h[here] @ times(w2.double(), columns)
        return y

    @property
    def rounds_partials(self) -> bool:
        """Return whether ``partial_dtype`` is narrower than sums."""
        sums = sums_of(self.dtype, self.out_dtype)
        usual = partials_of_experts(self.sizes["tokens"] * self._hidden(), self.out_dtype, sums)
        if self.invariant is not None:
            usual = self.invariant.partial_of(self.out_dtype)
        return DTYPE_BYTES[self.options.get("partial_dtype", usual)] < DTYPE_BYTES[sums]

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return the sizes of all weighted results of a token, added."""
        return {"out": self._summed(rank, world_size, iteration, every_row, sizes_only=True)}
