"""The Triton product of :mod:`.invariant`; imported where there is a GPU.

Tiles have one size and every tile takes K in one order, whatever M and N are, as batch-invariant
products of others do. A program makes a tile of one segment of K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_jit: Callable[[Callable[..., None]], Any] = triton.jit

ROWS, COLUMNS, STEP, BAND = 128, 128, 64, 8
"""A tile, the K of a step, and the rows of tiles that share columns of B in L2."""


@_jit
def _leaves(  # noqa: PLR0917 - Triton knows no other arguments
    a: tl.tensor, b: tl.tensor, out: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor,
    a_row: tl.tensor, a_column: tl.tensor, b_row: tl.tensor, b_column: tl.tensor,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, band: tl.constexpr,
) -> None:  # fmt: skip
    wide = tl.cdiv(n, columns)
    first = tl.program_id(0) // (band * wide) * band
    height = tl.minimum(tl.cdiv(m, rows) - first, band)
    within = tl.program_id(0) - first * wide
    row = (first + within % height) * rows + tl.arange(0, rows)
    column = within // height * columns + tl.arange(0, columns)
    segment = tl.program_id(1).to(tl.int64)
    depth = tl.arange(0, step)
    here_a = a + segment * k * a_column + row.to(tl.int64)[:, None] * a_row
    here_b = b + segment * k * b_row + column.to(tl.int64)[None, :] * b_column
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for at in range(0, k, step):
        there = at + depth < k
        left = tl.load(
            here_a + (at + depth)[None, :] * a_column,
            mask=(row < m)[:, None] & there[None, :],
            other=0.0,
        )
        right = tl.load(
            here_b + (at + depth)[:, None] * b_row,
            mask=there[:, None] & (column < n)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    kept = (row < m)[:, None] & (column < n)[None, :]
    to = out + (segment * m + row[:, None]) * n + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=kept)


def leaves(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out [segments, M, N] = the products of each segment of a [M, K] and b [K, N]."""
    segments, m, n = out.shape
    grid = (triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS), segments)
    _leaves[grid](
        a, b, out, m, n, a.shape[1] // segments, *a.stride(), *b.stride(),
        rows=ROWS, columns=COLUMNS, step=STEP, band=BAND, num_warps=8, num_stages=4,
    )  # fmt: skip
