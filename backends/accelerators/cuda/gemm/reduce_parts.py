"""GEMM+ReduceScatter and GEMM+AllReduce by a library's products on the rows of each owner.

Data flow:
  rows of the next ranks ──product──▶ partial results ──copy engines, a second stream──▶ a slot of their
                                      owner's workspace, a flag behind; those for other nodes first,
                                      by a put of the NIC to each owner
  own rows ──product──▶ partial results ─┐
  wait for the peers' flags, their slots ┴─one kernel, float32──▶ own rows of out; it ends the call
  AllReduce: own rows of out ──copy engines──▶ out of every peer where that is symmetric, else a slot
             there and then its out; a kernel ends the call, and one behind it normalises rows.
             Between nodes always to a slot, by a put of the NIC to ranks of other nodes
Sums are made in the order of the collectives (``kernels/collectives/collectives.hpp``), then a bias
is added, and they are rounded once. A rank that has sent this rank's rows is in this call, so its
symmetric ``out`` may be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mkernel.backends.accelerators.cuda.collectives.norm import normalise
from mkernel.backends.accelerators.cuda.device_world import DispatchContext, workspace_of
from mkernel.backends.accelerators.cuda.gemm.library import allocation
from mkernel.backends.accelerators.cuda.gemm.parts_exchange import (
    Copied,
    Exchanges,
    Part,
    PartsExchange,
    checked,
    rounded_up,
    share,
)
from mkernel.backends.accelerators.cuda.gemm.parts_program import RecordedCall
from mkernel.backends.accelerators.cuda.gemm.parts_tuning import rows_of
from mkernel.backends.accelerators.cuda.gemm.products import Multiply, multiply_of
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.schedule import ReducePartsSchedule
from mkernel.backends.accelerators.cuda.starters import normed_rows
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

_RESULTS = 1
"""The number of the exchange of sums, which follows that of partial results."""


class ReducePartsExecutor:
    """The executor of one plan's GEMM+ReduceScatter or GEMM+AllReduce calls in a world, into
    ``out``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan = call.plan
        self._plan, self._rank, self._context = plan, call.rank, context
        self._how = checked(plan, ReducePartsSchedule)
        self._exchange = PartsExchange(call, context)
        self._product = getattr(torch, self._how.product)
        self._everywhere = plan.op == "gemm_all_reduce"
        self._slot = _slot_bytes(plan)
        self._sum_row = plan.gemm.n * DTYPE_BYTES[self._how.product]
        self._out_row = plan.gemm.n * DTYPE_BYTES[plan.out_dtype]
        self._first, self._last = share(plan.gemm.m, plan.world_size, call.rank)
        self._results_at = _results_offset(plan)
        self._outbox_at = _area_bytes(plan)
        self._landed = None
        if self._everywhere:
            shape, dtype = (plan.gemm.m, plan.gemm.n), getattr(torch, plan.out_dtype)
            self._landed = self._exchange.lying(self._results_at, shape, dtype)

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs. ArgumentError."""
        checked(plan, ReducePartsSchedule)
        needed, outbox = _area_bytes(plan), plan.world_size * _slot_bytes(plan)
        return workspace_of(plan, native().DATA_OFFSET + needed, outbox)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        if self._exchange.loads(call):
            self.start(replace(call, view="compute_only"), stream)
        a, scale = call.tensors["a"], call.tensors.get("a_scale")
        partial = a.new_empty((self._plan.gemm.m, self._plan.gemm.n), dtype=self._product)
        multiply = multiply_of(call, self._how, self._context)
        rows = _Rows(multiply, aligned(a), scale, partial)
        if call.view == "compute_only":
            for owner in (*self._exchange.peers, self._rank):
                for part in self._exchange.parts[owner]:
                    rows.multiply(part)
            return
        out = writable(call.tensors["out"])
        outs: tuple[int, ...] = ()
        if self._everywhere and self._exchange.far:
            whole = rows_of(self._plan) * self._plan.world_size
            if whole > len(out):  # a slot of sums is sent whole, also by a rank that has fewer rows
                out = out.new_empty((whole, self._plan.gemm.n))[: len(out)]
        elif self._everywhere and out is call.tensors["out"]:
            outs = call.symmetric.get("out", ())
        bias = aligned(call.tensors["bias"]) if self._plan.bias == "launch" else None
        with self._exchange.of_call(call, stream) as running:
            self._run(running, rows, out, bias, outs)
        deliver(out, call.tensors["out"])
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return a starter of calls of 16-bit operands on one node."""
        plan, shape = self._plan, self._plan.gemm
        if plan.nodes > 1 or plan.scales is not None:
            return None
        sums, blocks = (shape.m, shape.n), self._how.sum_blocks
        partial = allocation(sums, self._product, self._context.device)
        told = RecordedCall(
            plan, self._context, self._exchange.world, strides, partial=partial, blocks=blocks
        )
        dtype = getattr(torch, plan.dtype)
        height = shape.m if self._everywhere else self._last - self._first
        a = told.tensor("a", (shape.m, shape.k), dtype, strides.get("a"))
        rows = _Rows(told.multiply, a, None, told.tensor("partial", sums, self._product))
        outs = symmetric.get("out", ()) if self._everywhere else ()
        self._run(told, rows, told.tensor("out", (height, shape.n), dtype), None, outs)
        if (norm := normed_rows(plan)) is not None:
            told.normalise(norm)
        return told.starter()

    def _run(
        self,
        running: Exchanges,
        rows: _Rows,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        outs: tuple[int, ...],
    ) -> None:
        """Queue all of a call. ``outs``: the address of every rank's ``out``, if ranks reach it."""
        self._send_partials(running, rows)
        self._sum_own(running, rows, out, bias, outs)
        if self._everywhere:
            self._take_results(running, out, bool(outs))

    def _send_partials(self, running: Exchanges, rows: _Rows) -> None:
        exchange = self._exchange
        if (far := running.far) is not None:
            for owner in exchange.far:
                for part in exchange.parts[owner]:
                    mine = rows.multiply(part)
                    far.fork()
                    far.fill(mine, self._outbox_at + owner * self._slot)
            far.send_outbox(self._outbox_at, exchange.slots(0, self._slot))
        for owner in exchange.near:
            slot, parts = self._slot_at(owner, self._rank), exchange.parts[owner]
            for part in parts:
                mine = rows.multiply(part)
                running.fork()
                at = slot + (part.first - parts[0].first) * self._sum_row
                flag = exchange.flag(self._rank, part.number)
                running.send(owner, mine, exchange.address(owner, at), flag)
        if far is not None:
            far.land([exchange.slots(0, self._slot)])

    def _sum_own(
        self,
        running: Exchanges,
        rows: _Rows,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        outs: tuple[int, ...],
    ) -> None:
        """Sum own rows of ``out``; in an all-reduce send them to every peer."""
        exchange, parts = self._exchange, self._exchange.parts[self._rank]
        for part in parts:
            rows.multiply(part)
            for source in reversed(exchange.peers):
                running.wait(source, exchange.flag(source, part.number))
            ends = part is parts[-1] and not self._everywhere
            if ends:
                running.join()
            mine = self._sum(running, rows.partial, part, out, bias, ends)
            if self._everywhere:
                running.fork()
                self._send_results(running, mine, part, outs)
        if self._everywhere and (far := running.far) is not None:
            nbytes = rows_of(self._plan) * self._out_row
            slots = exchange.slots(self._results_at, nbytes, _RESULTS)
            far.fork()
            far.send_far(out.data_ptr() + self._rank * nbytes, slots)
            far.land([slots])

    def _sum(
        self,
        running: Exchanges,
        partial: torch.Tensor,
        part: Part,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        ends: bool,
    ) -> torch.Tensor:
        start = part.first if self._everywhere else part.first - self._first
        height = part.last - part.first
        mine = out[start : start + height]
        below = (part.first - self._first) * self._sum_row
        theirs = [
            self._exchange.address_here(self._slot_at(self._rank, source) + below)
            for source in self._exchange.peers
        ]
        running.add(partial[part.first : part.last], theirs, mine, bias, ends=ends)
        return mine

    def _slot_at(self, owner: int, sender: int) -> int:
        """Return the byte offset of a sender's partial results at their owner; those of the next
        rank come first, on one node."""
        if self._exchange.far:
            return sender * self._slot
        return (sender - owner - 1) % self._plan.world_size * self._slot

    def _send_results(
        self, running: Exchanges, mine: torch.Tensor, part: Part, outs: tuple[int, ...]
    ) -> None:
        exchange, below = self._exchange, part.first * self._out_row
        for peer in exchange.near:
            to = exchange.address(peer, self._results_at)
            if outs:
                to = outs[peer]
            flag = exchange.flag(self._rank, part.number, _RESULTS)
            running.send(peer, mine, to + below, flag)

    def _take_results(self, running: Exchanges, out: torch.Tensor, symmetric: bool) -> None:
        """Take the peers' rows of ``out``, and end the call."""
        exchange, landed = self._exchange, self._landed
        assert landed is not None
        last: list[Copied] = []
        for source in (*reversed(exchange.near), *reversed(exchange.far)):
            for part in exchange.parts[source]:
                for each in last:  # while the next ones travel
                    running.copy(each)
                running.wait(source, exchange.flag(source, part.number, _RESULTS))
                if not symmetric:
                    rows = slice(part.first, part.last)
                    last = [Copied(landed[rows], out[rows])]
        running.end(last)


