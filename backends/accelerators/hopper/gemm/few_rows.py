"""GEMM+AllReduce and GEMM+ReduceScatter of few rows on one rank: one kernel
(``kernels/gemm/few_rows.cuh``, and of more rows ``mailed_tiles.cuh``).

Data flow of the views:
  pipelined     the kernel, and one that follows for a norm of the rows
  sequential    the kernel in a world of one rank, then a collective of its product
  compute_only  the kernel in a world of one rank, into a product that nobody reads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.collectives.norm import normalise
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
from mkernel.backends.accelerators.cuda.starters import normed_rows
from mkernel.backends.accelerators.hopper.gemm.fused import Operands, pitches, scaling
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class FewRowsExecutor:
    """The executor of one plan's GEMM+AllReduce or GEMM+ReduceScatter calls of few rows in a world,
    into ``out``."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan, made = call.plan, native()
        self._context, self._plan = context, plan
        self._world = device_world(call, context)
        product, schedule = _product(plan), _schedule(plan)
        self._calls = made.FewRowsCalls(context.device, self._world, product, schedule)
        alone = made.DeviceWorld(
            [call.workspace], 0, context.control, call.timeout_s, call_id(call)
        )
        self._alone = made.FewRowsCalls(context.device, alone, product, schedule)

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a plan needs, in any view. Unsupported."""
        world, shape = one_node(plan), plan.gemm
        if world == 1:
            return Workspace((NO_DATA,))
        made = native()
        try:
            made.check_few_rows(world, shape.n, _schedule(plan))
        except ValueError as error:  # too many bytes to exchange
            raise Unsupported(f"{plan.op} of [{shape.m}, {shape.n}]: {error}") from None
        return Workspace((made.DATA_OFFSET + _staging(plan),))

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        operands = Operands.of(call)
        pipelined = call.plan.world_size == 1 or call.view == "pipelined"
        if pipelined:
            self._start(self._calls, call, operands, stream)
        else:
            self._product_then_sums(call, operands, stream)
        operands.deliver(call)
        normalise(call, stream)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object:
        """Return a starter of calls; each rank writes its own ``out``, wherever that lies."""
        context = self._context
        return native().few_rows_starter(
            context.device,
            context.order,
            self._calls,
            **pitches(self._plan, strides),
            sums=normed_rows(self._plan),
        )

    def _product_then_sums(self, call: Call, operands: Operands, stream: int) -> None:
        made, plan, shape = native(), self._plan, self._plan.gemm
        partial = operands.out.new_empty((shape.m, shape.n))
        alone = operands._replace(out=partial, bias=None)
        self._start(self._alone, call, alone, stream)
        if call.view == "compute_only":
            return
        together, element = self._together(call), getattr(made.Element, plan.out_dtype)
        source, out, elements = partial.data_ptr(), operands.out.data_ptr(), partial.numel()
        row = {"bias": operands.bias_address, "columns": shape.n}
        if plan.op == "gemm_reduce_scatter":
            part = elements // plan.world_size
            made.reduce_scatter(together, element, source, part, out, stream, **row)
        else:
            way = made.Way.one_shot
            made.all_reduce(together, element, source, elements, [out], way, stream, **row)

    @staticmethod
    def _start(
        calls: _kernels.FewRowsCalls,
        call: Call,
        operands: Operands,
        stream: int,
    ) -> None:
        number, more = call_id(call), prefetch_of(call)
        calls.start(number, call.timeout_s, operands.tensors(), stream, **more)

    def _together(self, call: Call) -> _kernels.Collective:
        """Return the collective of the sequential view."""
        context = self._context
        world = self._world.of_call(call_id(call), call.timeout_s)
        made: _kernels.Collective = native().Collective(
            world, _staging(self._plan), blocks=collective_blocks(context)
        )
        return made


def _schedule(plan: LaunchPlan) -> _kernels.FewRowsSchedule:
    """Return the native schedule. ArgumentError for a schedule that a call would not follow."""
    how = plan.part(FewRowsSchedule)
    if how.product not in (plan.out_dtype, "float32"):
        raise ArgumentError("plan.schedule.product", how.product, f"{plan.out_dtype} or float32")
    if how.splits > how.blocks:
        raise ArgumentError("plan.schedule.splits", how.splits, f"at most blocks, {how.blocks}")
    if how.normalises:
        raise ArgumentError("plan.schedule.normalises", True, "False: a kernel that follows does")
    exchanges = native().FewRowsExchange
    made: _kernels.FewRowsSchedule = native().FewRowsSchedule(
        m=plan.gemm.m,
        splits=how.splits,
        unrounded=how.product == "float32",
        exchange=getattr(exchanges, plan.op),
        tiled=how.tiling is not None,
    )
    return made


def _product(plan: LaunchPlan) -> _kernels.Product:
    """Return the plan's product, without tensors yet. The kernel ignores band, and without tiles also
    the tiling."""
    made, how = native(), plan.part(FewRowsSchedule)
    product: _kernels.Product = made.Product(
        n=plan.gemm.n,
        k=plan.gemm.k,
        half=plan.out_dtype == "float16",
        n_major=plan.b_layout == "row",
        tiling=getattr(made.Tiling, how.tiling or "narrow"),
        band=1,
        blocks=how.blocks,
        scaling=scaling(plan),
    )
    return product


def _staging(plan: LaunchPlan) -> int:
    """Return the bytes that the collective of the sequential view needs."""
    made, world, shape = native(), plan.world_size, plan.gemm
    element, elements = getattr(made.Element, plan.out_dtype), shape.m * shape.n
    needed: int
    if plan.op == "gemm_reduce_scatter":
        needed = made.reduce_scatter_staging(world, element, elements // world)
    else:
        needed = made.all_reduce_staging(world, element, elements, made.Way.one_shot, False)
    return needed
