"""The backward of ring attention on one rank, by a library's backward on parts of the keys.

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slot of every peer's workspace, a flag behind
  q, out and its gradient, the log-sum-exp of all keys stay
  own k, v ──cuDNN──▶ parts of dq, dk, dv ──────────────────────────────────────────┐
  wait for a peer's flag, its k, v, a lot of heads after another                    │
             ──cuDNN, a third stream──▶ a part of dq ───────────────────────────────┤
                                    └──▶ parts of dk, dv ──copy engines──▶ owner    │
  lot by lot: wait for the flags of what came home; one kernel, float32 ────────────┴▶ dq, dk, dv

When the last blocks of one library call leave multiprocessors idle, blocks of the other stream's
call use them. The last lot travels to its owner while others are added up.

Apart from its part of the keys, a call needs values of a query over all keys (Dao et al.,
"FlashAttention", 2022): dS = e^(s - lse)·(dO vᵀ - dO·O). So parts are added in a fixed order: this
rank's contribution first, then, for dq, the parts in the order of the forward; for dk and dv, the
contributions of the rank after this one, the one after that, and so on.

Errors. The library rounds each part's contribution, and its weights; sums are float32 and rounded
once more. Equal calls give equal bits if the library's do.

It runs within a node. A gradient of the log-sum-exp costs a second call of the library a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.attention.library import (
    Gradients,
    Results,
    gradients,
    on_stream,
)
from mkernel.backends.accelerators.cuda.attention.ring import (
    AttentionRing,
    Queries,
    Source,
    ring_keys,
)
from mkernel.backends.accelerators.cuda.attention.tuning import attention_shape, check_library
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import AttentionBackwardSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError
from mkernel.plan.model import AttentionShape, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class Given(NamedTuple):
    """A part's contribution to a gradient, for its rows from ``first`` on."""

    of: torch.Tensor
    first: int = 0


class Lot(NamedTuple):
    """Heads of keys whose gradients travel together, and the heads of queries that use them."""

    keys: slice
    queries: slice


class Found(NamedTuple):
    """The contributions of the own keys, and of each peer's in turn, lot of heads after lot."""

    own: Gradients
    parts: list[list[Gradients]]


