"""The GEMM ops on one rank: what a plan needs of the region, and how a call is put on its lane.

Data flow of the views:
  AllGather+GEMM   pipelined: copy engines (a second stream) or blocks of the kernel push the rows
                   while it runs; sequential: copy engines first, then the kernel
  reductions       pipelined: one kernel; sequential: the product alone, then a collective of it
  compute_only     the same kernel, which waits for nothing and sends nothing
Addresses must be multiples of 16: tensors that are not go through a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch

from mkernel.backends.accelerators.hopper import schedule
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.accelerators.hopper.planned import of_plan
from mkernel.backends.accelerators.hopper.transfer import measured_engines
from mkernel.backends.base import Call
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper
    from mkernel.backends.accelerators.hopper.launches import Lane

ALIGNMENT = 16
_NO_DATA = 1 << 20  # a region whose data area is empty
_ELEMENT_BYTES = schedule.ELEMENT_BYTES


# ---- what a plan needs ---------------------------------------------------------------------------


def gather_bytes(plan: LaunchPlan) -> int:
    """Bytes of the region, of AllGather+GEMM. Unsupported."""
    world = one_node(plan)
    if world == 1:
        return _NO_DATA
    needed: int = native().all_gather_gemm_bytes(world, _chunks(plan)[1], plan.gemm.k)
    return needed


def reduce_bytes(plan: LaunchPlan) -> int:
    """Bytes of the region, of a reduction in any view. Unsupported."""
    world = one_node(plan)
    if world == 1:
        return _NO_DATA
    made, shape = native(), plan.gemm
    how = _reduction(plan)
    try:
        fused: int = made.gemm_reduce_bytes(
            world, how.rows, shape.n, how.spread.by_outbox, plan.op == "gemm_all_reduce"
        )
    except ValueError as error:  # too few flags
        raise Unsupported(f"{plan.op} of [{shape.m}, {shape.n}]: {error}") from None
    staged: int = made.DATA_OFFSET + _staging(plan)
    return max(fused, staged)


def one_node(plan: LaunchPlan) -> int:
    """The world's size. Unsupported where it has several nodes."""
    if plan.nodes != 1:
        raise Unsupported(
            f"accelerator 'hopper' runs {plan.op} on one node; this plan has {plan.nodes}"
        )
    return plan.world_size


@of_plan
def _chunks(plan: LaunchPlan) -> tuple[schedule.GatherSchedule, _hopper.Chunks]:
    made, shape, world = native(), plan.gemm, plan.world_size
    rows = shape.m // world
    how = schedule.gather(
        rows,
        shape.n,
        shape.k,
        world,
        plan.rows_per_chunk or rows,
        plan.resources.compute_blocks,
        made.MAX_FLAGS,
        made.MAX_COPIED_CHUNKS,
    )
    return how, made.Chunks(rows, how.chunk_rows, how.push_blocks)


@of_plan
def _reduction(plan: LaunchPlan) -> schedule.ReduceSchedule:
    shape = plan.gemm
    return schedule.reduce(
        plan.op, shape.m, shape.n, shape.k, plan.world_size, plan.resources.compute_blocks
    )


