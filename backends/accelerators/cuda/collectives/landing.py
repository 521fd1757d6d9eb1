"""AllReduce into outputs that peers may write, each rank's at its own place
(``device/landing.cuh``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.settings import settings_of
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels
    from mkernel.backends.accelerators.cuda.device_world import DispatchContext

LEAST_BYTES = 4 << 20
"""Bytes of the smallest result to which peers write: a smaller one is copied in less time than the
host takes to allocate it."""
_PIECE, _LARGE_PIECE, _LEAST_ALONE = 2 << 20, 20 << 20, 10 << 20
"""The sizes of torch's allocator: it takes memory in multiples of the first; for tensors below the
third it takes the second."""


def wanted(plan: LaunchPlan) -> int:
    """Return the bytes of memory for outputs of an AllReduce; 0: its calls announce no places. All
    ranks get the same number."""
    nbytes = _result_bytes(plan)
    if plan.nodes > 1 or plan.world_size == 1 or nbytes < LEAST_BYTES:
        return 0
    piece = _LARGE_PIECE if nbytes < _LEAST_ALONE else -(-nbytes // _PIECE) * _PIECE
    return settings_of(plan.accelerator).outputs * piece


def outputs_of(plan: LaunchPlan, context: DispatchContext) -> _kernels.Outputs:
    """Return the outputs that calls of such a plan announce: none as long as no rank has memory for
    them, which is so on all ranks. A rank with a pool for graphs may have none."""
    made = native()
    if context.outputs is None or not context.outputs.memory.ranges or not wanted(plan):
        nothing: _kernels.Outputs = made.Outputs()
        return nothing
    outputs: _kernels.Outputs = made.Outputs(
        context.outputs.memory, plan.world_size, _result_bytes(plan)
    )
    return outputs


def _result_bytes(plan: LaunchPlan) -> int:
    shape = plan.summed if plan.op == "all_reduce" else plan.gemm
    return shape.m * shape.n * DTYPE_BYTES[plan.out_dtype]
