"""The choice of the executor that runs a plan's calls: of kernels with wgmma, or one of ``cuda``."""

from __future__ import annotations

from mkernel.backends.accelerators.cuda import dispatch as cuda
from mkernel.backends.accelerators.cuda.dispatch import Executor
from mkernel.backends.accelerators.cuda.schedule import AttentionSchedule
from mkernel.backends.accelerators.hopper.attention.core import AttentionCoreExecutor
from mkernel.backends.accelerators.hopper.attention.kernel import AttentionKernelExecutor
from mkernel.backends.accelerators.hopper.gemm.few_rows import FewRowsExecutor
from mkernel.backends.accelerators.hopper.gemm.fused import AllGatherExecutor, ReduceExecutor
from mkernel.backends.accelerators.hopper.gemm.segments import SegmentsExecutor
from mkernel.backends.accelerators.hopper.moe.executors import (
    DispatchExecutor,
    GemmCombineExecutor,
)
from mkernel.backends.accelerators.hopper.schedule import (
    AttentionKernelSchedule,
    FewRowsSchedule,
    SegmentsSchedule,
)
from mkernel.plan.model import LaunchPlan

FUSED: cuda.Executors = {
    "all_gather_gemm": AllGatherExecutor,
    "gemm_reduce_scatter": ReduceExecutor,
    "gemm_all_reduce": ReduceExecutor,
    **cuda.EXECUTORS,
    "moe_dispatch_gemm": DispatchExecutor,
    "moe_gemm_combine": GemmCombineExecutor,
}


def executor_of(plan: LaunchPlan) -> type[Executor]:
    """Return the executor of the plan's calls. Unsupported."""
    found, how = cuda.executor_of(plan, FUSED), plan.schedule
    if plan.path == "library":
        return found
    if isinstance(how, SegmentsSchedule):
        return SegmentsExecutor
    if isinstance(how, FewRowsSchedule):
        return FewRowsExecutor
    if plan.op == "ring_attention" and isinstance(how, AttentionKernelSchedule):
        return AttentionKernelExecutor
    if plan.op == "ring_attention" and isinstance(how, AttentionSchedule):
        return AttentionCoreExecutor if how.library == "mkernel" else found
    return found