def _staging(plan: LaunchPlan) -> int:
    """Bytes that the collective of the sequential view needs."""
    made, world, elements = native(), plan.world_size, plan.gemm.m * plan.gemm.n
    element, way = _element(plan), made.Way.two_shot
    needed: int = (
        made.reduce_scatter_staging(world, element, elements // world)
        if plan.op == "gemm_reduce_scatter"
        else made.all_reduce_staging(world, element, elements, way, False)
    )
    return needed


def _element(plan: LaunchPlan) -> _hopper.Element:
    found: _hopper.Element = getattr(native().Element, plan.dtype)
    return found


# ---- calls ---------------------------------------------------------------------------------------


def start_gather(call: Call, lane: Lane) -> None:
    """AllGather+GEMM, into ``out`` and, if there is one, ``gathered``."""
    made, shape = native(), call.plan.gemm
    a, b, out = _aligned(call.tensors["a"]), _aligned(call.tensors["b"]), _Out(call.tensors["out"])
    how, chunks = _chunks(call.plan)
    world = _world(call, lane)
    row_bytes = shape.k * _ELEMENT_BYTES
    several = call.plan.world_size > 1
    stream, beside = lane.stream, 0
    if several and call.view == "sequential":
        chunks = made.Chunks(a.shape[0], a.shape[0])
        made.push_rows(lane.device, world, a.data_ptr(), row_bytes, chunks, stream)
    elif several and call.view == "pipelined" and how.push_blocks == 0:
        beside = lane.order.fork(stream)
    try:
        if beside:
            made.push_rows(lane.device, world, a.data_ptr(), row_bytes, chunks, beside)
        made.all_gather_gemm(
            lane.device,
            world,
            _product(call.plan, a, b, out.address, how.tiling),
            chunks,
            several and call.view != "compute_only",
            stream,
        )
    finally:
        if beside:
            lane.order.join(stream)
    out.finish()
    if "gathered" in call.tensors:
        _copy_gathered(call, lane, world, a, call.tensors["gathered"])


def start_reduce(call: Call, lane: Lane) -> None:
    """GEMM+ReduceScatter or GEMM+AllReduce, into ``out``."""
    made = native()
    a, b, out = _aligned(call.tensors["a"]), _aligned(call.tensors["b"]), _Out(call.tensors["out"])
    everywhere = list(call.symmetric.get("out", ())) if out.direct else []
    if call.plan.world_size > 1 and call.view == "sequential":
        _product_then_collective(call, lane, a, b, everywhere or [out.address])
    else:
        how = _reduction(call.plan)
        owners = made.Owners(
            m=call.plan.gemm.m,
            rows=how.rows,
            band_columns=how.band_columns,
            pace=how.spread.pace,
            by_outbox=how.spread.by_outbox,
            everywhere=call.plan.op == "gemm_all_reduce",
            outs=everywhere if call.plan.op == "gemm_all_reduce" else [],
            alone=call.view == "compute_only",
        )
        product = _product(call.plan, a, b, out.address, how.tiling)
        made.gemm_reduce(lane.device, _world(call, lane), product, owners, lane.stream)
    out.finish()


def _product_then_collective(
    call: Call, lane: Lane, a: torch.Tensor, b: torch.Tensor, outs: list[int]
) -> None:
    made, plan, world = native(), call.plan, call.plan.world_size
    shape = plan.gemm
    partial = torch.empty((shape.m, shape.n), dtype=a.dtype, device=a.device)
    alone = made.World([call.workspace], 0, lane.control, call.timeout_s, call.number)
    tiling = schedule.tiling(shape.m, 1, shape.n, shape.k, plan.resources.compute_blocks)
    product = _product(plan, a, b, partial.data_ptr(), tiling)
    chunks = made.Chunks(shape.m, shape.m)
    made.all_gather_gemm(lane.device, alone, product, chunks, False, lane.stream)
    together = made.Collective(
        regions(call),
        call.rank,
        lane.control,
        int(call.timeout_s * 1e9),
        call.number,
        0,
        _staging(plan),
    )
    element, elements, partials = _element(plan), shape.m * shape.n, partial.data_ptr()
    if plan.op == "gemm_reduce_scatter":
        made.reduce_scatter(together, element, partials, elements // world, outs[0], lane.stream)
    else:
        way = made.Way.two_shot
        made.all_reduce(together, element, partials, elements, outs, way, lane.stream)


def _copy_gathered(
    call: Call, lane: Lane, world: _hopper.World, a: torch.Tensor, gathered: torch.Tensor
) -> None:
    """The own rows from ``a``, the others' from the region, where they lie until all have copied."""
    to, shard = gathered.data_ptr(), a.numel() * _ELEMENT_BYTES
    before, ranks = call.rank * shard, call.plan.world_size
    after = before + shard
    rows = call.workspace + native().DATA_OFFSET
    _copy(to + before, a.data_ptr(), shard, lane)
    _copy(to, rows, before, lane)
    _copy(to + after, rows + after, ranks * shard - after, lane)
    if ranks > 1:
        native().rendezvous(lane.device, world, lane.stream)


class _Out:
    """The caller's output as kernels can write it; ``finish`` in stream order after them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.direct = tensor.data_ptr() % ALIGNMENT == 0
        self._written = tensor if self.direct else torch.empty_like(tensor)
        self.address = self._written.data_ptr()

    def finish(self) -> None:
        if not self.direct:
            self._tensor.copy_(self._written)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _copy(dst: int, src: int, nbytes: int, lane: Lane) -> None:
    """Within this GPU, when no kernel of the call needs its processors any more."""
    if nbytes:
        made, best = native(), measured_engines().choose("local", nbytes)
        engine = getattr(made.Engine, best.engine)
        made.copy(dst, src, nbytes, engine, max(best.blocks, 1), stream=lane.stream)


def _product(
    plan: LaunchPlan, a: torch.Tensor, b: torch.Tensor, out: int, tiling: schedule.TilingName
) -> _hopper.Product:
    return _products(plan)[tiling].of(a.data_ptr(), b.data_ptr(), out)


@of_plan
def _products(plan: LaunchPlan) -> dict[schedule.TilingName, _hopper.Product]:
    """By tiling, of no tensors yet."""
    made = native()
    return {
        name: made.Product(
            n=plan.gemm.n,
            k=plan.gemm.k,
            half=plan.dtype == "float16",
            n_major=plan.b_layout == "row",
            tiling=getattr(made.Tiling, name),
            band=schedule.BAND,
            blocks=plan.resources.compute_blocks,
        )
        for name in get_args(schedule.TilingName)
    }


def _world(call: Call, lane: Lane) -> _hopper.World:
    digest = call.plan.digest()
    known = lane.worlds.get(digest)
    if known is None:
        known = lane.worlds[digest] = native().World(
            regions(call), call.rank, lane.control, call.timeout_s, 0
        )
    return known.of_call(call.number & 0xFFFFFFFF, call.timeout_s)


def regions(call: Call) -> list[int]:
    """Every rank's region, by rank."""
    return [
        call.workspace if rank == call.rank else call.peers[rank].workspace
        for rank in range(call.plan.world_size)
    ]
