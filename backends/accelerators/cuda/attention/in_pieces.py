"""Ring attention of sequences so long that their keys, or the results of all queries on a part, do
not fit in memory at once.

Data flow, for some rows of queries after others (:mod:`.attention.pieces`):
  pieces of k, v (own) ──copy engines, a second stream──▶ slots of peers, a flag behind each
  q on own k, v, those before its rows and those of its rows ──cuDNN──▶ out, log-sum-exp ─┐
  wait for a piece's flag, q on it, a flag back to its owner: the slot is free ───────────┤
  each with what was found before ──a kernel, float32──▶ what was found so far ... ───────┴▶ out, lse

The last of the kernels ends the call. The library rounds each piece's result, which is weighted in
float32; only the last of the sums is rounded. So the error is that of :mod:`.attention.in_parts`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.attention.library import Seen, attend
from mkernel.backends.accelerators.cuda.attention.merge import Found, Merge
from mkernel.backends.accelerators.cuda.attention.pieces import Cut, Pieces, Step, flags
from mkernel.backends.accelerators.cuda.attention.ring import Queries, lying, stretches
from mkernel.backends.accelerators.cuda.attention.tuning import attention_shape, check_library
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.schedule import AttentionInPiecesSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class Given(NamedTuple):
    """A call's tensors, at addresses that kernels can use, and the way it is queued. ``exchanges``:
    pieces are sent and waited for; otherwise they are read without waiting."""

    queries: Queries
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    world: _kernels.DeviceWorld
    exchanges: bool
    stream: int
    beside: int


class AttentionInPiecesExecutor:
    """The executor of one plan's ring attention calls in a world, into ``out`` and ``lse``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan = call.plan
        self._context, self._plan, self._rank = context, plan, call.rank
        self._workspace = call.workspace
        self._pieces, self._causal = pieces_of(plan), attention_shape(plan).causal
        self._steps = list(self._pieces.steps(call.rank))
        self._taken = Counter(step.source for step in self._steps)
        self._sent = self._pieces.sent(call.rank)
        self._pending: deque[tuple[int, Step]] = deque()
        self._merge = Merge(context, _checked(plan).merge_blocks)
        self._world = device_world(call, context)
        self._alone = native().DeviceWorld([call.workspace], 0, context.control, call.timeout_s, 0)

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that ring attention needs. Unsupported."""
        world = one_node(plan)
        _checked(plan)
        return Workspace((native().DATA_OFFSET + pieces_of(plan).area if world > 1 else NO_DATA,))

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        order = self._context.order
        exchanges = call.view != "compute_only" and bool(self._steps)
        beside = exchanges and call.view != "sequential"
        world = self._world.of_call(call_id(call), call.timeout_s)
        k, v = (aligned(call.tensors[name]) for name in "kv")
        out = writable(call.tensors["out"])
        given = Given(
            Queries.of(call), k, v, out, call.tensors["lse"], world if exchanges else self._alone,
            exchanges, stream, stream,
        )  # fmt: skip
        found = Found.of_rows(max(each.rows for each in self._pieces.cuts), out)
        self._pending = deque(self._sent if exchanges else ())
        *most, last = range(len(self._pieces.cuts))
        try:
            if beside:
                given = given._replace(beside=order.fork(stream))
            self._send(given, self._pieces.slots - 1)
            for number in most:
                self._attend(given, number, found)
                self._finish(given, number, found, ends=False)
            self._attend(given, last, found)
            self._send(given, len(self._sent) * self._plan.world_size)
        finally:
            if beside:
                order.join(stream)
        self._finish(given, last, found, ends=exchanges)
        deliver(out, call.tensors["out"])

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return None: the library is called from Python."""
        return None

    def _attend(self, given: Given, number: int, found: Found) -> None:
        """Queue everything that the queries of a cut need except the last merge, whose inputs
        ``found`` then has."""
        queries = self._pieces.cuts[number]
        q, out = (each[:, :, queries.all] for each in (given.queries.q, given.out))
        found.clear()
        found.parts += self._own(given, q, queries)
        for place, step in enumerate(each for each in self._steps if each.queries == number):
            if place:
                self._merge.keep(found, out, given.world, given.stream)
            found.parts.append(self._of_peer(given, q, step))

    def _finish(self, given: Given, number: int, found: Found, *, ends: bool) -> None:
        rows = self._pieces.cuts[number].all
        out, lse = given.out[:, :, rows], given.lse[:, :, rows]
        self._merge.finish(
            found.parts, out, lse, given.world, given.stream, ends=ends, before=found
        )

    def _own(self, given: Given, q: torch.Tensor, queries: Cut) -> list[Seen]:
        """Attend to the own keys: if causal, those of the queries' own rows, and those before them."""
        k, v, scale = given.k, given.v, given.queries.scale
        if not self._causal:
            return [attend(q, k, v, 0, False, scale)]
        at, before = queries.all, slice(0, queries.first)
        parts = [attend(q, k[:, :, at], v[:, :, at], 0, True, scale)]
        if queries.first:
            parts.append(attend(q, k[:, :, before], v[:, :, before], 0, False, scale))
        return parts

    def _of_peer(self, given: Given, q: torch.Tensor, step: Step) -> Seen:
        made, device, pieces = native(), self._context.device, self._pieces
        if given.exchanges:
            self._send(given, step.turn + pieces.slots - 1)
            flag = pieces.arrived(step)
            made.await_part(device, given.world, step.source, flag, given.stream)
        place, rows = pieces.place(self._rank, step), step.keys.rows
        k, v = (
            lying(self._plan, self._workspace, place + behind, rows)
            for behind in (0, pieces.bytes(rows))
        )
        seen = attend(q, k, v, 0, False, given.queries.scale)
        again = step.number + pieces.slots < self._taken[step.source]
        if given.exchanges and again:
            flag = pieces.read(self._rank, step.number)
            made.tell(device, given.world, step.source, flag, given.stream)
        return seen

    def _send(self, given: Given, turn: int) -> None:
        """Queue the sends of pieces that peers read up to that turn, as far as they are not queued
        yet."""
        made, device, pieces = native(), self._context.device, self._pieces
        while self._pending and self._pending[0][1].turn <= turn:
            reader, step = self._pending.popleft()
            if step.number >= pieces.slots:
                flag = pieces.read(reader, step.number - pieces.slots)
                made.await_part(device, given.world, reader, flag, given.beside)
            made.push_piece(
                device,
                given.world,
                reader,
                given.k.data_ptr(),
                given.v.data_ptr(),
                stretches(self._plan, step.keys.first, step.keys.rows),
                pieces.place(reader, step),
                pieces.arrived(step),
                given.beside,
            )


def pieces_of(plan: LaunchPlan) -> Pieces:
    """Return the pieces of a plan's calls."""
    how = plan.part(AttentionInPiecesSchedule)
    return Pieces(attention_shape(plan), plan.world_size, how.piece_rows, how.slots)


def _checked(plan: LaunchPlan) -> AttentionInPiecesSchedule:
    """Return the schedule. ArgumentError for one that a call would not follow."""
    how, shape = plan.part(AttentionInPiecesSchedule), attention_shape(plan)
    if shape.documents:
        raise ArgumentError("plan.shape.documents", True, "False: pieces have none that are packed")
    check_library(plan, how.library)
    wanted, most = flags(shape, plan.world_size, how.piece_rows), native().MAX_FLAGS
    if wanted > most:
        raise ArgumentError(
            "plan.schedule.piece_rows",
            how.piece_rows,
            f"more: that takes {wanted} flags of {most}",
        )
    return how
