"""Tensor-parallel layers of fused ops, for ``torch.nn`` programs.

``linear``: the two halves of a tensor-parallel pair. ``styles``: the same for ``parallelize_module``.
"""

from mkernel.nn.linear import ColumnParallelLinear, RowParallelLinear
from mkernel.nn.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColumnParallelLinear", "ColwiseParallel", "RowParallelLinear", "RowwiseParallel"]
