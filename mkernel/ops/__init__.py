"""The ops. Each module opens with its data flow; shared checks are in ``validate``.

To import this package registers them all as ``torch.ops.mkernel``.
"""

from mkernel.ops import (
    all_gather_gemm,
    all_reduce,
    gemm_all_reduce,
    gemm_reduce_scatter,
    invariant_mm,
    moe,
    moe_dispatch,
    moe_gemm_combine,
    plan_file,
    replicated,
    ring_attention,
)
from mkernel.world import lifecycle

__all__ = [
    "all_gather_gemm",
    "all_reduce",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "invariant_mm",
    "moe",
    "moe_dispatch",
    "moe_gemm_combine",
    "plan_file",
    "replicated",
    "ring_attention",
]

lifecycle.load_plans = plan_file.load
