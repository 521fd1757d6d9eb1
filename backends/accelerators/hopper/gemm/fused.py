"""The GEMM ops on one rank: a plan's workspace, and the queueing of its calls.

Data flow of the views:
  AllGather+GEMM   pipelined: copy engines (a second stream) or blocks of the kernel push the rows
                   while it runs; sequential: copy engines first, then the kernel. Between nodes
                   blocks do it, in the sequential view a launch of their own
  reductions       pipelined: one kernel; sequential: the product alone, then a collective of it
  compute_only     the same kernel, which waits for nothing and sends nothing
Rows of a and b may have gaps between them (``pitched``). The rank that owns a result adds the bias
in float32 and then rounds. Addresses must be multiples of 16; tensors at other addresses are
copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.collectives.landing import outputs_of, wanted
from mkernel.backends.accelerators.cuda.collectives.norm import normalise
from mkernel.backends.accelerators.cuda.device_world import (
    NO_DATA,
    DispatchContext,
    between_nodes,
    call_id,
    collective_blocks,
    device_world,
)
from mkernel.backends.accelerators.cuda.gemm.library import scales_of_a_rank
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.cuda.starters import normed_rows
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.backends.accelerators.hopper.schedule import (
    GatherSchedule,
    ReduceSchedule,
    SegmentsSchedule,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan, ScaleMode

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


# ---- what follows from a plan --------------------------------------------------------------------


def _hierarchical(plan: LaunchPlan, how: GatherSchedule | ReduceSchedule) -> bool:
    """Return whether the exchange is hierarchical. ArgumentError: it equals the direct one if there
    is one node or one rank per node."""
    wanted = how.exchange == "hierarchical"
    if wanted and 1 in (plan.nodes, plan.ranks_per_node):
        raise ArgumentError(
            "plan.schedule.exchange",
            repr(how.exchange),
            f"'direct', the only one of {plan.op} on {plan.nodes} nodes x "
            f"{plan.ranks_per_node} ranks",
        )
    return wanted


def _gather(plan: LaunchPlan) -> tuple[GatherSchedule, _kernels.AllGatherSchedule]:
    how, rows = plan.part(GatherSchedule), plan.gemm.m // plan.world_size
    if plan.nodes > 1 and (how.push_blocks == 0 or how.slices != 1):
        raise ArgumentError(
            "plan.schedule.push_blocks",
            f"{how.push_blocks}, slices {how.slices}",
            "blocks that send, and 1 slice, between nodes",
        )
    for name, only in (
        ("columns_ahead", 0),
        ("gathered_engine", "copy_engine"),
        ("gathered_blocks", 1),
    ):
        if getattr(how, name) != only:
            raise ArgumentError(f"plan.schedule.{name}", getattr(how, name), repr(only))
    return how, native().AllGatherSchedule(
        rows,
        how.chunk_rows,
        how.push_blocks,
        how.slices,
        _hierarchical(plan, how),
    )


def _staging(plan: LaunchPlan) -> int:
    """Return the bytes that the collective of the sequential view needs."""
    made, world, elements = native(), plan.world_size, plan.gemm.m * plan.gemm.n
    element, way = element_of(plan), made.Way.two_shot
    needed: int = (
        made.reduce_scatter_staging(world, element, elements // world)
        if plan.op == "gemm_reduce_scatter"
        else made.all_reduce_staging(world, element, elements, way, False)
    )
    return needed


def element_of(plan: LaunchPlan) -> _kernels.Element:
    """Return the type of a plan's results, as collectives take it."""
    found: _kernels.Element = getattr(native().Element, plan.out_dtype)
    return found


# ---- calls ---------------------------------------------------------------------------------------


