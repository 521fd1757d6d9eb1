"""The movement of ring attention's keys and values between ranks, and the part of them that each rank
sees. Within a node they travel by copy engines, between nodes by a kernel
(kernels/attention/crossing.hpp)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.attention.tuning import attention_shape
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    between_nodes,
)
from mkernel.backends.accelerators.cuda.memory import bytes_at
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import KeysSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class Source(NamedTuple):
    """A peer, its keys and values as far as this rank sees them, and the first query that sees
    them."""

    rank: int
    k: torch.Tensor
    v: torch.Tensor
    first: int


class Queries(NamedTuple):
    """A call's queries as passed to a library: scores are ``scale`` > 0 times their products with
    keys, and ``q`` is ``sign`` times the caller's."""

    q: torch.Tensor
    scale: float
    sign: int

    @classmethod
    def of(cls, call: Call) -> Queries:
        """Make the scale positive, because a library takes the largest score before it scales."""
        q, scale = aligned(call.tensors["q"]), float(call.options["scale"])
        sign = (scale > 0) - (scale < 0)
        return cls(q if sign == 1 else q * sign, abs(scale) or 1.0, sign)


class AttentionRing:
    """The keys and values of one plan's calls on one rank.

    Attributes:
        keys: the layout of one rank's keys, for the native module.
        sources: the other ranks in the order in which they are consumed, the one before this first.
    """

    def __init__(
        self,
        call: Call,
        context: DispatchContext,
        chunk_rows: int | None = None,
        far: KeysSchedule | None = None,
    ) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read. ``chunk_rows``: rows of a rank that travel together with a flag of their own in
        one node; None: all. ``far``: the way between nodes, if there are several."""
        self._plan, self._rank, self._device = call.plan, call.rank, context.device
        self._workspace, self._order = call.workspace, context.order
        shape = attention_shape(call.plan)
        self.causal, self.rows = shape.causal, shape.sequence // call.plan.world_size
        self.keys = ring_keys(call.plan)
        self._chunk = self.keys.pitch // self.rows * min(chunk_rows or self.rows, self.rows)
        self._far = far if call.plan.nodes > 1 else None
        self._flags = 1  # of a rank's keys and values that arrive whole
        if self._far is not None:
            native().load_attention(context.device)
            self._flags = self._crossing(*self.given(call)).chunks
        self.sources = tuple(self._sources())

    @staticmethod
    def given(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a call's keys and values as they are sent, which may be copies made on torch's
        current stream. They are kept until that stream is ordered after their way."""
        return aligned(call.tensors["k"]), aligned(call.tensors["v"])

    def push(
        self, world: _kernels.DeviceWorld, k: torch.Tensor, v: torch.Tensor, stream: int
    ) -> None:
        """Send the own keys and values to every peer, with a flag after each chunk; land the data
        that other nodes send."""
        made = native()
        if self._far is not None:
            crossing, blocks = self._crossing(k, v), self._far.land_blocks
            made.cross_keys(self._device, world, crossing, blocks, stream)
            return
        at = k.data_ptr(), v.data_ptr()
        made.push_keys(self._device, world, *at, self.keys, self.causal, self._chunk, stream)

    def wait(self, world: _kernels.DeviceWorld, source: Source, stream: int) -> None:
        """Make work that follows on ``stream`` wait for all of the source's data, sent in one chunk
        within a node."""
        if self._far is None:
            native().await_part(self._device, world, source.rank, source.rank, stream)
            return
        batch, heads, seen, _ = source.k.shape
        width, stride = (-(-rows // self._far.far_rows) for rows in (seen, self.rows))
        native().await_part(
            self._device, world, source.rank, source.rank * self._flags, stream,
            count=batch * heads * width, width=width, stride=stride,
        )  # fmt: skip

    def exchange(self, call: Call, world: _kernels.DeviceWorld, stream: int) -> None:
        """Send the own keys and values, and wait for those of every source."""
        self.push(world, *self.given(call), stream)
        for source in self.sources:
            self.wait(world, source, stream)

    def arriving(self, world: _kernels.DeviceWorld | None, stream: int) -> Iterator[Source]:
        """Yield the sources, each when work that follows on ``stream`` may read it; at once without
        ``world``."""
        for source in self.sources:
            if world is not None:
                self.wait(world, source, stream)
            yield source

    @contextmanager
    def sending(self, call: Call, world: _kernels.DeviceWorld, stream: int) -> Iterator[None]:
        """Send the own keys and values on the second stream meanwhile; at the end ``stream`` waits
        for it. What sends them to other nodes runs before any work that follows on ``stream``."""
        sent = self.given(call)
        with ExitStack() as ends:
            travelling = self._order.fork(stream)
            ends.callback(self._order.join, stream)
            self.push(world, *sent, travelling)
            if self._far is not None:
                native().await_crossing(self._device, world, stream)
            yield

    @contextmanager
    def beside(self, call: Call, world: _kernels.DeviceWorld | None, stream: int) -> Iterator[int]:
        """Yield the third stream, for others' parts, ordered after the work on ``stream``; at the
        end ``stream`` waits for it. ``world``: the own keys and values travel meanwhile on the
        second stream; None: nothing is sent."""
        with ExitStack() as ends:
            kernels = self._order.fork_kernels(stream)
            ends.callback(self._order.join_kernels, stream)
            if world is not None:
                ends.enter_context(self.sending(call, world, stream))
            yield kernels

    def lying(self, offset: int, rows: int, heads: int | None = None) -> torch.Tensor:
        """Return [B, Hkv, rows, D], packed in the layout of the plan's tensors, at that offset of
        the own data area; between nodes packed head by head. ``heads``: replaces Hkv."""
        return lying(self._plan, self._workspace, offset, rows, heads)

    def _crossing(self, k: torch.Tensor, v: torch.Tensor) -> _kernels.KeysCrossing:
        """Describe how a call's own keys and values leave, and those of others land."""
        assert self._far is not None
        made: _kernels.KeysCrossing = native().KeysCrossing(
            [(each.data_ptr(), each.stride()[:3]) for each in (k, v)],
            tuple(k.shape),
            self._far.far_rows,
            self._far.put_blocks,
            self.causal,
            self._far.exchange == "hierarchical",
        )
        return made

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of [B, Hkv, rows, D] in the memory order of the plan's tensors."""
        if attention_shape(self._plan).layout == "positions":
            tensor = tensor.transpose(1, 2)
        return tensor.contiguous()

    def rows_seen(self, rank: int, of: int) -> int:
        """Return how many of the keys of rank ``of`` another rank sees; they are the first ones."""
        return self.rows // 2 if self.causal and of < rank else self.rows

    def _sources(self) -> Iterator[Source]:
        rank, world, local = self._rank, self._plan.world_size, self._plan.ranks_per_node
        # Those of the own node come first.
        others = [(rank - step) % world for step in range(1, world)]
        for source in sorted(others, key=lambda other: other // local != rank // local):
            at = self.keys.slot_offset(world, local, rank, source)
            seen = self.rows_seen(rank, source)
            k, v = (self.lying(at + which, self.rows) for which in (0, self.keys.bytes))
            first = self.rows // 2 if self.causal and source > rank else 0
            yield Source(source, k[:, :, :seen], v[:, :, :seen], first)


def lying(
    plan: LaunchPlan, workspace: int, offset: int, rows: int, heads: int | None = None
) -> torch.Tensor:
    """Return [B, Hkv, rows, D], packed in the layout of the plan's tensors, at that offset of a
    workspace's data; between nodes packed head by head. ``heads``: replaces Hkv."""
    by_position = attention_shape(plan).layout == "positions" and plan.nodes == 1
    shape, dtype = attention_shape(plan), getattr(torch, plan.dtype)
    heads = shape.kv_heads if heads is None else heads
    sizes = [shape.batch, heads, rows, shape.head_dim]
    if by_position:
        sizes[1:3] = rows, heads
    nbytes = shape.batch * heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    flat = bytes_at(workspace + native().DATA_OFFSET + offset, nbytes).view(dtype)
    return flat.view(sizes).transpose(1, 2) if by_position else flat.view(sizes)


def stretches(plan: LaunchPlan, first: int, rows: int) -> _kernels.Piece:
    """Return the memory ranges of those rows of one rank's keys, and of its values."""
    keys = ring_keys(plan)
    row = keys.pitch * plan.world_size // attention_shape(plan).sequence
    piece: _kernels.Piece = native().Piece(
        at=first * row, width=rows * row, pitch=keys.pitch, count=keys.count
    )
    return piece


def keys_workspace(plan: LaunchPlan) -> Workspace:
    """Return the symmetric memory of a plan's calls."""
    keys, world = ring_keys(plan), plan.world_size
    if world == 1:
        return Workspace((NO_DATA,))
    needed = keys.workspace_bytes(world)
    if plan.nodes == 1:
        return Workspace((needed,))
    staged = plan.routes.staged
    return between_nodes(plan, needed if staged else native().DATA_OFFSET, keys.area_bytes(world))


def ring_keys(plan: LaunchPlan) -> _kernels.Keys:
    """Return the layout of one rank's keys, and of its values; the first half of the positions is
    separate."""
    shape = attention_shape(plan)
    rows = shape.sequence // plan.world_size
    whole = shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    stretches = shape.batch * (shape.kv_heads if shape.layout == "heads" else 1)
    pitch = whole // stretches
    keys: _kernels.Keys = native().Keys(bytes=whole, width=pitch // 2, pitch=pitch, count=stretches)
    return keys