class AttentionBackwardExecutor:
    """The executor of one plan's ring attention backward calls in a world, into ``grad_q``,
    ``grad_k``, ``grad_v``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        self._context, self._plan, self._rank = context, plan, call.rank
        how = _checked(plan)
        self._blocks = how.sum_blocks
        self._lots = lots(attention_shape(plan), how.lots)
        self._ring = AttentionRing(call, context)
        self._world = device_world(call, context)
        self._alone = made.DeviceWorld([call.workspace], 0, context.control, call.timeout_s, 0)
        self._home = [self._came_home(lot) for lot in self._lots]

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that the backward needs. Unsupported."""
        world = one_node(plan)
        _checked(plan)
        keys = ring_keys(plan)
        return Workspace((keys.workspace_bytes(world, gradients=True) if world > 1 else NO_DATA,))

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        ring = self._ring
        world = self._world.of_call(call_id(call), call.timeout_s)
        exchanges = call.view != "compute_only" and bool(ring.sources)
        queries, results = self._given(call)
        k, v = (aligned(call.tensors[name]) for name in "kv")
        own = Source(self._rank, k, v, 0)
        part = partial(self._of_part, results, queries.scale)
        if ring.sources and call.view != "sequential":
            found = self._beside(call, own, part, world if exchanges else None, stream)
        else:
            if exchanges:
                ring.exchange(call, world, stream)
            parts = [[part(source, lot) for lot in self._lots] for source in ring.sources]
            found = Found(part(own), parts)
            if exchanges:
                for source, given in zip(ring.sources, parts, strict=True):
                    for number, one in enumerate(given):
                        self._send(world, source, number, self._packed(one), stream)
        there = world if exchanges else self._alone
        for number in range(len(self._lots)):
            if exchanges:
                self._await_home(world, number, stream)
            ends = exchanges and number + 1 == len(self._lots)
            self._sum(call, number, found, queries.sign, there, ends, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return None: the library is called from Python."""
        return None

    def _given(self, call: Call) -> tuple[Queries, Results]:
        tensors, queries = call.tensors, Queries.of(call)
        out, of_out, lse = (aligned(tensors[name]) for name in ("out", "grad_out", "lse"))
        return queries, Results(queries.q, out, of_out, lse, tensors.get("grad_lse"))

    def _beside(
        self,
        call: Call,
        own: Source,
        part: Callable[..., Gradients],
        world: _kernels.DeviceWorld | None,
        stream: int,
    ) -> Found:
        """Return the parts' contributions. ``world``: the others' keys are waited for, and their
        gradients sent to the owners; None: parts are read without waiting, and nothing is sent."""
        order = self._context.order
        travels = []  # kept until the call is queued; then their memory may be reused
        with self._ring.beside(call, world, stream) as kernels:
            found = Found(part(own), [])
            with on_stream(self._context.device, kernels):
                for source in self._ring.arriving(world, kernels):
                    found.parts.append([])
                    for number, lot in enumerate(self._lots):
                        found.parts[-1].append(part(source, lot))
                        if world is not None:
                            travels.append(self._packed(found.parts[-1][-1]))
                            self._send(world, source, number, travels[-1], order.fork(kernels))
        return found

    def _of_part(
        self, results: Results, scale: float, source: Source, lot: Lot | None = None
    ) -> Gradients:
        k, v = source.k, source.v
        causal = self._ring.causal and source.rank == self._rank
        if lot is not None:
            k, v, results = k[:, lot.keys], v[:, lot.keys], results.heads(lot.queries)
        return gradients(results, k, v, source.first, causal, scale)

    def _packed(self, part: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of keys and values packed as they travel."""
        return self._ring.packed(part.k), self._ring.packed(part.v)

    def _send(
        self,
        world: _kernels.DeviceWorld,
        source: Source,
        number: int,
        given: tuple[torch.Tensor, torch.Tensor],
        stream: int,
    ) -> None:
        """Send a lot of heads to the owner of the keys."""
        k, v = given
        native().push_gradients(
            self._context.device,
            world,
            source.rank,
            k.data_ptr(),
            v.data_ptr(),
            k.nbytes,
            self._ring.keys,
            self._place(self._lots[number]),
            self._flag(number, self._rank),
            stream,
        )

    def _place(self, lot: Lot) -> int:
        """Return the byte offset of a lot's gradients from those of the first head."""
        of_head = self._ring.keys.bytes // attention_shape(self._plan).kv_heads
        return int(of_head * lot.keys.start)

    def _flag(self, number: int, source: int) -> int:
        made = native()
        return int(made.GRADIENT_FLAGS + number * made.MOST_RANKS + source)

    def _came_home(self, lot: Lot) -> list[Source]:
        """Return the contributions to the gradients of the own keys and values: those of the rank
        after this one first, then of the one after that, and so on."""
        world, ring = self._plan.world_size, self._ring
        found = []
        for step in range(1, world):
            peer = (self._rank + step) % world
            at = ring.keys.gradient_offset(world, self._rank, peer) + self._place(lot)
            rows, heads = ring.rows_seen(peer, self._rank), lot.keys.stop - lot.keys.start
            k, v = (ring.lying(at + which, rows, heads) for which in (0, ring.keys.bytes))
            found.append(Source(peer, k, v, 0))
        return found

    def _await_home(self, world: _kernels.DeviceWorld, number: int, stream: int) -> None:
        made, device = native(), self._context.device
        for came in self._home[number]:
            made.await_part(device, world, came.rank, self._flag(number, came.rank), stream)

    def _sum(
        self,
        call: Call,
        number: int,
        found: Found,
        sign: int,
        world: _kernels.DeviceWorld,
        ends: bool,
        stream: int,
    ) -> None:
        """Compute the gradients of a lot's keys, and of the queries that use them."""
        made, shape, lot = native(), attention_shape(self._plan), self._lots[number]
        own = found.own
        of_q = [
            Given(parts[number].q, source.first)
            for source, parts in zip(self._ring.sources, found.parts, strict=True)
        ]
        of_k = [Given(came.k) for came in self._home[number]]
        of_v = [Given(came.v) for came in self._home[number]]
        sums = made.Sums(
            [
                _sum_of(call.tensors[name][:, heads], [Given(first[:, heads]), *more], factor)
                for name, heads, first, more, factor in (
                    ("grad_q", lot.queries, own.q, of_q, sign),
                    ("grad_k", lot.keys, own.k, of_k, 1),
                    ("grad_v", lot.keys, own.v, of_v, 1),
                )
            ],
            shape.batch,
            shape.head_dim,
            self._plan.dtype == "float16",
        )
        made.sum_gradients(self._context.device, world, sums, self._blocks, ends, stream)


def lots(shape: AttentionShape, count: int) -> list[Lot]:
    """Cut the heads of keys into ``count`` lots of nearly equal size, or as many as there are
    heads."""
    heads, groups = shape.kv_heads, shape.heads // shape.kv_heads
    cuts = [heads * each // count for each in range(count + 1)]
    return [
        Lot(slice(first, end), slice(first * groups, end * groups))
        for first, end in pairwise(cuts)
        if first < end
    ]


def _sum_of(out: torch.Tensor, given: Sequence[Given], factor: int) -> _kernels.Sum:
    made = native()
    found: _kernels.Sum = made.Sum(
        [
            made.Given(each.of.data_ptr(), each.of.stride()[:3], each.first, each.of.shape[2])
            for each in given
        ],
        out.data_ptr(),
        out.stride()[:3],
        tuple(out.shape[1:3]),
        float(factor),
    )
    return found


def _checked(plan: LaunchPlan) -> AttentionBackwardSchedule:
    """Return the schedule. ArgumentError for one that a call would not follow."""
    how = plan.part(AttentionBackwardSchedule)
    if attention_shape(plan).documents:
        raise ArgumentError("plan.shape.documents", True, "False: it has no gradients of these")
    check_library(plan, how.library)
    most = attention_shape(plan).kv_heads
    if how.lots > most:
        raise ArgumentError("plan.schedule.lots", how.lots, f"at most {most}, the heads of keys")
    return how
