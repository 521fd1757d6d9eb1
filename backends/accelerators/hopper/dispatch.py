"""Which executor runs an op, and how much of the workspace its plans need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mkernel.backends.accelerators.hopper import gemm, library
from mkernel.backends.accelerators.hopper.capabilities import FUNCTIONS, ops
from mkernel.backends.accelerators.hopper.device_world import DispatchContext
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan


class Executor(Protocol):
    """One plan's calls in a world: what stays the same from call to call is worked out once."""

    def start(self, call: Call, stream: int) -> None:
        """Queue one on a stream, which comes after the world's previous call; returns at once."""


@dataclass(frozen=True)
class Op:
    """How an op is run on its fused path.

    Attributes:
        workspace_bytes: bytes of the symmetric workspace that a plan needs on each rank.
        executor: makes a plan's executor, of its first call.
    """

    workspace_bytes: Callable[[LaunchPlan], int]
    executor: Callable[[Call, DispatchContext], Executor]


OPS: dict[str, Op] = {
    "all_gather_gemm": Op(gemm.gather_bytes, gemm.AllGatherExecutor),
    "gemm_reduce_scatter": Op(gemm.reduce_bytes, gemm.ReduceExecutor),
    "gemm_all_reduce": Op(gemm.reduce_bytes, gemm.ReduceExecutor),
}


def workspace_bytes(plan: LaunchPlan) -> int:
    """Bytes of the workspace that a plan needs on each rank. Unsupported."""
    op = _op(plan.op)
    return library.workspace_bytes(plan) if plan.path == "library" else op.workspace_bytes(plan)


def executor_for(call: Call, context: DispatchContext) -> Executor:
    """Make the executor of the call's plan. Unsupported."""
    op = _op(call.plan.op)
    return (
        library.LibraryExecutor(call, context)
        if call.plan.path == "library"
        else op.executor(call, context)
    )


def _op(name: str) -> Op:
    op = OPS.get(name)
    if op is None or not hasattr(native(), FUNCTIONS[name]):
        raise Unsupported(
            f"accelerator 'hopper' has no kernel of {name}; it has: {', '.join(ops()) or 'none'}"
        )
    return op
