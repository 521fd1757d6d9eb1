"""Invariant results of GEMM+ReduceScatter and GEMM+AllReduce on one rank, by parts.

Data flow of a call:
  a, b ──the kernel of AllGather+GEMM, in a world of one rank──▶ nodes of the tree of
       ``mkernel/plan/invariance.py``: segments, or sums of a few that are added in registers
  nodes ──one kernel, by the rest of the tree──▶ this rank's root
  roots ──a collective that adds by the tree in the order of ranks, + bias──▶ out; a norm behind it
Every product takes a segment of K in one order, by instructions that add alike; one launch computes
all of them where they are whole steps of the kernel. One rank alone adds its nodes into ``out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mkernel.backends.accelerators.cuda.collectives.norm import check_tree, normalise
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    call_id,
    collective_blocks,
    device_world,
    one_node,
)
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.prefetch import prefetch_of
from mkernel.backends.accelerators.hopper.gemm.fused import Operands, element_of, product_of
from mkernel.backends.accelerators.hopper.gemm.tuning import STEP_BYTES
from mkernel.backends.accelerators.hopper.schedule import SegmentsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import ArgumentError
from mkernel.plan.invariance import segments_of
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

_MOST_TERMS = 16
"""The most terms that one kernel adds; as kMaxRanks of device/network.cuh."""


class SegmentsExecutor:
    """The executor of one plan's calls in a world, into ``out``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        made, plan = native(), call.plan
        how = plan.part(SegmentsSchedule)
        self._plan, self._context, self._how = plan, context, how
        parts, of_node = _segments(plan), 1 << how.levels
        whole = parts[0][1] * DTYPE_BYTES[plan.dtype] % STEP_BYTES == 0
        if len(parts) % of_node or not (whole or of_node == 1):
            legal = f"0, with {len(parts)} segments of {parts[0][1]} columns on a rank"
            raise ArgumentError("plan.schedule.levels", how.levels, legal)
        self._nodes = [
            (parts[at][0], parts[at + of_node - 1][1]) for at in range(0, len(parts), of_node)
        ]
        self._launched = len(self._nodes) if whole else 1
        self._product = product_of(plan, how, how.tiling, k=self._nodes[0][1] * self._launched)
        self._together = made.Collective(
            device_world(call, context),
            _staging(plan),
            blocks=collective_blocks(context),
            by_mail=how.by_mail,
            tree=True,
        )

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs. Unsupported."""
        check_tree(plan)
        if plan.invariant is None:
            raise ArgumentError("plan.invariant", None, "segments, with a schedule of segments")
        if one_node(plan) == 1:
            return Workspace((NO_DATA,))
        return Workspace((native().DATA_OFFSET + _staging(plan),))

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        operands, alone = Operands.of(call), call.plan.world_size == 1
        out, count = operands.out, len(self._nodes)
        # Kernels add a bias to a root that they have rounded.
        whole = alone and count == 1 and self._how.levels > 0
        nodes = out[None] if whole else out.new_empty((count, self._plan.gemm.m, self._plan.gemm.n))
        self._multiply(call, operands, nodes, operands.bias if whole else None, stream)
        if call.view == "compute_only" and not alone:
            return
        if alone and not whole:
            self._add(call, list(nodes), out, stream, operands.bias)
        elif not alone:
            root = nodes[0]
            if count > 1:
                root = torch.empty_like(root)
                self._add(call, list(nodes), root, stream)
            self._exchange(call, operands, root, stream)
        operands.deliver(call)
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> None:
        """Return None: there is no native starter of such calls."""

    def _multiply(
        self,
        call: Call,
        operands: Operands,
        nodes: torch.Tensor,
        bias: torch.Tensor | None,
        stream: int,
    ) -> None:
        """Queue the products of this rank's segments into nodes [count, M, N]."""
        made, shape, device = native(), self._plan.gemm, self._context.device
        alone = made.DeviceWorld(
            [call.workspace], 0, self._context.control, call.timeout_s, call_id(call)
        )
        rows = made.AllGatherSchedule(
            shape.m, shape.m, segments=self._launched, levels=self._how.levels
        )
        for at in range(0, len(nodes), self._launched):
            k = slice(self._nodes[at][0], self._nodes[at + self._launched - 1][1])
            some = operands._replace(a=operands.a[:, k], b=operands.b[k], out=nodes[at], bias=bias)
            product = self._product.of(some.tensors())
            made.all_gather_gemm(device, alone, product, rows, False, stream)

    def _add(
        self,
        call: Call,
        terms: Sequence[torch.Tensor],
        out: torch.Tensor,
        stream: int,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Queue the tree over terms, a subtree of as many as a kernel adds at a time."""
        made, alone = native(), [call.workspace]
        world = made.DeviceWorld(alone, 0, self._context.control, call.timeout_s, call_id(call))

        def add(some: Sequence[torch.Tensor], into: torch.Tensor, row: int) -> torch.Tensor:
            made.sum_parts(
                self._context.device, world, element_of(self._plan),
                [each.data_ptr() for each in some], into.numel(), into.data_ptr(),
                2 * self._how.blocks, False, stream, row, self._plan.gemm.n, tree=True,
            )  # fmt: skip
            return into

        while len(terms) > _MOST_TERMS:
            groups = range(0, len(terms), _MOST_TERMS)
            some = [terms[at : at + _MOST_TERMS] for at in groups]
            terms = [add(each, torch.empty_like(each[0]), 0) for each in some]
        add(terms, out, 0 if bias is None else bias.data_ptr())

    def _exchange(self, call: Call, operands: Operands, root: torch.Tensor, stream: int) -> None:
        made, plan, out = native(), self._plan, operands.out.data_ptr()
        together = self._together.of_call(call_id(call), call.timeout_s, **prefetch_of(call))
        element, elements, source = element_of(plan), root.numel(), root.data_ptr()
        row = {"bias": operands.bias_address, "columns": plan.gemm.n}
        if plan.op == "gemm_reduce_scatter":
            part = elements // plan.world_size
            made.reduce_scatter(together, element, source, part, out, stream, **row)
            return
        way, outs = made.Way.two_shot, [out]
        if self._how.by_mail:
            way = made.Way.one_shot
        elif operands.out is call.tensors["out"]:
            outs = list(call.symmetric.get("out", ())) or outs
        made.all_reduce(together, element, source, elements, outs, way, stream, **row)


def _segments(plan: LaunchPlan) -> tuple[tuple[int, int], ...]:
    """Return [start, end) of this rank's segments in its share of K."""
    assert plan.invariant is not None
    return segments_of(plan.invariant.segments // plan.world_size, plan.gemm.k)


def _staging(plan: LaunchPlan) -> int:
    """Return the bytes that the collective needs."""
    made, world, elements = native(), plan.world_size, plan.gemm.m * plan.gemm.n
    element = element_of(plan)
    needed: int
    if plan.op == "gemm_reduce_scatter":
        needed = made.reduce_scatter_staging(world, element, elements // world)
    else:
        way = made.Way.one_shot if plan.part(SegmentsSchedule).by_mail else made.Way.two_shot
        needed = made.all_reduce_staging(world, element, elements, way, False)
    return needed
