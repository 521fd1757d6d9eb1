"""The step after a sum over ranks: a residual is added and rows are normalised.

    r = sum + residual        out = r / sqrt(mean(r^2) + eps) * weight, the mean of each row

It is computed in float32 (float64 for float64 inputs); each of the two results, the new residual r
and out, is rounded once. It is RMSNorm as in Zhang and Sennrich, https://arxiv.org/abs/1910.07467,
with the residual as inference engines fuse it (``fused_add_rms_norm``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_and_normalise(
    total: Tensor,
    addends: Sequence[Tensor],
    weight: Tensor,
    eps: float,
    out: Tensor,
    new: Tensor,
    *,
    invariant: bool = False,
) -> None:
    """Fill ``out`` and ``new``, the new residual. Both are [M, N] like ``total``; ``out`` may be
    ``total``.

    Args:
        addends: tensors added to ``total`` in order: a residual, preceded by a bias [N] if there is
            one.
        weight: [N].
        invariant: whether the mean of a row must not depend on the number of rows.
    """
    wide = torch.promote_types(total.dtype, torch.float32)
    row = total.to(wide)
    for addend in addends:
        row = row + addend
    new.copy_(row)
    scale = torch.rsqrt(row_mean(row.square(), invariant=invariant) + eps)
    out.copy_(row * scale * weight.to(wide))


def row_mean(rows: Tensor, *, invariant: bool) -> Tensor:
    """Return the mean of each row [.., N], as [.., 1]; ``invariant``: by :func:`row_sum`."""
    return row_sum(rows) / rows.shape[-1] if invariant else rows.mean(-1, keepdim=True)


def row_sum(rows: Tensor) -> Tensor:
    """Return the sum of each row [.., N], as [.., 1]. It does not depend on the number of rows, by
    which torch chooses an order: halves of the rows are added until one element is left."""
    total = rows
    while (half := total.shape[-1] // 2) > 0:
        rest = total[..., 2 * half :]
        total = torch.cat((total[..., :half] + total[..., half : 2 * half], rest), -1)
    return total
