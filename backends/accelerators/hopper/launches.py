"""Which ops there are kernels of, what they need, and how each is started.

An op is here once ``_hopper`` has its function; nothing else of the backend knows one by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mkernel.backends.accelerators.hopper import gemm, library
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.base import Call
from mkernel.errors import BackendUnavailable, Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class Lane(NamedTuple):
    """Where a call goes: a device, a stream of it that comes after the world's previous call, the
    order that forks a second stream off it, and the address of the rank's HostControl.

    ``worlds``, ``collectives``: what calls are told of the world, once made, by the plan's digest: a
    plan has one region in a world.
    """

    device: int
    stream: int
    order: _hopper.CallOrder
    control: int
    worlds: dict[str, _hopper.World]
    collectives: dict[str, _hopper.Collective]


@dataclass(frozen=True)
class Op:
    """How an op is run.

    Attributes:
        function: of ``_hopper``, without which this build lacks the op.
        region_bytes: bytes of the symmetric region that a plan needs on each rank.
        start: puts a call's work on its lane; returns at once.
    """

    function: str
    region_bytes: Callable[[LaunchPlan], int]
    start: Callable[[Call, Lane], None]


OPS: dict[str, Op] = {
    "all_gather_gemm": Op("all_gather_gemm", gemm.gather_bytes, gemm.start_gather),
    "gemm_reduce_scatter": Op("gemm_reduce", gemm.reduce_bytes, gemm.start_reduce),
    "gemm_all_reduce": Op("gemm_reduce", gemm.reduce_bytes, gemm.start_reduce),
}


def ops() -> tuple[str, ...]:
    """Names of the ops that this build has kernels of."""
    try:
        made = native()
    except BackendUnavailable:
        return ()
    return tuple(name for name, op in OPS.items() if hasattr(made, op.function))


def library_ops() -> tuple[str, ...]:
    """Names of the ops that also have the library path, with this torch."""
    return tuple(name for name in ops() if name in library.OPS) if library.usable() else ()


def region_bytes(plan: LaunchPlan) -> int:
    """Bytes of the region that a plan needs on each rank. Unsupported."""
    op = _op(plan.op)
    return library.region_bytes(plan) if plan.path == "library" else op.region_bytes(plan)


def start(call: Call, lane: Lane) -> None:
    """Put a call on its lane. Unsupported."""
    op = _op(call.plan.op)
    if call.plan.path == "library":
        library.start(call, lane)
    else:
        op.start(call, lane)


def _op(name: str) -> Op:
    op = OPS.get(name)
    if op is None or not hasattr(native(), op.function):
        raise Unsupported(
            f"accelerator 'hopper' has no kernel of {name}; it has: {', '.join(ops()) or 'none'}"
        )
    return op
