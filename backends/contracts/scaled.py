"""What e4m3 operands with scales stand for (``mkernel/plan/scales.py``), for who multiplies them with
torch: the reference that is always there."""

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
