"""Parallel layers of fused ops, for ``torch.nn`` programs.

``linear``: the two halves of a tensor-parallel pair. ``blocks``: an MLP and an attention block of them.
``styles``: the halves for ``parallelize_module``. ``experts``: the experts of a mixture, over ranks.
``attention``: attention over a sequence that ranks share. ``embedding``: one whose rows ranks share.
"""

from mkernel.nn.attention import RingAttention
from mkernel.nn.blocks import ParallelAttention, ParallelMLP
from mkernel.nn.embedding import VocabParallelEmbedding
from mkernel.nn.experts import ExpertParallelMLP
from mkernel.nn.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from mkernel.nn.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ExpertParallelMLP",
    "MergedColumnParallelLinear",
    "ParallelAttention",
    "ParallelMLP",
    "RingAttention",
    "RowParallelLinear",
    "RowwiseParallel",
    "VocabParallelEmbedding",
]
