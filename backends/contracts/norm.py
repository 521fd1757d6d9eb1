"""What comes behind a sum over ranks: a residual is added, and rows are normalised.

    r = sum + residual        out = r / sqrt(mean(r^2) + eps) * weight, the mean of each row

In float32 (of float64, float64), each of the two results rounded once: the new residual r, and out.
It is RMSNorm as in Zhang and Sennrich, https://arxiv.org/abs/1910.07467, with the residual as
inference engines fuse it (``fused_add_rms_norm``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_and_normalise(
    total: Tensor, addends: Sequence[Tensor], weight: Tensor, eps: float, out: Tensor, new: Tensor
) -> None:
    """Fill ``out`` and ``new``, the new residual, [M, N] as ``total``, which may be ``out``.

    Args:
        addends: what is added to ``total``, one after another: a residual, and a bias [N] before it.
        weight: [N].
    """
    wide = torch.promote_types(total.dtype, torch.float32)
    row = total.to(wide)
    for addend in addends:
        row = row + addend
    new.copy_(row)
    scale = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    out.copy_(row * scale * weight.to(wide))
