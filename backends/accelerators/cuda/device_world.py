"""The world as every kernel of a call sees it: its workspaces, this rank, and the deadline of
waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.moe.reports import MoeReports
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.cuda import _kernels
    from mkernel.backends.accelerators.cuda.output_pool import OutputPool

NO_DATA = 1 << 20
"""Bytes of a workspace whose data area is empty."""


@dataclass
class DispatchContext:
    """The state that all executors of a world share.

    Attributes:
        device: its number in this process.
        order: the order of the world's calls; it also has the second stream for copies.
        control: address of the rank's HostControl.
        multiprocessors: the most that kernels take; None: all.
        network: the way to other nodes, set by the first call that needs it.
        reports: reports of MoE dispatches.
        outputs: the pool of outputs that peers may write; None: no plan has needed any.
        one: 1.0 on the device, made outside of any capture.
        cublas: the data that products share which bypass torch, set by the first call that has such
            products; None: there are none.
    """

    device: int
    order: _kernels.CallOrder
    control: int
    multiprocessors: int | None = None
    network: _kernels.DeviceNetwork | None = None
    reports: MoeReports = field(default_factory=MoeReports)
    outputs: OutputPool | None = None
    one: torch.Tensor | None = None
    cublas: _kernels.Cublas | None = None

    def network_of(self, call: Call) -> _kernels.Network | None:
        """Return what the kernels of this call use to reach other nodes; None: there are none.
        ArgumentError, CudaError: the device cannot push to the session's FIFO, or cannot address
        memory of the host."""
        made = native()
        if call.plan.nodes == 1:
            return None
        if self.network is None:
            self.network = made.DeviceNetwork(self.device, call.fifo, call.pad, call.ordered)
            self.order.announce_to(call.fifo)
        staged = call.plan.routes.staged
        area = call.staging if staged else call.workspace + made.DATA_OFFSET
        offset = 0 if staged else call.areas[0] + made.DATA_OFFSET
        found: _kernels.Network = self.network.of(area, staged, call.region, offset)
        return found


def between_nodes(plan: LaunchPlan, nbytes: int, area: int) -> Workspace:
    """Return the symmetric memory that a plan of several nodes needs: a workspace of ``nbytes``,
    and ``area`` bytes that NICs read and write, at its end or, if routes are staged, on the host."""
    staged = plan.routes.staged
    return Workspace(
        (nbytes if staged else nbytes + area,),
        signals=native().NETWORK_WORDS,
        staging=area if staged else 0,
    )


def workspace_of(plan: LaunchPlan, nbytes: int, outbox: int = 0) -> Workspace:
    """Return a workspace of ``nbytes`` on one node. Between nodes the memory that NICs write is an
    area of the same size and layout, followed by ``outbox`` bytes."""
    if plan.nodes == 1:
        return Workspace((nbytes,))
    offset = native().DATA_OFFSET
    return between_nodes(plan, nbytes if plan.routes.staged else offset, nbytes - offset + outbox)


def one_node(plan: LaunchPlan) -> int:
    """Return the world's size. Unsupported if it has several nodes."""
    if plan.nodes != 1:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} runs {plan.op} on one node; this plan has {plan.nodes}"
        )
    return plan.world_size


def device_world(call: Call, context: DispatchContext) -> _kernels.DeviceWorld:
    """Return the world as the kernels of this call see it."""
    workspaces = [0] * call.plan.world_size
    workspaces[call.rank] = call.workspace
    for rank, peer in call.peers.items():
        workspaces[rank] = peer.workspace
    world: _kernels.DeviceWorld = native().DeviceWorld(
        workspaces,
        call.rank,
        context.control,
        call.timeout_s,
        call_id(call),
        context.network_of(call),
    )
    return world


def collective_blocks(context: DispatchContext) -> int:
    """Return the most blocks of a collective, two per multiprocessor; 0: as many as the device has."""
    return 2 * (context.multiprocessors or 0)


def call_id(call: Call) -> int:
    """Return the call's number in its world as kernels record it: the low 32 bits."""
    return call.number & 0xFFFFFFFF
