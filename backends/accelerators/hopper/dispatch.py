"""The choice of the executor that runs a plan's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mkernel.backends.accelerators.hopper.attention.backward import AttentionBackwardExecutor
from mkernel.backends.accelerators.hopper.attention.in_parts import AttentionExecutor
from mkernel.backends.accelerators.hopper.attention.in_pieces import AttentionInPiecesExecutor
from mkernel.backends.accelerators.hopper.attention.kernel import AttentionKernelExecutor
from mkernel.backends.accelerators.hopper.capabilities import OPS
from mkernel.backends.accelerators.hopper.collectives.all_reduce import SumExecutor
from mkernel.backends.accelerators.hopper.device_world import DispatchContext
from mkernel.backends.accelerators.hopper.gemm.few_rows import FewRowsExecutor
from mkernel.backends.accelerators.hopper.gemm.fused import AllGatherExecutor, ReduceExecutor
from mkernel.backends.accelerators.hopper.gemm.gather_parts import GatherPartsExecutor
from mkernel.backends.accelerators.hopper.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.hopper.gemm.reduce_parts import ReducePartsExecutor
from mkernel.backends.accelerators.hopper.moe.executors import (
    CombineExecutor,
    DispatchExecutor,
    GemmCombineExecutor,
    RowsExecutor,
)
from mkernel.backends.accelerators.hopper.schedule import (
    AttentionInPiecesSchedule,
    AttentionKernelSchedule,
    FewRowsSchedule,
    PartsSchedule,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan


class Executor(Protocol):
    """The executor of one plan's calls in a world; values that are the same for every call are
    computed once."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs on each rank. Unsupported."""

    def start(self, call: Call, stream: int) -> Mapping[str, Any] | None:
        """Queue one call on a stream, after the world's previous call, and return at once. Returns
        outputs whose sizes only the call determines; for these the host waits."""

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return the capsule with which native code starts calls whose tensors have these places
        (``Call.symmetric``) and strides, in the product's view; None: there is none."""


FUSED: dict[str, type[Executor]] = {
    "all_gather_gemm": AllGatherExecutor,
    "gemm_reduce_scatter": ReduceExecutor,
    "gemm_all_reduce": ReduceExecutor,
    "all_reduce": SumExecutor,
    "moe_dispatch": RowsExecutor,
    "moe_dispatch_gemm": DispatchExecutor,
    "moe_combine": CombineExecutor,
    "moe_gemm_combine": GemmCombineExecutor,
    "ring_attention": AttentionExecutor,
    "ring_attention_backward": AttentionBackwardExecutor,
}


def executor_of(plan: LaunchPlan) -> type[Executor]:
    """Return the executor of the plan's calls. Unsupported."""
    if plan.op not in FUSED:
        raise Unsupported(
            f"accelerator 'hopper' has no kernel of {plan.op}; it has: {', '.join(FUSED)}"
        )
    if plan.path == "library" and plan.op not in OPS:
        raise Unsupported(f"accelerator 'hopper' has one path of {plan.op}; plan.path is 'library'")
    if plan.path == "library":
        if not isinstance(plan.schedule, PartsSchedule):
            return LibraryExecutor
        gathers = plan.op == "all_gather_gemm"
        return GatherPartsExecutor if gathers else ReducePartsExecutor
    if plan.op == "ring_attention" and isinstance(plan.schedule, AttentionInPiecesSchedule):
        return AttentionInPiecesExecutor
    if plan.op == "ring_attention" and isinstance(plan.schedule, AttentionKernelSchedule):
        return AttentionKernelExecutor
    return FewRowsExecutor if isinstance(plan.schedule, FewRowsSchedule) else FUSED[plan.op]
