"""What each op needs, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mkernel.backends.accelerators.hopper import gemm, library
from mkernel.backends.accelerators.hopper.claims import FUNCTIONS, ops
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.base import Call
from mkernel.errors import Unsupported
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
        region_bytes: bytes of the symmetric region that a plan needs on each rank.
        start: puts a call's work on its lane; returns at once.
    """

    region_bytes: Callable[[LaunchPlan], int]
    start: Callable[[Call, Lane], None]


OPS: dict[str, Op] = {
    "all_gather_gemm": Op(gemm.gather_bytes, gemm.start_gather),
    "gemm_reduce_scatter": Op(gemm.reduce_bytes, gemm.start_reduce),
    "gemm_all_reduce": Op(gemm.reduce_bytes, gemm.start_reduce),
}


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
    if op is None or not hasattr(native(), FUNCTIONS[name]):
        raise Unsupported(
            f"accelerator 'hopper' has no kernel of {name}; it has: {', '.join(ops()) or 'none'}"
        )
    return op
