"""The ops. Each module opens with its data flow; shared checks are in ``validate``.

To import this package registers them all as ``torch.ops.mkernel``.
"""

from mkernel.ops import (
    all_gather_gemm,
    all_reduce,
    gemm_all_reduce,
    gemm_reduce_scatter,
    moe,
    moe_dispatch,
    moe_gemm_combine,
    replicated,
    ring_attention,
)

__all__ = [
    "all_gather_gemm",
    "all_reduce",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "moe",
    "moe_dispatch",
    "moe_gemm_combine",
    "replicated",
    "ring_attention",
]
