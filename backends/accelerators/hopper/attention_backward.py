"""The backward of ring attention on one rank, by a library's backward on parts of the keys.

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slot of every peer's workspace, a flag behind
  q, out and its gradient, the log-sum-exp of all keys stay
  own k, v, their first heads ──cuDNN──▶ parts of dq, dk, dv ───────────────────────┐
  wait for a peer's flag, its k, v ──cuDNN──▶ a part of dq ─────────────────────────┤
                                 └──▶ parts of dk, dv ──copy engines──▶ their owner │
  own k, v, the other heads ──cuDNN──▶ parts of dq, dk, dv ─────────────────────────┤
  wait for the flags of what came home; all of them ──one kernel, float32───────────┴▶ dq, dk, dv

What a call needs of a query beside its keys is of all keys (Dao et al., "FlashAttention", 2022):
dS = e^(s - lse)·(dO vᵀ - dO·O). So parts are added up, in a fixed order: what this rank gives first,
then, to dq, the parts in the order of the forward; to dk and dv, what came from the rank after this
one, the one after that, and so on.

Errors. The library rounds what each part gives, as it does its weights; sums are float32 and rounded
once more. Equal calls give equal bits where the library's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.hopper.attention_library import Gradients, Results, gradients
from mkernel.backends.accelerators.hopper.attention_ring import (
    AttentionRing,
    Queries,
    Source,
    ring_keys,
)
from mkernel.backends.accelerators.hopper.attention_tuning import attention_shape, check_library
from mkernel.backends.accelerators.hopper.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.accelerators.hopper.operands import aligned
from mkernel.backends.accelerators.hopper.schedule import AttentionBackwardSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class Given(NamedTuple):
    """What a part gives to a gradient: to its rows from ``first`` on."""

    of: torch.Tensor
    first: int = 0


class Found(NamedTuple):
    """What the own keys give, some heads of them at a time, and each peer's in turn."""

    own: list[tuple[slice, Gradients]]
    parts: list[Gradients]


