"""AllGather+GEMM by a library's products on each rank's rows as they arrive.

Data flow:
  a (own), its scales ──copy engines, a second stream──▶ their place in every peer's workspace
             ──a put of the NIC, on it too────▶ the same on ranks of other nodes
  own rows ──product──▶ their rows of out ─────────────────────┐
  wait for a peer's flag, its rows ──product──▶ its rows of out┤
  all read: a kernel ends the call ────────────────────────────┘
A bias is added in float32, before ``out`` is rounded: inside products of 16-bit operands, or to
products in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext, workspace_of
from mkernel.backends.accelerators.cuda.gemm.library import scales_of_a_rank
from mkernel.backends.accelerators.cuda.gemm.parts_exchange import (
    Copied,
    Exchanges,
    Part,
    PartsExchange,
    checked,
    rounded_up,
)
from mkernel.backends.accelerators.cuda.gemm.parts_program import RecordedCall
from mkernel.backends.accelerators.cuda.gemm.products import Multiply, multiply_of
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import GatherPartsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class GatherPartsExecutor:
    """The executor of one plan's AllGather+GEMM calls in a world, into ``out`` and, if they are
    given, ``gathered`` and ``gathered_scale``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan = call.plan
        self._plan, self._rank = plan, call.rank
        self._exchange = PartsExchange(call, context)
        self._how, self._context = checked(plan, GatherPartsSchedule), context
        self._product = getattr(torch, self._how.product)
        self._row_bytes = plan.gemm.k * DTYPE_BYTES[plan.dtype]
        self._scales_at = rounded_up(plan.gemm.m * self._row_bytes)
        dtype = getattr(torch, plan.dtype)
        self._rows = self._exchange.lying(0, (plan.gemm.m, plan.gemm.k), dtype)
        height, width = scales_of_a_rank(plan)
        self._scales = None
        if height:
            places = (plan.world_size * height, width)
            self._scales = self._exchange.lying(self._scales_at, places, torch.float32)
        self._height = height

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs. ArgumentError."""
        checked(plan, GatherPartsSchedule)
        rows = rounded_up(plan.gemm.m * plan.gemm.k * DTYPE_BYTES[plan.dtype])
        height, width = scales_of_a_rank(plan)
        scales = plan.world_size * height * width * DTYPE_BYTES["float32"]
        return workspace_of(plan, native().DATA_OFFSET + rows + rounded_up(scales))

    def start(self, call: Call, stream: int) -> None:
        """Queue one call; ``stream`` is torch's current one."""
        if self._exchange.loads(call):
            self.start(replace(call, view="compute_only"), stream)
        a, scale, out = aligned(call.tensors["a"]), call.tensors.get("a_scale"), call.tensors["out"]
        into, bias = out, call.tensors["bias"] if self._plan.bias == "launch" else None
        if self._product != out.dtype:
            into, bias = torch.empty(out.shape, dtype=self._product, device=out.device), None
        multiply = multiply_of(call, self._how, self._context, bias)
        if call.view == "compute_only":
            self._multiply_own(multiply, a, scale, into)
            for source, (first, last, _) in self._theirs():
                self._multiply_theirs(multiply, source, first, last, into)
            self._deliver(call, into)
            return
        with self._exchange.of_call(call, stream) as running:
            self._run(running, multiply, a, scale, into, waits_first=call.view == "sequential")
            self._deliver(call, into)
            rows = self._kept(call.tensors.get("gathered"), a, self._rows)
            scales = self._kept(call.tensors.get("gathered_scale"), scale, self._scales)
            running.end([*rows, *scales])

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return a starter of calls on one node, of 16-bit operands whose products fill ``out``."""
        plan, shape, dtype = self._plan, self._plan.gemm, self._product
        if plan.nodes > 1 or plan.scales is not None or self._how.product != plan.out_dtype:
            return None
        told = RecordedCall(plan, self._context, self._exchange.world, strides)
        a = told.tensor("a", (shape.m // plan.world_size, shape.k), dtype)
        self._run(told, told.multiply, a, None, told.tensor("out", (shape.m, shape.n), dtype))
        whole = (
            told.tensor("gathered", (shape.m, shape.k), dtype) if "gathered" in strides else None
        )
        told.end(self._kept(whole, a, self._rows))
        return told.starter()

    def _run(
        self,
        running: Exchanges,
        multiply: Multiply,
        a: torch.Tensor,
        scale: torch.Tensor | None,
        out: torch.Tensor,
        *,
        waits_first: bool = False,
    ) -> None:
        """Queue everything that comes before the end. ``waits_first``: products begin when all rows
        have arrived."""
        self._send(running, a, scale)
        theirs = [
            (source, first, last, self._exchange.flag(source, number))
            for source, (first, last, number) in self._theirs()
        ]
        if waits_first:
            for source, _, _, flag in theirs:
                running.wait(source, flag)
        self._multiply_own(multiply, a, scale, out)
        for source, first, last, flag in theirs:
            if not waits_first:
                running.wait(source, flag)
            self._multiply_theirs(multiply, source, first, last, out)

    def _theirs(self) -> Iterator[tuple[int, Part]]:
        """Yield the parts of other ranks with their source, this node's first."""
        exchange = self._exchange
        for source in (*exchange.near, *exchange.far):
            for part in exchange.parts[source]:
                yield source, part

    def _send(self, running: Exchanges, a: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Send own rows to every peer, the rank before this one first; their scales go ahead of
        them."""
        exchange, parts = self._exchange, self._exchange.parts[self._rank]
        start = parts[0].first
        running.fork()
        landing: list[_kernels.FarSlots] = []
        if (far := running.far) is not None:
            if scale is not None:  # first: whoever waits for rows then finds their scales
                landing.append(exchange.slots(self._scales_at, scale.nbytes, 1))
                far.send_far(scale.data_ptr(), landing[0])
            landing.append(exchange.slots(0, a.nbytes))
            far.send_far(a.data_ptr(), landing[-1])
        for peer in reversed(exchange.near):
            if scale is not None:
                own = self._rank * scale.nbytes
                running.send(peer, scale, exchange.address(peer, self._scales_at + own))
            for first, last, number in parts:
                to = exchange.address(peer, first * self._row_bytes)
                flag = exchange.flag(self._rank, number)
                running.send(peer, a[first - start : last - start], to, flag)
        if far is not None:
            far.land(landing)

    def _multiply_own(
        self, multiply: Multiply, a: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        parts = self._exchange.parts[self._rank]
        multiply(a, scale, out[parts[0].first : parts[-1].last])

    def _multiply_theirs(
        self, multiply: Multiply, source: int, first: int, last: int, out: torch.Tensor
    ) -> None:
        scale = self._scales
        if scale is not None:
            single = self._height < len(self._rows) // self._plan.world_size
            scale = scale[source : source + 1] if single else scale[first:last]
        multiply(self._rows[first:last], scale, out[first:last])

    def _deliver(self, call: Call, into: torch.Tensor) -> None:
        """Fill the call's ``out``, if products have a wider dtype."""
        out = call.tensors["out"]
        if into is out:
            return
        if self._plan.bias == "launch":
            torch.add(into, call.tensors["bias"], out=out)
        else:
            out.copy_(into)

    def _kept(
        self, whole: torch.Tensor | None, mine: torch.Tensor | None, landed: torch.Tensor | None
    ) -> list[Copied]:
        """Return the copies of own and gathered rows, or of their scales, to the call's tensor, if
        it has one."""
        if whole is None or mine is None or landed is None:
            return []
        before, after = self._rank * len(mine), (self._rank + 1) * len(mine)
        theirs = [each for each in (slice(before), slice(after, None)) if len(landed[each])]
        return [
            Copied(mine, whole[before:after]),
            *(Copied(landed[each], whole[each]) for each in theirs),
        ]
