"""The choice of the executor that runs a plan's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mkernel.backends.accelerators.cuda.attention.backward import AttentionBackwardExecutor
from mkernel.backends.accelerators.cuda.attention.in_parts import AttentionExecutor
from mkernel.backends.accelerators.cuda.attention.in_pieces import AttentionInPiecesExecutor
from mkernel.backends.accelerators.cuda.capabilities import OPS
from mkernel.backends.accelerators.cuda.collectives.all_reduce import SumExecutor
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm.gather_parts import GatherPartsExecutor
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.gemm.reduce_parts import ReducePartsExecutor
from mkernel.backends.accelerators.cuda.moe.executors import CombineExecutor, RowsExecutor
from mkernel.backends.accelerators.cuda.moe.grouped import (
    LibraryCombineExecutor,
    LibraryDispatchExecutor,
)
from mkernel.backends.accelerators.cuda.schedule import AttentionInPiecesSchedule, PartsSchedule
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


Executors = Mapping[str, type[Executor]]
"""Executors by op, for those paths that take kernels of ours."""

EXECUTORS: Executors = {
    "all_reduce": SumExecutor,
    "moe_dispatch": RowsExecutor,
    "moe_dispatch_gemm": LibraryDispatchExecutor,
    "moe_combine": CombineExecutor,
    "moe_gemm_combine": LibraryCombineExecutor,
    "ring_attention": AttentionExecutor,
    "ring_attention_backward": AttentionBackwardExecutor,
}


def executor_of(plan: LaunchPlan, executors: Executors = EXECUTORS) -> type[Executor]:
    """Return the executor of the plan's calls. Unsupported."""
    by_library = plan.op in OPS
    if not by_library and plan.op not in executors:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} has no kernel of {plan.op}; it has: "
            f"{', '.join(executors)}"
        )
    if plan.path == "library" and by_library:
        if not isinstance(plan.schedule, PartsSchedule):
            return LibraryExecutor
        gathers = plan.op == "all_gather_gemm"
        return GatherPartsExecutor if gathers else ReducePartsExecutor
    if plan.path == "library" or plan.op not in executors:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} has one path of {plan.op}; plan.path is {plan.path!r}"
        )
    if plan.op == "ring_attention" and isinstance(plan.schedule, AttentionInPiecesSchedule):
        return AttentionInPiecesExecutor
    return executors[plan.op]
