"""The backward of ring attention on one rank, by a library's backward on parts of the keys.

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slot of every peer's workspace, a flag behind
  q, out and its gradient, the log-sum-exp of all keys stay
  own k, v ──cuDNN──▶ parts of dq, dk, dv ──────────────────────────────────────────┐
  wait for a peer's flag, its k, v ──cuDNN, a third stream──▶ a part of dq ─────────┤
                                 └──▶ parts of dk, dv ──copy engines──▶ their owner │
  wait for the flags of what came home; all of them ──one kernel, float32───────────┴▶ dq, dk, dv

Blocks of the third stream go before those of the own part. So gradients travel home while these run,
and neither call's end leaves multiprocessors idle.

What a call needs of a query beside its keys is of all keys (Dao et al., "FlashAttention", 2022):
dS = e^(s - lse)·(dO vᵀ - dO·O). So parts are added up, in a fixed order: what this rank gives first,
then, to dq, the parts in the order of the forward; to dk and dv, what came from the rank after this
one, the one after that, and so on.

Errors. The library rounds what each part gives, as it does its weights; sums are float32 and rounded
once more. Equal calls give equal bits where the library's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.hopper.attention_library import (
    Gradients,
    Results,
    gradients,
    on_stream,
)
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


class AttentionBackwardExecutor:
    """The backward of ring attention, into ``grad_q``, ``grad_k``, ``grad_v``: one plan's calls in a
    world."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """``call``: any of them; what differs from call to call is not looked at."""
        plan, made = call.plan, native()
        self._context, self._plan, self._rank = context, plan, call.rank
        self._blocks = _checked(plan).sum_blocks
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
                ring.push(call, world, stream)
                for source in ring.sources:
                    ring.wait(world, source, stream)
            found = [part(source) for source in (own, *ring.sources)]
            if exchanges:
                for source, given in zip(ring.sources, found[1:], strict=True):
                    self._send(world, source, self._packed(given), stream)
        if exchanges:
            self._await_home(world, stream)
        there = world if exchanges else self._alone
        self._sum(call, found, queries.sign, there, exchanges, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """None: the library is called from Python."""
        return None

    def _given(self, call: Call) -> tuple[Queries, Results]:
        tensors, queries = call.tensors, Queries.of(call)
        out, of_out, lse = (aligned(tensors[name]) for name in ("out", "grad_out", "lse"))
        return queries, Results(queries.q, out, of_out, lse, tensors.get("grad_lse"))

    def _beside(
        self,
        call: Call,
        own: Source,
        part: Callable[[Source], Gradients],
        world: _hopper.DeviceWorld | None,
        stream: int,
    ) -> list[Gradients]:
        """What the parts give, the own one first. ``world``: the others' are waited for, and sent home;
        None: they are taken as they lie."""
        order = self._context.order
        travels = []  # whose memory is another's once the call is queued
        with ExitStack() as ends:
            kernels = order.fork_kernels(stream)
            ends.callback(order.join_kernels, stream)
            if world is not None:
                beside = order.fork(stream)
                ends.callback(order.join, stream)
                self._ring.push(call, world, beside)
            found = [part(own)]
            with on_stream(self._context.device, kernels):
                for source in self._ring.sources:
                    if world is not None:
                        self._ring.wait(world, source, kernels)
                    found.append(part(source))
                    if world is not None:
                        travels.append(self._packed(found[-1]))
                        self._send(world, source, travels[-1], order.fork(kernels))
        return found

    def _of_part(self, results: Results, scale: float, source: Source) -> Gradients:
        causal = self._ring.causal and source.rank == self._rank
        return gradients(results, source.k, source.v, source.first, causal, scale)

    def _packed(self, part: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of keys and values as they travel."""
        return self._ring.packed(part.k), self._ring.packed(part.v)

    def _send(
        self,
        world: _hopper.DeviceWorld,
        source: Source,
        given: tuple[torch.Tensor, torch.Tensor],
        stream: int,
    ) -> None:
        k, v = given
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
        found: Sequence[Gradients],
        sign: int,
        world: _hopper.DeviceWorld,
        ends: bool,
        stream: int,
    ) -> None:
        """The gradients, of what the parts give, the own one first, and of what came home."""
        made, shape, (own, *parts) = native(), attention_shape(self._plan), found
        of_q = [
            Given(part.q, source.first)
            for source, part in zip(self._ring.sources, parts, strict=True)
        ]
        of_k = [Given(came.k) for came in self._home]
        of_v = [Given(came.v) for came in self._home]
        sums = made.Sums(
            [
                _sum_of(call.tensors[name], [Given(first), *more], factor)
                for name, first, more, factor in (
                    ("grad_q", own.q, of_q, sign),
                    ("grad_k", own.k, of_k, 1),
                    ("grad_v", own.v, of_v, 1),
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
    return how
