"""What every kernel of a call is told of the world: its workspaces, this rank, and how long to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class DispatchContext(NamedTuple):
    """What all executors of a world share: the device, the order of its calls (which also has the
    second stream for copies), and the address of the rank's HostControl and its owner."""

    device: int
    order: _hopper.CallOrder
    control: int
    control_block: _hopper.ControlBlock | None = None


def one_node(plan: LaunchPlan) -> int:
    """The world's size. Unsupported where it has several nodes."""
    if plan.nodes != 1:
        raise Unsupported(
            f"accelerator 'hopper' runs {plan.op} on one node; this plan has {plan.nodes}"
        )
    return plan.world_size


def device_world(call: Call, context: DispatchContext) -> _hopper.DeviceWorld:
    """The world as the kernels of this call see it."""
    workspaces = [
        call.workspace if rank == call.rank else call.peers[rank].workspace
        for rank in range(call.plan.world_size)
    ]
    world: _hopper.DeviceWorld = native().DeviceWorld(
        workspaces, call.rank, context.control, call.timeout_s, call_id(call)
    )
    return world


def call_id(call: Call) -> int:
    """The call's number in its world as kernels note it: the low 32 bits."""
    return call.number & 0xFFFFFFFF