class _Rows:
    """A call's rows, and the memory for their products."""

    def __init__(
        self,
        multiply: Multiply,
        a: torch.Tensor,
        scale: torch.Tensor | None,
        partial: torch.Tensor,
    ) -> None:
        self._multiply, self._a, self._scale, self.partial = multiply, a, scale, partial

    def multiply(self, part: Part) -> torch.Tensor:
        """Return the partial results of a part of the rows."""
        rows, scale = slice(part.first, part.last), self._scale
        if scale is not None and len(scale) == len(self._a):
            scale = scale[rows]
        made = self.partial[rows]
        self._multiply(self._a[rows], scale, made)
        return made


def _slot_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of the partial results of one sender."""
    dtype = plan.part(ReducePartsSchedule).product
    return rounded_up(rows_of(plan) * plan.gemm.n * DTYPE_BYTES[dtype])


def _results_offset(plan: LaunchPlan) -> int:
    """Return the bytes of the slots of partial results, one for each peer; between nodes, one for each
    rank."""
    return (plan.world_size - (plan.nodes == 1)) * _slot_bytes(plan)


def _area_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of the slots of partial results and, in an all-reduce, of sums."""
    if plan.op != "gemm_all_reduce":
        return _results_offset(plan)
    sums = rows_of(plan) * plan.world_size * plan.gemm.n * DTYPE_BYTES[plan.out_dtype]
    return _results_offset(plan) + rounded_up(sums)
