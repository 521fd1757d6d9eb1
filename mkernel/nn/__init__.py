"""Tensor-parallel layers of fused ops, for ``torch.nn`` programs.

``linear``: the two halves of a tensor-parallel pair. ``blocks``: an MLP and an attention block of them.
"""

from mkernel.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
