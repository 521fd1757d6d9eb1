"""Ring attention on one rank, by a library's attention on parts of the keys.

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slot of every peer's workspace, a flag behind
  q on own k, v ──cuDNN──▶ out, log-sum-exp ─┐
  wait for a peer's flag, q on its k, v ─────┤  the rank before this one first
  all of them ──one kernel, float32──────────┴▶ out, lse; it ends the call

Causal calls are split in zigzag: rank r has pieces r and 2·W - 1 - r of 2·W. On the own keys attention
is plainly causal; of an earlier rank's keys all queries see the first half and no more; of a later
rank's the second half of the queries sees all. What no query sees is neither sent nor computed.

Errors. A library rounds what it finds in each part to the tensors' dtype, as it does its weights; the
merge is float32 and rounds once more. So the relative error of out is that of three independent
roundings at most, 1.7 times that of one, however many ranks there are: of random tensors 2.8e-3 in
bfloat16, 3.5e-4 in float16. lse is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.hopper.attention_tuning import attention_shape
from mkernel.backends.accelerators.hopper.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.accelerators.hopper.operands import aligned, deliver, writable
from mkernel.backends.accelerators.hopper.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.backends.cuda.memory import bytes_at
from mkernel.errors import ArgumentError
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class Seen(NamedTuple):
    """What some queries found in some keys: ``out`` [B, H, R, D] and ``lse`` [B, H, R] of the queries
    from ``first`` on."""

    out: torch.Tensor
    lse: torch.Tensor
    first: int


class Source(NamedTuple):
    """A peer, its keys and values as far as this rank sees them, and the first query that does."""

    rank: int
    k: torch.Tensor
    v: torch.Tensor
    first: int


class AttentionExecutor:
    """Ring attention, into ``out`` and ``lse``: one plan's calls in a world."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """``call``: any of them; what differs from call to call is not looked at."""
        plan, made = call.plan, native()
        self._context, self._plan = context, plan
        self._blocks = _checked(plan).merge_blocks
        shape = attention_shape(plan)
        self._causal, self._rows = shape.causal, shape.sequence // plan.world_size
        self._shape = (shape.batch, shape.heads, self._rows, shape.head_dim)
        self._keys = _keys(plan)
        self._world = device_world(call, context)
        self._alone = made.DeviceWorld([call.workspace], 0, context.control, call.timeout_s, 0)
        self._sources = list(self._slots(call))

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """What ring attention needs of symmetric memory. Unsupported."""
        world = one_node(plan)
        _checked(plan)
        return Workspace((_keys(plan).workspace_bytes(world) if world > 1 else NO_DATA,))

    def start(self, call: Call, stream: int) -> None:
        """Queue one; ``stream`` is torch's current one."""
        made, context = native(), self._context
        world = self._world.of_call(call_id(call), call.timeout_s)
        exchanges = call.view != "compute_only" and bool(self._sources)
        if not exchanges:
            parts = list(self._attended(call))
        elif call.view == "sequential":
            self._push(call, world, stream)
            for source in self._sources:
                made.await_part(context.device, world, source.rank, stream)
            parts = list(self._attended(call))
        else:
            beside = context.order.fork(stream)
            try:
                self._push(call, world, beside)
                parts = list(self._attended(call, world, stream))
            finally:
                context.order.join(stream)
        self._merge(call, parts, world if exchanges else self._alone, exchanges, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """None: the library is called from Python."""
        return None

    def _slots(self, call: Call) -> Iterator[Source]:
        """The other ranks in the order in which they are consumed."""
        plan, rank, world = call.plan, call.rank, call.plan.world_size
        shape = attention_shape(plan)
        nbytes, half = _key_bytes(plan), self._rows // 2
        for step in range(1, world):
            source = (rank - step) % world
            at = call.workspace + native().DATA_OFFSET
            at += self._keys.slot_offset(world, rank, source)
            k, v = (self._whole(address) for address in (at, at + nbytes))
            if shape.causal and source < rank:
                k, v = k[:, :, :half], v[:, :, :half]
            yield Source(source, k, v, half if shape.causal and source > rank else 0)

    def _whole(self, address: int) -> torch.Tensor:
        """A peer's keys, or values, [B, Hkv, S/W, D], as they lie at that address."""
        shape, dtype = attention_shape(self._plan), getattr(torch, self._plan.dtype)
        flat = bytes_at(address, _key_bytes(self._plan)).view(dtype)
        if shape.layout == "heads":
            return flat.view(shape.batch, shape.kv_heads, self._rows, shape.head_dim)
        lying = flat.view(shape.batch, self._rows, shape.kv_heads, shape.head_dim)
        return lying.transpose(1, 2)

    def _push(self, call: Call, world: _hopper.DeviceWorld, stream: int) -> None:
        k, v = call.tensors["k"], call.tensors["v"]
        native().push_keys(
            self._context.device,
            world,
            k.data_ptr(),
            v.data_ptr(),
            self._keys,
            self._causal,
            stream,
        )

    def _attended(
        self, call: Call, world: _hopper.DeviceWorld | None = None, stream: int = 0
    ) -> Iterator[Seen]:
        """What the queries found in each part, the own one first. ``world``: whose flags are waited for
        on ``stream``; None: parts are taken as they lie."""
        q, k, v = (aligned(call.tensors[name]) for name in "qkv")
        scale = float(call.options["scale"])
        if scale <= 0:  # the library takes the largest score before it scales
            q, scale = (-q, -scale) if scale else (q * 0, 1.0)
        yield attend(q, k, v, 0, self._causal, scale)
        for source in self._sources:
            if world is not None:
                native().await_part(self._context.device, world, source.rank, stream)
            yield attend(q, source.k, source.v, source.first, False, scale)

    def _merge(
        self,
        call: Call,
        parts: list[Seen],
        world: _hopper.DeviceWorld,
        ends: bool,
        stream: int,
    ) -> None:
        made, out, lse = native(), call.tensors["out"], call.tensors["lse"]
        written = writable(out)
        merge = made.Merge(
            [
                made.Part(
                    part.out.data_ptr(), part.out.stride()[:3], part.lse.data_ptr(), part.first
                )
                for part in parts
            ],
            written.data_ptr(),
            written.stride()[:3],
            lse.data_ptr(),
            self._shape,
            self._plan.dtype == "float16",
        )
        made.merge_parts(self._context.device, world, merge, self._blocks, ends, stream)
        deliver(written, out)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, scale: float
) -> Seen:
    """Attention of the queries from ``first`` on over keys and values that each of them sees, or in
    order where ``causal``. Heads of k and v may be fewer."""
    seeing = q[:, :, first:] if first else q
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        seeing, k, v, None, True, 0.0, causal, False, scale=scale
    )
    # [B, H, R] or [B, H, R, 1], by the version of torch.
    return Seen(out, lse.reshape(seeing.shape[:3]), first)


def _checked(plan: LaunchPlan) -> AttentionSchedule:
    """The schedule. ArgumentError for one that a call would not follow."""
    how = plan.part(AttentionSchedule)
    if how.library != "cudnn":
        raise ArgumentError("plan.schedule.library", repr(how.library), "'cudnn'")
    return how


def _keys(plan: LaunchPlan) -> _hopper.Keys:
    """How the keys of one rank, and its values, lie; the first half of the positions by itself."""
    shape = attention_shape(plan)
    whole = _key_bytes(plan)
    stretches = shape.batch * (shape.kv_heads if shape.layout == "heads" else 1)
    pitch = whole // stretches
    keys: _hopper.Keys = native().Keys(bytes=whole, width=pitch // 2, pitch=pitch, count=stretches)
    return keys


def _key_bytes(plan: LaunchPlan) -> int:
    shape = attention_shape(plan)
    rows = shape.sequence // plan.world_size
    return shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
