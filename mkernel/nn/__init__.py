"""Parallel layers of fused ops, for ``torch.nn`` programs.

``linear``: the two halves of a tensor-parallel pair. ``blocks``: an MLP and an attention block made
of such pairs. ``styles``: the halves for ``parallelize_module``; ``module_styles``: styles of other
modules; ``transformers_plan``: the styles of a transformers model. ``experts``: the experts of a
mixture, split over ranks; ``block_scaled``: their weights in checkpoints. ``attention``: attention
over a sequence that is split over ranks. ``embedding``: an embedding whose rows are split over ranks.
"""

from mkernel.nn.attention import RingAttention
from mkernel.nn.blocks import ParallelAttention, ParallelMLP
from mkernel.nn.embedding import VocabParallelEmbedding
from mkernel.nn.experts import ExpertParallelMLP
from mkernel.nn.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from mkernel.nn.module_styles import ExpertParallel, PrepareModuleInput, ReplicatedParallel
from mkernel.nn.styles import ColwiseParallel, RowwiseParallel
from mkernel.nn.transformers_plan import transformers_plan

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ExpertParallel",
    "ExpertParallelMLP",
    "MergedColumnParallelLinear",
    "ParallelAttention",
    "ParallelMLP",
    "PrepareModuleInput",
    "ReplicatedParallel",
    "RingAttention",
    "RowParallelLinear",
    "RowwiseParallel",
    "VocabParallelEmbedding",
    "transformers_plan",
]