class AllGatherExecutor:
    """The executor of one plan's AllGather+GEMM calls in a world, into ``out`` and, if there is
    one, ``gathered``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        how, schedule = _gather(plan)
        self._context = context
        self._plan = plan
        self._several = plan.world_size > 1
        self._world = device_world(call, context)
        self._product = product_of(plan, how, how.tiling)
        rows = plan.gemm.m // plan.world_size
        self._rows, self._schedule = rows, schedule
        self._pipelined = made.PipelinedGather(
            context.device, context.order, self._world, self._product, schedule
        )

    @cached_property
    def _copies(self) -> _kernels.GatheredCopies:
        made, plan = native(), self._plan
        height, width = scales_of_a_rank(plan)
        found: _kernels.GatheredCopies = made.GatheredCopies(
            self._context.device,
            self._world,
            self._rows * plan.gemm.k * DTYPE_BYTES[plan.dtype],
            height * width * DTYPE_BYTES["float32"],
        )
        return found

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that AllGather+GEMM needs. Unsupported."""
        world = plan.world_size
        if world == 1:
            return Workspace((NO_DATA,))
        made = native()
        needed: int = made.all_gather_gemm_bytes(
            world, _gather(plan)[1], plan.gemm.k, scaling(plan)
        )
        if plan.nodes == 1:
            return Workspace((needed,))
        gathered = needed - made.DATA_OFFSET  # also the area for other nodes
        staged = plan.routes.staged
        return between_nodes(plan, needed if staged else made.DATA_OFFSET, gathered)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        operands = Operands.of(call)
        number, tensors = call_id(call), operands.tensors()
        if call.view == "pipelined":
            self._pipelined.start(number, call.timeout_s, tensors, stream)
        else:
            self._one_after_the_other(call, operands, tensors, stream)
        operands.deliver(call)
        rows, scales = (
            0 if whole is None else whole.data_ptr()
            for whole in map(call.tensors.get, ("gathered", "gathered_scale"))
        )
        if rows or scales:
            self._copies.start(number, call.timeout_s, tensors, rows, scales, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return a starter of calls."""
        context = self._context
        found: object = native().gather_starter(
            context.device,
            context.order,
            self._pipelined,
            self._copies if {"gathered", "gathered_scale"} & strides.keys() else None,
            **pitches(self._plan, strides),
        )
        return found

    def _one_after_the_other(
        self, call: Call, operands: Operands, tensors: _kernels.GemmTensors, stream: int
    ) -> None:
        """Queue the transfer of the rows and then the kernel, or the kernel alone."""
        made, device = native(), self._context.device
        world = self._world.of_call(call_id(call), call.timeout_s)
        product, waits = self._product.of(tensors), False
        schedule = self._schedule
        if call.view == "sequential" and call.plan.nodes > 1:
            made.send_rows(device, world, product, schedule, stream)
            chunk = call.plan.part(GatherSchedule).chunk_rows
            schedule, waits = made.AllGatherSchedule(self._rows, chunk), True  # sent already
        elif call.view == "sequential" and self._several:
            schedule, waits = made.AllGatherSchedule(self._rows, self._rows), True
            rows, scale = operands.a.data_ptr(), operands.a_scale
            row_bytes = call.plan.gemm.k * DTYPE_BYTES[call.plan.dtype]
            more = {}
            if scale is not None:
                more["scales"] = made.RowScales(scale.data_ptr(), scale.nbytes)
            made.push_rows(device, world, rows, row_bytes, schedule, stream, **more)
        made.all_gather_gemm(device, world, product, schedule, waits, stream)


class ReduceExecutor:
    """The executor of one plan's GEMM+ReduceScatter or GEMM+AllReduce calls in a world, into
    ``out``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        how = plan.part(ReduceSchedule)
        self._context = context
        self._plan = plan
        self._world = device_world(call, context)
        self._product = product_of(plan, how, how.tiling)
        self._everywhere = plan.op == "gemm_all_reduce"

        def schedule(alone: bool) -> _kernels.ReduceSchedule:
            found: _kernels.ReduceSchedule = made.ReduceSchedule(
                m=plan.gemm.m,
                rows=how.rows,
                panel_rows=how.panel_rows,
                panel_columns=how.panel_columns,
                pace=how.pace,
                by_outbox=how.by_outbox,
                everywhere=self._everywhere,
                alone=alone,
                network_blocks=how.network_blocks,
                hierarchical=_hierarchical(plan, how),
            )
            return found

        _check_network_blocks(plan, how)
        self._alone, self._whole = schedule(True), schedule(False)
        self._pipelined = made.PipelinedReduce(
            context.device, self._world, self._product, self._whole, self._outputs_of(context)
        )

    def _outputs_of(self, context: DispatchContext) -> _kernels.Outputs:
        """Return the outputs that an AllReduce's calls announce."""
        if self._everywhere:
            return outputs_of(self._plan, context)
        nothing: _kernels.Outputs = native().Outputs()
        return nothing

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a reduction needs, in any view. Unsupported."""
        world = plan.world_size
        how, gathers = plan.part(ReduceSchedule), plan.op == "gemm_all_reduce"
        if world == 1:
            return Workspace((NO_DATA,))
        made, shape, local = native(), plan.gemm, plan.ranks_per_node
        hierarchical, tiling = _hierarchical(plan, how), getattr(made.Tiling, how.tiling)
        try:
            fused: int = made.gemm_reduce_bytes(
                world, local, how.rows, shape.n, tiling, how.by_outbox, gathers
            )
        except ValueError as error:  # too few flags
            raise Unsupported(f"{plan.op} of [{shape.m}, {shape.n}]: {error}") from None
        if plan.nodes == 1:
            nbytes = max(fused, made.DATA_OFFSET + _staging(plan))
            return Workspace((nbytes,), outputs=wanted(plan) if gathers else 0)
        area = made.gemm_reduce_area_bytes(
            world, local, how.rows, shape.n, tiling, gathers, hierarchical
        )
        return between_nodes(plan, fused, area)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        operands = Operands.of(call)
        number, tensors = call_id(call), operands.tensors()
        outs = self._outs(call.symmetric) if operands.out is call.tensors["out"] else []
        if call.view == "compute_only":
            world = self._world.of_call(number, call.timeout_s)
            product = self._product.of(tensors)
            native().gemm_reduce(self._context.device, world, product, self._alone, stream)
        elif call.view == "sequential" and call.plan.world_size > 1:
            self._product_then_collective(call, operands, outs or [operands.out.data_ptr()], stream)
        else:
            self._pipelined.start(number, call.timeout_s, tensors, stream, outs)
        operands.deliver(call)
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return a starter of calls whose ``out`` has the same place."""
        context = self._context
        found: object = native().reduce_starter(
            context.device,
            context.order,
            self._pipelined,
            **pitches(self._plan, strides),
            outs=self._outs(symmetric),
            sums=normed_rows(self._plan),
        )
        return found

    def _outs(self, symmetric: Mapping[str, tuple[int, ...]]) -> list[int]:
        """Return every rank's ``out`` if kernels write to all of them, which they do not between
        nodes."""
        if not self._everywhere or self._plan.nodes > 1:
            return []
        return list(symmetric.get("out", ()))

    def _product_then_collective(
        self, call: Call, operands: Operands, outs: list[int], stream: int
    ) -> None:
        made, plan, world, context = native(), call.plan, call.plan.world_size, self._context
        shape, bias = plan.gemm, operands.bias_address
        partial = operands.out.new_empty((shape.m, shape.n))
        alone = made.DeviceWorld(
            [call.workspace], 0, context.control, call.timeout_s, call_id(call)
        )
        how = plan.part(ReduceSchedule)
        alone_tensors = operands._replace(out=partial, bias=None).tensors()
        product = product_of(plan, how, how.product_tiling).of(alone_tensors)
        schedule = made.AllGatherSchedule(shape.m, shape.m)
        made.all_gather_gemm(context.device, alone, product, schedule, False, stream)
        if plan.nodes > 1:
            exchange = self._whole.of_product(partial.data_ptr())
            made.gemm_reduce(
                context.device,
                self._world.of_call(call_id(call), call.timeout_s),
                self._product.of(operands.tensors()),
                exchange,
                stream,
            )
            return
        together = made.Collective(
            self._world.of_call(call_id(call), call.timeout_s),
            _staging(plan),
            blocks=collective_blocks(context),
        )
        element, elements, partials = element_of(plan), shape.m * shape.n, partial.data_ptr()
        if plan.op == "gemm_reduce_scatter":
            part = elements // world
            made.reduce_scatter(
                together, element, partials, part, outs[0], stream, bias=bias, columns=shape.n
            )
        else:
            way = made.Way.two_shot
            made.all_reduce(
                together, element, partials, elements, outs, way, stream, bias=bias, columns=shape.n
            )


def _check_network_blocks(plan: LaunchPlan, how: ReduceSchedule) -> None:
    cluster = tuning.CLUSTER_TILES[how.tiling][0] // tuning.TILE_ROWS
    several = plan.nodes > 1
    if (how.network_blocks > 0) != several or how.network_blocks % cluster:
        legal = f"a multiple of {cluster}, at least that" if several else "0: there is one node"
        raise ArgumentError("plan.schedule.network_blocks", how.network_blocks, legal)


class Operands(NamedTuple):
    """A call's tensors at addresses that kernels can use: its own, or copies."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    plan: LaunchPlan

    @classmethod
    def of(cls, call: Call) -> Operands:
        given, plan = call.tensors, call.plan
        bias = aligned(given["bias"]) if plan.bias == "launch" else None
        a, b, out = aligned(given["a"]), aligned(given["b"]), writable(given["out"])
        of_a, of_b = given.get("a_scale"), given.get("b_scale")
        return cls(
            a,
            b,
            out,
            bias,
            None if of_a is None else aligned(of_a),
            None if of_b is None else aligned(of_b),
            plan,
        )

    @property
    def bias_address(self) -> int:
        return 0 if self.bias is None else self.bias.data_ptr()

    def tensors(self) -> _kernels.GemmTensors:
        """Return them as native code takes them."""
        strides = {"a": self.a.stride(), "b": self.b.stride()}
        found: _kernels.GemmTensors = native().GemmTensors(
            self.a.data_ptr(),
            self.b.data_ptr(),
            self.out.data_ptr(),
            self.bias_address,
            **pitches(self.plan, strides),
            a_scale=0 if self.a_scale is None else self.a_scale.data_ptr(),
            b_scale=0 if self.b_scale is None else self.b_scale.data_ptr(),
        )
        return found

    def deliver(self, call: Call) -> None:
        """Fill the caller's ``out``, if kernels write to another tensor."""
        deliver(self.out, call.tensors["out"])


def pitches(plan: LaunchPlan, strides: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the distances between rows of a and of b for tensors of these strides; 0: they are
    packed."""
    a_rows = plan.gemm.m // (plan.world_size if plan.op == "all_gather_gemm" else 1)
    by_rows = strides["b"] if plan.b_layout == "row" else strides["b"][::-1]
    return {
        "a_pitch": strides["a"][0] if a_rows > 1 else 0,  # the stride of a single row is arbitrary
        "b_pitch": by_rows[0],
    }


def scaling(plan: LaunchPlan) -> _kernels.Scaling:
    """Return the kind of a plan's scales. ArgumentError: kernels take none by blocks."""
    made = native().Scaling
    by: dict[ScaleMode | None, _kernels.Scaling] = {
        None: made.none, "tensor": made.single, "row": made.by_rows,
    }  # fmt: skip
    mode = None if plan.scales is None else plan.scales.mode
    if mode not in by:
        raise ArgumentError("plan.scales.mode", repr(mode), "'tensor' or 'row' on the fused path")
    return by[mode]


def product_of(
    plan: LaunchPlan,
    how: GatherSchedule | ReduceSchedule | SegmentsSchedule,
    tiling: TilingName,
    k: int | None = None,
) -> _kernels.Product:
    """Return the plan's product, or that of ``k`` of its K, without tensors yet. ArgumentError: tiles
    that add with fewer bits than required, or that are for e4m3 operands only."""
    made = native()
    promotes = plan.scales is not None and not plan.scales.use_fast_accum
    if promotes != (tiling == "promoted"):
        legal = "'promoted'" if promotes else "another one: products are not added up in float32"
        raise ArgumentError("plan.schedule.tiling", repr(tiling), legal)
    product: _kernels.Product = made.Product(
        n=plan.gemm.n,
        k=plan.gemm.k if k is None else k,
        half=plan.out_dtype == "float16",
        n_major=plan.b_layout == "row",
        tiling=getattr(made.Tiling, tiling),
        band=how.band,
        blocks=how.blocks,
        scaling=scaling(plan),
    )
    return product
