"""Products of e4m3 operands with scales (``mkernel/plan/arguments.py``) in torch: the reference, which
is always available, and torch's product with block scales.

The latter is cuBLAS', which requires its own layouts: scales of A with K outermost, scales of B
with the blocks of K padded to a multiple of four, both at multiples of 16 bytes, and rows of A in
fours. Callers' scales are laid out otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.backends.contracts.memory import aligned
from mkernel.plan.model import BLOCK


def dequantised(matrix: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix [rows, columns] times its scales. In each dimension ``scale`` has one
    entry, one per element, or one per block."""
    return matrix.to(dtype).mul_(spread(scale.to(dtype), *matrix.shape))


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Expand scales to a factor of a matrix [rows, columns], so that each scale stands at the
    elements that it applies to. A scale for a whole dimension keeps size one there."""
    for dim, size in enumerate((rows, columns)):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale


LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3, and return them with their scales.

    Args:
        rows: [.., N], in a floating-point dtype.

    Returns:
        [.., N] in ``torch.float8_e4m3fn``, and [.., 1] in float32, 1 where a row is all zeros,
        or would have a scale of 0. An infinity or NaN is NaN in the result, so that it is not lost.
    """
    wide = rows.float()
    most = wide.abs().amax(-1, keepdim=True)
    # On a GPU torch does not divide by a number, but multiplies by its reciprocal: other bits.
    scale = most / torch.full_like(most, LARGEST)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # A subnormal scale is rounded so far that a quotient may be beyond the largest.
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def quantised_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [R, K] by blocks of 128, each as :func:`quantised_rows` does a row, and return
    them with their scales [R, K / 128]."""
    values, scale = quantised_rows(rows.reshape(len(rows), rows.shape[1] // BLOCK, BLOCK))
    return values.flatten(1), scale.squeeze(2)


STEP = 4
"""The granularity that cuBLAS requires with block scales, in rows of A and in blocks of K of B's
scales."""
_BY_ROW_BLOCKS, _BY_BLOCKS, _PLAIN = 4, 5, 0
"""torch's values of ``ScalingType.BlockWise1x128``, ``BlockWise128x128`` and
``SwizzleType.NO_SWIZZLE``."""


def padded_blocks(scale: Tensor) -> Tensor:
    """Return scales of B [K / 128, N / 128] as :func:`block_product` takes them: K innermost, and
    padded."""
    blocks, more = scale.t(), -len(scale) % STEP
    if more:
        blocks = torch.cat((blocks, blocks.new_ones((len(blocks), more))), 1)
    return aligned(blocks.contiguous()).t()


def block_product(a: Tensor, b: Tensor, scale: Tensor, padded: Tensor, out: Tensor) -> None:
    """Compute out = a @ b, rounded once, on a CUDA device that has such a product. ``scale``:
    scales of A [M, K / 128]; ``padded``: scales of B."""
    rows, more = len(a), -len(a) % STEP
    whole = out
    if more:
        a, scale = _more_rows(a.view(torch.uint8), more).view(a.dtype), _more_rows(scale, more)
        whole = out.new_empty((rows + more, out.shape[1]))
    block_mm(a, b, aligned(scale.t().contiguous()).t(), padded, whole)
    if more:
        out.copy_(whole[:rows])


def block_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: Tensor) -> None:
    """Compute the product of :func:`block_product` with scales already in cuBLAS' layouts."""
    torch.ops.aten._scaled_mm_v2.out(
        a, b, [of_a], [_BY_ROW_BLOCKS], [_PLAIN], [of_b], [_BY_BLOCKS], [_PLAIN],
        None, out.dtype, [], False, out=out,
    )  # fmt: skip


def _more_rows(rows: Tensor, more: int) -> Tensor:
    """Return a copy with ``more`` rows of zeros appended."""
    return torch.cat((rows, rows.new_zeros((more, rows.shape[1]))))
