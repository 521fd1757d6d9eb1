"""Products of the library path, by torch: sums are rounded once, to the dtype of the result.

Those of e4m3 operands have scales (``mkernel/plan/scales.py``). By blocks cuBLAS wants them its own way:
those of A with K outermost, those of B with the blocks of K padded to a multiple of four, and rows of A by
fours. What callers have lies otherwise, and is copied here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkernel.backends.accelerators.hopper.operands import aligned
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import Scales

Multiply = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""(rows of A, their scales, results): fills the results."""

_STEP = 4
"""Rows of A, and blocks of K of B's scales, that cuBLAS takes at a time where there are blocks."""
_BY_ROW_BLOCKS, _BY_BLOCKS, _PLAIN = 4, 5, 0
"""Numbers of torch's ``ScalingType.BlockWise1x128``, ``BlockWise128x128`` and ``SwizzleType.NO_SWIZZLE``."""


def multiply_of(call: Call) -> Multiply:
    """Products with a call's B."""
    tensors, scales = call.tensors, call.plan.scales
    if scales is None:
        b = tensors["b"]
        return lambda rows, scale, out: mm(rows, b, out)
    return ScaledFactor(tensors["b"], tensors["b_scale"], scales).product


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b, of half-precision operands, in their dtype or float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class ScaledFactor:
    """A right-hand e4m3 matrix [K, N], column-major, with its scales, for many products."""

    def __init__(self, b: torch.Tensor, scale: torch.Tensor, scales: Scales) -> None:
        """``scale``: as callers have it."""
        self._b, self._scales = aligned(b), scales
        if scales.mode == "block":
            self._scale = _padded_blocks(scale)
        else:
            self._scale = aligned(scale.reshape(1, -1))  # torch asks for strides of single columns too

    def product(self, a: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
        """out = a @ b. ``scale``: [rows, ..] of these rows; where one is of a whole tensor also [W, 1],
        one for each W-th of the rows. Rows may be none."""
        assert scale is not None
        if not len(a):
            return
        if self._scales.mode == "block":
            self._by_blocks(a, scale, out)
            return
        of_b = self._scale
        if self._scales.mode == "tensor" and len(scale) > 1:
            scale = scale.repeat_interleave(len(a) // len(scale), 0)
            of_b = of_b.expand(1, out.shape[1]).contiguous()
        of_a = aligned(scale.reshape(-1, 1))
        scaled_mm(a, self._b, of_a, of_b, out, self._scales.use_fast_accum)

    def _by_blocks(self, a: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        rows, more = len(a), -len(a) % _STEP
        whole = out
        if more:
            a, scale = _more_rows(a.view(torch.uint8), more).view(a.dtype), _more_rows(scale, more)
            whole = out.new_empty((rows + more, out.shape[1]))
        block_mm(a, self._b, scale.t().contiguous().t(), self._scale, whole)
        if more:
            out.copy_(whole[:rows])


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    of_a: torch.Tensor,
    of_b: torch.Tensor,
    out: torch.Tensor,
    fast: bool,
) -> None:
    """out = a @ b, with scales [rows, 1] and [1, N], or one each."""
    torch._scaled_mm(
        a, b, scale_a=of_a, scale_b=of_b, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )


def block_mm(
    a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, out: torch.Tensor
) -> None:
    """The same with scales by blocks, as cuBLAS wants them."""
    torch.ops.aten._scaled_mm_v2.out(
        a, b, [of_a], [_BY_ROW_BLOCKS], [_PLAIN], [of_b], [_BY_BLOCKS], [_PLAIN],
        None, out.dtype, [], False, out=out,
    )  # fmt: skip


def _padded_blocks(scale: torch.Tensor) -> torch.Tensor:
    """Scales of B [K / 128, N / 128] with K innermost, padded along it."""
    blocks, more = scale.t(), -len(scale) % _STEP
    if more:
        blocks = torch.cat((blocks, blocks.new_ones((len(blocks), more))), 1)
    return blocks.contiguous().t()


def _more_rows(rows: torch.Tensor, more: int) -> torch.Tensor:
    """A copy with so many rows of zeros behind."""
    return torch.cat((rows, rows.new_zeros((more, rows.shape[1]))))
