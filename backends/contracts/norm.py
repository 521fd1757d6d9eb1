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
    total: Tensor, addends: Sequence[Tensor], weight: Tensor, eps: float, out: Tensor, new: Tensor
) -> None:
    """Fill ``out`` and ``new``, the new residual. Both are [M, N] like ``total``; ``out`` may be
    ``total``.

    Args:
        addends: tensors added to ``total`` in order: a residual, preceded by a bias [N] if there is
            one.
        weight: [N].
    """
    wide = torch.promote_types(total.dtype, torch.float32)
    row = total.to(wide)
    for addend in addends:
        row = row + addend
    new.copy_(row)
    scale = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    out.copy_(row * scale * weight.to(wide))
