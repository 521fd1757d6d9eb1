"""Ring attention on one rank by one kernel (kernels/attention/ring_attention.hpp).

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slots of the peers, chunk by chunk, a flag behind each
             ──between nodes a kernel, on it──▶ the same, in the order of heads
  q, own k, v, and those in the slots as flags come ──one kernel──▶ out, lse; it ends the call

Each query sees the own keys first, then those of the rank of the node before this one, of the one
before that, and so on, and then those of other nodes in the same order (:mod:`.attention.ring`);
nothing is rounded between them. Heads have a width of 64 or 128, and a rank's pieces of the sequence
multiples of 128 positions.

For invariant results each query sees all keys from the last position to the first, whoever has them.
So its blocks of keys, and the order in which they are merged, are those of a world of one rank, which
has no peers and any number of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.cuda.attention.ring import (
    AttentionRing,
    Queries,
    keys_workspace,
)
from mkernel.backends.accelerators.cuda.attention.tuning import check_crossing
from mkernel.backends.accelerators.cuda.device_world import (
    DispatchContext,
    call_id,
    device_world,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.hopper.attention.core import core, counters_of
from mkernel.backends.accelerators.hopper.attention.tuning import kernel_takes
from mkernel.backends.accelerators.hopper.schedule import AttentionKernelSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class AttentionKernelExecutor:
    """The executor of one plan's ring attention calls in a world, into ``out`` and ``lse``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        how = _checked(call.plan)
        self._context, self._how = context, how
        self._by_head = self._loads = call.plan.nodes > 1
        self._ordered = call.plan.invariant is not None
        self._ring = AttentionRing(call, context, how.chunk_rows, far=how)
        self._world = device_world(call, context)
        # Copies within a device need room on its multiprocessors, and the kernel leaves none.
        self._copies_first = native().shares_device(context.device, self._world)

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that ring attention needs. Unsupported."""
        _checked(plan)
        return keys_workspace(plan)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        world = self._world.of_call(call_id(call), call.timeout_s)
        if self._loads and not torch.cuda.is_current_stream_capturing():
            # Its first launch loads the kernel, which may wait for running kernels, among them the
            # one that waits for other nodes' keys.
            self._loads = False
            self._attend(call, world, False, stream)
        exchanges = call.view != "compute_only" and bool(self._ring.sources)
        beside = call.view == "pipelined" and exchanges and not self._copies_first
        if exchanges and not beside:
            self._ring.push(world, *self._ring.given(call), stream)
        with self._ring.sending(call, world, stream) if beside else nullcontext():
            self._attend(call, world, exchanges, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return None: calls are started from Python."""
        return None

    def _attend(
        self, call: Call, world: _kernels.DeviceWorld, exchanges: bool, stream: int
    ) -> None:
        """Queue the kernel."""
        made, sources = native(), self._ring.sources
        q, scale, _ = Queries.of(call)
        k, v = (aligned(call.tensors[name]) for name in "kv")
        out = call.tensors["out"]
        written, counters = writable(out), counters_of(call.workspace)
        # The other slots follow in their order (host/attention/transfers.hpp).
        slots = sources[0].k if sources else k
        ring = made.Ring(
            core(q, k, v, written, call.tensors["lse"], self._ring.causal, scale, counters),
            [made.RingPart(each.rank, each.first, each.k.shape[2]) for each in sources],
            (slots.data_ptr(), slots.stride()[:3]),
            self._ring.keys.bytes // slots.element_size(),
            self._how.chunk_rows,
            self._how.blocks,
            exchanges,
            self._by_head,
            self._ordered,
        )
        made.attend_ring(self._context.device, world, ring, stream)
        deliver(written, out)


def _checked(plan: LaunchPlan) -> AttentionKernelSchedule:
    """Return the schedule. ArgumentError for one that a call would not follow."""
    how = plan.part(AttentionKernelSchedule)
    if not kernel_takes(plan):
        raise ArgumentError("plan.schedule.kind", repr(how.kind), "'hopper.ring_attention'")
    check_crossing(plan, how)
    if plan.nodes > 1 and how.chunk_rows != how.far_rows:
        legal = f"{how.far_rows}, as far_rows is: those of the node travel as others do"
        raise ArgumentError("plan.schedule.chunk_rows", how.chunk_rows, legal)
    return how
