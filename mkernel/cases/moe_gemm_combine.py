"""The case of GEMM+combine: random rows ``h`` of experts through the handle of a dispatch.

Options beside those of :mod:`mkernel.cases.moe`: ``returns`` and ``partial_dtype`` (its name), as the
op takes them.
"""

from __future__ import annotations

import torch

from mkernel.cases.base import NOWHERE, Memory, Onto, Outcome, Rows, Tensors, every_row
from mkernel.cases.moe import MoeCase
from mkernel.ops import moe, moe_gemm_combine
from mkernel.ops.common import Execution
from mkernel.plan.model import DTYPE_BYTES, sums_of
from mkernel.plan.paths import partials_of_experts

_H, _W2 = 5, 6  # after the tensors of MoeCase


class MoeGemmCombineCase(MoeCase):
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
        """x, topk_ids, w, topk_weights, h, w2 of ``rank``."""
        w2 = self._w2(rank, world_size, iteration)
        if self.layout == "column":
            w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
        h = self._h(rank, world_size, iteration)
        return {**self._dispatch_inputs(rank, world_size, iteration), "h": h, "w2": w2}

    def _h(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        rows = len(self._rows(rank, world_size, iteration)[0])
        return self.normal(iteration, _H, rank, rows, self._features())

    def _w2(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        shape = (self.sizes["experts"] // world_size, self._features(), self._hidden())
        return self.normal(iteration, _W2, rank, *shape)

    def results(self, world_size: int) -> dict[str, Memory]:
        """out."""
        shape = (self.sizes["tokens"], self._hidden())
        return {"out": (shape, getattr(torch, self.out_dtype))}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """A pipelined dispatch for its handle, then the op; the record is the op's."""
        sent = moe.dispatch(tensors["x"], tensors["topk_ids"], tensors["w"], wait=execution["wait"])
        partial = self.options.get("partial_dtype")
        done = moe_gemm_combine.gemm_combine(
            tensors["h"],
            tensors["w2"],
            sent.outputs["handle"],
            tensors["topk_weights"],
            out_dtype=getattr(torch, self.out_dtype),
            partial_dtype=None if partial is None else getattr(torch, partial),
            returns=self.options.get("returns"),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """out [T, H]."""
        return {"out": self._summed(rank, world_size, iteration, rows)}

    def projected(
        self, rank: int, world_size: int, iteration: int, onto: Onto
    ) -> dict[str, torch.Tensor]:
        """out [T, few]."""
        return {"out": self._summed(rank, world_size, iteration, columns=onto(self._hidden()))}

    @property
    def rounds_partials(self) -> bool:
        """Whether ``partial_dtype`` is narrower than sums."""
        sums = sums_of(self.dtype, self.out_dtype)
        usual = partials_of_experts(self.sizes["tokens"] * self._hidden(), self.out_dtype, sums)
        return DTYPE_BYTES[self.options.get("partial_dtype", usual)] < DTYPE_BYTES[sums]

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The sizes of all weighted results of a token, added."""
        return {"out": self._summed(rank, world_size, iteration, sizes_only=True)}

    def _summed(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        rows: Rows = every_row,
        *,
        sizes_only: bool = False,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = self._weights(rank, iteration).float().double()
        place = torch.full((len(weights),), -1, device=self.device)  # in out, of each token there
        at = rows(len(weights))
        place[at] = torch.arange(len(place[at]), device=self.device)
        width = self._hidden() if columns is None else columns.shape[1]
        out = torch.zeros(len(place[at]), width, device=self.device).double()
        for owner in range(world_size):
            source, token, slot, counts = self._rows(owner, world_size, iteration)
            h = self._h(owner, world_size, iteration)
            expert = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
            mine = (source == rank) & (place[token] >= 0)
            for number, w2 in enumerate(self._w2(owner, world_size, iteration)):
                here, wide = mine & (expert == number), w2.double()
                y = h[here].double() @ (wide if columns is None else wide @ columns)
                y *= weights[token[here], slot[here], None]
                out.index_add_(0, place[token[here]], y.abs() if sizes_only else y)
        return out
