"""The tree of invariant sums, added up in float64 and rounded at each node."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Round what is exact in float64 by way of float32, as a float32 sum is rounded again."""
    return sums.float().to(dtype).double()


def tree(leaves: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Add leaves in float64, which is exact for two of them, and round each node."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return rounded(tree(leaves[:half], dtype) + tree(leaves[half:], dtype), dtype)
