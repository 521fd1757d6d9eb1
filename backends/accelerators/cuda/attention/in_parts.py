"""Ring attention on one rank, by a library's attention on parts of the keys.

Data flow:
  k, v (own) ──copy engines, a second stream──▶ slot of every peer's workspace, a flag behind
             ──between nodes a kernel, on it──▶ the same, in chunks (kernels/attention/crossing.hpp)
  q on own k, v ──cuDNN──▶ out, log-sum-exp ─┐
  wait for a peer's flag, q on its k, v ─────┤  on a third stream, the rank before this one first
  all of them ──one kernel, float32──────────┴▶ out, lse; it ends the call

When the last blocks of one library call leave multiprocessors idle, blocks of another stream's call
use them.

Causal calls are split in a zigzag: rank r has pieces r and 2·W - 1 - r of 2·W. Attention on the own
keys is plainly causal; all queries see only the first half of an earlier rank's keys; the second
half of the queries sees all of a later rank's. Keys that no query sees are neither sent nor
computed. If documents are packed into the sequence, FlashAttention replaces cuDNN
(:mod:`.attention.documents`).

Errors. A library rounds each part's result, and its weights, to the tensors' dtype; the merge is
float32 and rounds once more. So the relative error of out is at most that of three independent
roundings, 1.7 times that of one, however many ranks there are: for random tensors 2.8e-3 in
bfloat16, 3.5e-4 in float16; up to 3.2e-3 where weights are nearly even. lse is float32.

Limits. Heads have 64, 128 or, on Hopper, 256 elements, and a rank's pieces of the sequence are
multiples of 16 positions. All ranks pass tensors of the same layout, which the plan has. A rank has
room for the keys and values of all other ranks; where that is too much, :mod:`.attention.in_pieces`
takes over within a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.cuda.attention.documents import Documents, attend_packed
from mkernel.backends.accelerators.cuda.attention.library import Seen, attend, on_stream
from mkernel.backends.accelerators.cuda.attention.merge import Merge
from mkernel.backends.accelerators.cuda.attention.ring import (
    AttentionRing,
    Queries,
    Source,
    keys_workspace,
)
from mkernel.backends.accelerators.cuda.attention.tuning import (
    attention_shape,
    check_crossing,
    check_library,
)
from mkernel.backends.accelerators.cuda.device_world import (
    DispatchContext,
    call_id,
    device_world,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class AttentionExecutor:
    """The executor of one plan's ring attention calls in a world, into ``out`` and ``lse``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        self._context, self._plan = context, plan
        how = self.checked(plan)
        self._merge = Merge(context, how.merge_blocks)
        self._packed = attention_shape(plan).documents
        self._ring = AttentionRing(call, context, far=how)
        self._world = device_world(call, context)
        self._alone = made.DeviceWorld([call.workspace], 0, context.control, call.timeout_s, 0)
        self._loads = plan.nodes > 1

    @staticmethod
    def checked(plan: LaunchPlan) -> AttentionSchedule:
        """Return the schedule. ArgumentError for one that a call would not follow."""
        how = plan.part(AttentionSchedule)
        check_library(plan, how.library)
        check_crossing(plan, how)
        return how

    @classmethod
    def workspace(cls, plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that ring attention needs. Unsupported."""
        cls.checked(plan)
        return keys_workspace(plan)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        if self._loads and not torch.cuda.is_current_stream_capturing():
            # The library's kernels are loaded by their first launch, which the driver may delay
            # until running kernels end, including one of ours that waits for a NIC. The copies of
            # an emulated NIC use the driver, and would wait as well. So everything is launched once
            # without waits.
            self._loads = False
            self._queue(replace(call, view="compute_only"), stream)
        self._queue(call, stream)

    def _queue(self, call: Call, stream: int) -> None:
        sources = self._ring.sources
        world = self._world.of_call(call_id(call), call.timeout_s)
        exchanges = call.view != "compute_only" and bool(sources)
        k, v = (aligned(call.tensors[name]) for name in "kv")
        own, attended = Source(call.rank, k, v, 0), self._attended(call)
        if sources and call.view != "sequential":
            parts = self._beside(call, own, attended, world if exchanges else None, stream)
        else:
            if exchanges:
                self._ring.exchange(call, world, stream)
            parts = [attended(source) for source in (own, *sources)]
        there, out = world if exchanges else self._alone, call.tensors["out"]
        written = writable(out)
        self._merge.finish(parts, written, call.tensors["lse"], there, stream, ends=exchanges)
        deliver(written, out)

    def _beside(
        self,
        call: Call,
        own: Source,
        attended: Callable[[Source], Seen],
        world: _kernels.DeviceWorld | None,
        stream: int,
    ) -> list[Seen]:
        """Return what the queries found in each part, the own one first; the others run on the
        third stream. ``world``: the world whose flags are waited for there; None: parts are read
        without waiting."""
        with self._ring.beside(call, world, stream) as kernels:
            parts = [attended(own)]
            with on_stream(self._context.device, kernels):
                parts += [attended(source) for source in self._ring.arriving(world, kernels)]
        return parts

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return None: the library is called from Python."""
        return None

    def _attended(self, call: Call) -> Callable[[Source], Seen]:
        """Return a function that attends the call's queries to a source, on torch's current stream."""
        q, scale, _ = Queries.of(call)
        documents = Documents(call) if self._packed else None

        def found(source: Source) -> Seen:
            causal = self._ring.causal and source.rank == call.rank
            if documents is not None:
                return attend_packed(q, source, documents, causal, scale)
            return self._attend(call, source, q, causal, scale)

        return found

    def _attend(
        self, call: Call, source: Source, q: torch.Tensor, causal: bool, scale: float
    ) -> Seen:
        """Return what queries find in a source into which no documents are packed."""
        return attend(q, source.k, source.v, source.first, causal, scale)
