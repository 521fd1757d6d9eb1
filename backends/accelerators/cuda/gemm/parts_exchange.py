"""Exchange of parts, which ranks of a node put into each other's memory by copy engines, around a
library's products.

A part is rows of a matrix, which travel beside products on the call's stream; a flag after it
announces its arrival. A kernel ends the call (``device/call.cuh``), so slots are free for the next
call.
Between nodes all rows of a rank are one part. Those for other nodes leave by puts of a NIC, once for
each rank there, and one small kernel sets their flags (``kernels/moe/far_slots.hpp``); it is queued
behind all copies of its exchange, which it would hold up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from mkernel.backends.accelerators.cuda.device_world import (
    DispatchContext,
    call_id,
    device_world,
)
from mkernel.backends.accelerators.cuda.gemm.cublas import open_cublas
from mkernel.backends.accelerators.cuda.gemm.library import check_product, element_of
from mkernel.backends.accelerators.cuda.gemm.parts_tuning import EXCHANGES
from mkernel.backends.accelerators.cuda.memory import bytes_at
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import PartsSchedule, ReducePartsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

_ALIGNMENT = 256


class Part(NamedTuple):
    """Rows [first, last) of a matrix of all ranks' rows, the ``number``-th part of one rank's."""

    first: int
    last: int
    number: int


def share(rows: int, world: int, rank: int) -> tuple[int, int]:
    """Return [first, last) of a rank's rows: equal shares rounded up; the last ranks may have
    fewer."""
    each = -(-rows // world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def parts_of(plan: LaunchPlan) -> tuple[list[Part], ...]:
    """Return the parts of the rows of each rank, in order; a share of fewer rows may have fewer
    parts."""
    rows, world = plan.gemm.m, plan.world_size
    step = -(-share(rows, world, 0)[1] // plan.part(PartsSchedule).chunks)
    found = []
    for rank in range(world):
        first, last = share(rows, world, rank)
        starts = range(first, last, step)
        found.append([Part(at, min(at + step, last), number) for number, at in enumerate(starts)])
    return tuple(found)


class PartsExchange:
    """One plan's exchanges on one rank.

    Attributes:
        peers: the other ranks, those after this one first. Parts are read in the order in which
            they are sent, because each rank sends first to the rank before it.
        near, far: those of this node, and those of others, in the same order.
        parts: of the rows of each rank.
        world: the world as kernels see it.
    """

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        self._context = context
        open_cublas(context, call.plan)
        self.world = device_world(call, context)
        world, rank = call.plan.world_size, call.rank
        self._chunks = call.plan.part(PartsSchedule).chunks
        self._workspaces = {rank: call.workspace} | {
            peer: memory.workspace for peer, memory in call.peers.items()
        }
        self._own = call.workspace
        self.peers = tuple((rank + step) % world for step in range(1, world))
        each = call.plan.ranks_per_node
        self.near = tuple(peer for peer in self.peers if peer // each == rank // each)
        self.far = tuple(peer for peer in self.peers if peer // each != rank // each)
        self.parts = parts_of(call.plan)
        if self.far:
            native().load_parts(context.device)
        self._loads = bool(self.far)

    def loads(self, call: Call) -> bool:
        """Return whether products must be launched once before the call, without waits: a library's
        kernels are loaded by their first launch (:mod:`..attention.in_parts`)."""
        if not self._loads or call.view == "compute_only":
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        self._loads = False
        return True

    def address(self, rank: int, offset: int) -> int:
        """Return the address, in this process, of byte ``offset`` of a rank's data area."""
        at: int = self._workspaces[rank] + native().DATA_OFFSET + offset
        return at

    def lying(self, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix at byte ``offset`` of the own data area."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        return bytes_at(self.address_here(offset), nbytes).view(dtype).view(shape)

    def address_here(self, offset: int) -> int:
        """Return the address of byte ``offset`` of the own data area."""
        at: int = self._own + native().DATA_OFFSET + offset
        return at

    def flag(self, sender: int, number: int, turn: int = 0) -> int:
        """Return the flag of a sender's part. ``turn``: the number of the exchange in its call, 0
        or 1."""
        return (turn * (len(self.peers) + 1) + sender) * self._chunks + number

    def slots(self, offset: int, nbytes: int, turn: int = 0) -> _kernels.FarSlots:
        """Return the slots at ``offset`` of the data area, ``nbytes`` of each rank, which ranks of
        other nodes fill. ``turn``: as of :meth:`flag`."""
        made: _kernels.FarSlots = native().FarSlots(
            offset=offset, bytes=nbytes, flag=self.flag(0, 0, turn)
        )
        return made

    @contextmanager
    def of_call(self, call: Call, stream: int) -> Iterator[Running]:
        """Yield the sends and waits of one call on ``stream``, and beside it if the view is
        pipelined."""
        world = self.world.of_call(call_id(call), call.timeout_s)
        beside = call.view == "pipelined"
        running = Running(self._context, world, stream, call.plan, beside=beside)
        try:
            yield running
        finally:
            running.join()


class Copied(NamedTuple):
    """Packed rows, and their place in a tensor of the call."""

    rows: torch.Tensor
    into: torch.Tensor


class Exchanges(Protocol):
    """The sends and waits of a call, in its order.

    Attributes:
        far: those between nodes; None: there is one node.
    """

    far: Running | None

    def fork(self) -> None:
        """Order later sends after all work that the call's stream has by now."""

    def send(self, peer: int, rows: torch.Tensor, to: int, flag: int | None = None) -> None:
        """Send packed rows to an address of a peer's memory, followed by the flag."""

    def wait(self, source: int, flag: int) -> None:
        """Make the call's stream wait for that flag."""

    def add(
        self,
        own: torch.Tensor,
        theirs: Sequence[int],
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        ends: bool,
    ) -> None:
        """Add packed rows, the peers' by their addresses, in that order, and a bias; ``ends``: the
        sum also ends the call."""

    def copy(self, copied: Copied) -> None:
        """Copy rows."""

    def join(self) -> None:
        """Make the call's stream wait until everything is sent. To be called once."""

    def end(self, copies: Sequence[Copied] = ()) -> None:
        """Copy rows and end the call, if none of its kernels does that."""


class Running(Exchanges):
    """The exchanges of one call, on a device."""

    def __init__(
        self,
        context: DispatchContext,
        world: _kernels.DeviceWorld,
        stream: int,
        plan: LaunchPlan,
        *,
        beside: bool,
    ) -> None:
        """Start a call's exchanges. ``beside``: copies go on the second stream; otherwise between
        the products."""
        self._context, self.world, self.stream = context, world, stream
        self._plan, self._beside, self._forked = plan, beside, False
        self._copies = stream
        self.far = self if plan.nodes > 1 else None

    def fork(self) -> None:
        if self._beside:
            self._copies = self._context.order.fork(self.stream)
            self._forked = True

    def send(self, peer: int, rows: torch.Tensor, to: int, flag: int | None = None) -> None:
        made = native()
        made.push_part(
            self._context.device,
            self.world,
            peer,
            rows.data_ptr(),
            rows.nbytes,
            to,
            made.NO_FLAG if flag is None else flag,
            self._copies,
        )

    def fill(self, rows: torch.Tensor, outbox: int) -> None:
        """Copy packed rows to an offset of the area from which a NIC takes them."""
        device, at = self._context.device, rows.data_ptr()
        native().fill_outbox(device, self.world, at, rows.nbytes, outbox, self._copies)

    def send_outbox(self, outbox: int, slots: _kernels.FarSlots) -> None:
        """Send every rank of another node its slot of the outbox at that offset."""
        native().send_outbox(self._context.device, self.world, outbox, slots, self._copies)

    def send_far(self, rows: int, slots: _kernels.FarSlots) -> None:
        """Send the bytes of a slot, at that address, to every rank of another node."""
        native().send_far(self._context.device, self.world, rows, slots, self._copies)

    def land(self, slots: Sequence[_kernels.FarSlots]) -> None:
        """Set the flags of what ranks of other nodes send, after all sends of the exchange."""
        native().land_far(self._context.device, self.world, slots, self._copies)

    def wait(self, source: int, flag: int) -> None:
        native().await_part(self._context.device, self.world, source, flag, self.stream)

    def add(
        self,
        own: torch.Tensor,
        theirs: Sequence[int],
        out: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        ends: bool,
    ) -> None:
        native().sum_parts(
            self._context.device,
            self.world,
            element_of(self._plan),
            [own.data_ptr(), *theirs],
            out.numel(),
            out.data_ptr(),
            self._plan.part(ReducePartsSchedule).sum_blocks,
            ends,
            self.stream,
            0 if bias is None else bias.data_ptr(),
            self._plan.gemm.n,
        )

    def copy(self, copied: Copied) -> None:
        copied.into.copy_(copied.rows)

    def join(self) -> None:
        if self._forked:
            self._forked = False
            self._context.order.join(self.stream)

    def end(self, copies: Sequence[Copied] = ()) -> None:
        self.join()
        places = [(each.into.data_ptr(), each.rows.data_ptr(), each.rows.nbytes) for each in copies]
        native().rendezvous(self._context.device, self.world, places, self.stream)


_Schedule = TypeVar("_Schedule", bound=PartsSchedule)


def checked(plan: LaunchPlan, kind: type[_Schedule]) -> _Schedule:
    """Return the schedule. ArgumentError for one that calls would not follow."""
    world, how = plan.world_size, plan.part(kind)
    check_product(plan, how)
    if world == 1:
        raise ArgumentError("plan.schedule.kind", repr(how.kind), "'hopper.library', on one rank")
    most = -(-plan.gemm.m // world)
    if how.chunks > most:
        raise ArgumentError("plan.schedule.chunks", how.chunks, f"at most {most}, a rank's rows")
    if plan.nodes > 1 and how.chunks > 1:
        legal = "1: all rows of a rank are one part between nodes"
        raise ArgumentError("plan.schedule.chunks", how.chunks, legal)
    most = native().MAX_FLAGS // (EXCHANGES * world)
    if how.chunks > most:
        raise ArgumentError(
            "plan.schedule.chunks", how.chunks, f"at most {most}, which have a flag each"
        )
    return how


def rounded_up(nbytes: int) -> int:
    """Return the bytes of a slot for ``nbytes``."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
