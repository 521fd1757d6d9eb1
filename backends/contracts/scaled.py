"""What e4m3 operands with scales stand for (``mkernel/plan/scales.py``), for who multiplies them with
torch: the reference that is always there, and torch's product with scales by blocks.

That product is cuBLAS', which wants these its own way: those of A with K outermost, those of B with the
blocks of K padded to a multiple of four, and rows of A by fours. What callers have lies otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.plan.scales import BLOCK


def dequantised(matrix: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [rows, columns] times its scales. ``scale``: of each of its dimensions one, one for
    each element, or one for each block."""
    return matrix.to(dtype).mul_(spread(scale.to(dtype), *matrix.shape))


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales as a factor of a matrix [rows, columns]: each beside the elements that it is of. Where one
    is of a whole dimension it stays one."""
    for dim, size in enumerate((rows, columns)):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale


_STEP = 4
"""Rows of A, and blocks of K of B's scales, that cuBLAS takes at a time where there are blocks."""
_BY_ROW_BLOCKS, _BY_BLOCKS, _PLAIN = 4, 5, 0
"""Of torch: ``ScalingType.BlockWise1x128``, ``BlockWise128x128``, ``SwizzleType.NO_SWIZZLE``."""


def padded_blocks(scale: Tensor) -> Tensor:
    """Scales of B [K / 128, N / 128] as :func:`block_product` takes them: K innermost, and padded."""
    blocks, more = scale.t(), -len(scale) % _STEP
    if more:
        blocks = torch.cat((blocks, blocks.new_ones((len(blocks), more))), 1)
    return blocks.contiguous().t()


def block_product(a: Tensor, b: Tensor, scale: Tensor, padded: Tensor, out: Tensor) -> None:
    """out = a @ b, rounded once, on a CUDA device that has such a product. ``scale``: of A
    [M, K / 128]; ``padded``: of B."""
    rows, more = len(a), -len(a) % _STEP
    whole = out
    if more:
        a, scale = _more_rows(a.view(torch.uint8), more).view(a.dtype), _more_rows(scale, more)
        whole = out.new_empty((rows + more, out.shape[1]))
    block_mm(a, b, scale.t().contiguous().t(), padded, whole)
    if more:
        out.copy_(whole[:rows])


def block_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: Tensor) -> None:
    """The same of scales that lie as cuBLAS wants them."""
    torch.ops.aten._scaled_mm_v2.out(
        a, b, [of_a], [_BY_ROW_BLOCKS], [_PLAIN], [of_b], [_BY_BLOCKS], [_PLAIN],
        None, out.dtype, [], False, out=out,
    )  # fmt: skip


def _more_rows(rows: Tensor, more: int) -> Tensor:
    """A copy with so many rows of zeros behind."""
    return torch.cat((rows, rows.new_zeros((more, rows.shape[1]))))