class AttentionBackwardExecutor:
    """The backward of ring attention, into ``grad_q``, ``grad_k``, ``grad_v``: one plan's calls in a
    world."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """``call``: any of them; what differs from call to call is not looked at."""
        plan, made = call.plan, native()
        self._context, self._plan, self._rank = context, plan, call.rank
        how, shape = _checked(plan), attention_shape(plan)
        self._blocks = how.sum_blocks
        self._groups = shape.heads // shape.kv_heads
        self._ahead = slice(0, how.heads_ahead)
        self._behind = slice(how.heads_ahead, shape.kv_heads)
        self._ring = AttentionRing(call, context)
        self._world = device_world(call, context)
        self._alone = made.DeviceWorld([call.workspace], 0, context.control, call.timeout_s, 0)
        self._home = [self._came_home(step) for step in range(1, plan.world_size)]

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """What the backward needs of symmetric memory. Unsupported."""
        world = one_node(plan)
        _checked(plan)
        keys = ring_keys(plan)
        return Workspace((keys.workspace_bytes(world, gradients=True) if world > 1 else NO_DATA,))

    def start(self, call: Call, stream: int) -> None:
        """Queue one; ``stream`` is torch's current one."""
        context, ring = self._context, self._ring
        world = self._world.of_call(call_id(call), call.timeout_s)
        exchanges = call.view != "compute_only" and bool(ring.sources)
        beside = exchanges and call.view != "sequential"
        queries, results = self._given(call)
        try:
            if exchanges:
                ring.push(call, world, context.order.fork(stream) if beside else stream)
            if exchanges and not beside:
                for source in ring.sources:
                    ring.wait(world, source, stream)
            found = self._found(call, results, queries.scale, world if beside else None, stream)
            if exchanges and not beside:
                for source, part in zip(ring.sources, found.parts, strict=True):
                    self._send(world, source, part, stream)
        finally:
            if beside:
                context.order.join(stream)
        if exchanges:
            self._await_home(world, stream)
        there = world if exchanges else self._alone
        for number, (heads, own) in enumerate(found.own, 1):
            ends = exchanges and number == len(found.own)
            self._sum(call, heads, own, found.parts, queries.sign, there, ends, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """None: the library is called from Python."""
        return None

    def _given(self, call: Call) -> tuple[Queries, Results]:
        tensors, queries = call.tensors, Queries.of(call)
        out, of_out, lse = (aligned(tensors[name]) for name in ("out", "grad_out", "lse"))
        return queries, Results(queries.q, out, of_out, lse, tensors.get("grad_lse"))

    def _found(
        self,
        call: Call,
        results: Results,
        scale: float,
        world: _hopper.DeviceWorld | None,
        stream: int,
    ) -> Found:
        """What the parts give. ``world``: parts are waited for on ``stream``, and gradients sent home
        on the second stream; None: parts are taken as they lie."""
        order = self._context.order
        k, v = (aligned(call.tensors[name]) for name in "kv")
        own = Source(self._rank, k, v, 0)
        found = Found([(self._ahead, self._of_part(own, results, scale, self._ahead))], [])
        for source in self._ring.sources:
            if world is not None:
                self._ring.wait(world, source, stream)
            found.parts.append(self._of_part(source, results, scale))
            if world is not None:
                self._send(world, source, found.parts[-1], order.fork(stream))
        if self._behind.start < self._behind.stop:
            found.own.append((self._behind, self._of_part(own, results, scale, self._behind)))
        return found

    def _of_queries(self, heads: slice) -> slice:
        """The heads of queries that have these of keys."""
        return slice(heads.start * self._groups, heads.stop * self._groups)

    def _of_part(
        self, source: Source, results: Results, scale: float, heads: slice | None = None
    ) -> Gradients:
        k, v = source.k, source.v
        causal = self._ring.causal and source.rank == self._rank
        if heads is not None:
            k, v, results = k[:, heads], v[:, heads], results.heads(self._of_queries(heads))
        return gradients(results, k, v, source.first, causal, scale)

    def _send(
        self, world: _hopper.DeviceWorld, source: Source, part: Gradients, stream: int
    ) -> None:
        k, v = (self._ring.packed(each) for each in (part.k, part.v))
        native().push_gradients(
            self._context.device,
            world,
            source.rank,
            k.data_ptr(),
            v.data_ptr(),
            k.nbytes,
            self._ring.keys,
            stream,
        )

    def _came_home(self, step: int) -> Source:
        """What the rank ``step`` after this one gives to the gradients of the own keys and values."""
        world = self._plan.world_size
        peer = (self._rank + step) % world
        at = self._ring.keys.gradient_offset(world, self._rank, peer)
        rows = self._ring.rows_seen(peer, self._rank)
        k, v = (self._ring.lying(at + which, rows) for which in (0, self._ring.keys.bytes))
        return Source(peer, k, v, 0)

    def _await_home(self, world: _hopper.DeviceWorld, stream: int) -> None:
        made = native()
        for came in self._home:
            flag = made.GRADIENT_FLAGS + came.rank
            made.await_part(self._context.device, world, came.rank, flag, stream)

    def _sum(
        self,
        call: Call,
        heads: slice,
        own: Gradients,
        parts: Sequence[Gradients],
        sign: int,
        world: _hopper.DeviceWorld,
        ends: bool,
        stream: int,
    ) -> None:
        """The gradients of these heads of keys, and of the queries that have them."""
        queries, made, shape = self._of_queries(heads), native(), attention_shape(self._plan)
        of_q = [
            Given(part.q[:, queries], source.first)
            for source, part in zip(self._ring.sources, parts, strict=True)
        ]
        of_k = [Given(came.k[:, heads]) for came in self._home]
        of_v = [Given(came.v[:, heads]) for came in self._home]
        sums = made.Sums(
            [
                _sum_of(call.tensors[name][:, which], [Given(first), *more], factor)
                for name, which, first, more, factor in (
                    ("grad_q", queries, own.q, of_q, sign),
                    ("grad_k", heads, own.k, of_k, 1),
                    ("grad_v", heads, own.v, of_v, 1),
                )
            ],
            shape.batch,
            shape.head_dim,
            self._plan.dtype == "float16",
        )
        made.sum_gradients(self._context.device, world, sums, self._blocks, ends, stream)


def _sum_of(out: torch.Tensor, given: Sequence[Given], factor: int) -> _hopper.Sum:
    made = native()
    found: _hopper.Sum = made.Sum(
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
    """The schedule. ArgumentError for one that a call would not follow."""
    how = plan.part(AttentionBackwardSchedule)
    if attention_shape(plan).documents:
        raise ArgumentError("plan.shape.documents", True, "False: it has no gradients of these")
    check_library(plan, how.library)
    if how.heads_ahead > attention_shape(plan).kv_heads:
        raise ArgumentError(
            "plan.schedule.heads_ahead",
            how.heads_ahead,
            f"at most {attention_shape(plan).kv_heads}, the heads of keys",
        )
    return how
