"""The schedule of GEMM ops of e4m3 operands on the library path: one product and one collective, or
parts.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.gemm import parts_tuning
from mkernel.backends.accelerators.cuda.gemm.library_tuning import library
from mkernel.backends.accelerators.cuda.gemm.parts_tuning import Times
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import ScaledBy
from mkernel.plan import paths
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName, Schedule
from mkernel.plan.predict import payloads, prediction
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows, choose
from mkernel.topology.cost import (
    MachineConstants,
    PathConstants,
    transfer_us,
)

_MACHINE = machine()


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of e4m3 operands. If the caller requests a chunk, parts have that chunk's
    rows."""
    plan, found = request.plan, by_rows(request, chunks=1)
    cores = found.pipeline.compute_blocks
    options = parts_tuning.ways(plan)
    if plan.nodes > 1:
        options = (1,)
    elif plan.world_size > 1 and request.chunk is not None:
        options = (parts_tuning.wished(plan, request.chunk),)
    chunks, considered = choose(
        "parts",
        options,
        lambda chunks: times(plan, chunks, cores).pipelined,
        parts_tuning.name_of,
    )
    found = found._replace(
        schedule=_made(plan, chunks, cores, request.constants),
        alternatives=found.alternatives + considered,
    )
    if request.constants is None or plan.nodes > 1:
        return found
    start = _MACHINE.of_plan(plan).scaled.product.start_us
    return found._replace(
        prediction=prediction(*times(plan, chunks, cores), start, request.constants)
    )


def _made(
    plan: CommonPart, chunks: int, cores: int, constants: MachineConstants | None
) -> Schedule:
    rows, product = parts_tuning.rows_of(plan), product_dtype(plan)
    how = scaled_by(plan, -(-rows // chunks) if chunks else plan.gemm.m, cores)
    if chunks:
        return parts_tuning.schedule(plan, chunks, product, how, cores)
    return library(plan, constants, product, how)


def scaled_by(plan: CommonPart, rows: int, cores: int) -> ScaledBy:
    """Return what scales a product of ``rows`` rows: a kernel, if that is faster and possible."""
    assert plan.scales is not None
    mode = plan.scales.mode
    by_rows = mode == "row" or (mode == "tensor" and _of_all_ranks(plan, rows))
    if not by_rows or product_dtype(plan) == "float32":
        return "library"
    faster = _scaled_us(plan, rows, cores) < _library_us(plan, rows, cores)
    return "kernel" if faster else "library"


def product_dtype(plan: CommonPart) -> DtypeName:
    """Return the dtype of products: the result's, or float32 if more is added to them."""
    if plan.op == "all_gather_gemm" or plan.world_size == 1:
        return "float32" if plan.bias == "launch" else plan.out_dtype
    return paths.partial_dtype(plan.gemm, plan.out_dtype)


def times(plan: CommonPart, chunks: int, cores: int) -> Times:
    """Predict a call in ``chunks`` parts of each rank; 0: one product, one collective."""
    if plan.world_size == 1 or not chunks:
        return _whole(plan, cores)
    return parts_tuning.times(
        plan, chunks, product_dtype(plan), lambda rows: _product_us(plan, rows, cores)
    )


def _whole(plan: CommonPart, cores: int) -> Times:
    """Predict T_c + T_m; an all-reduce exchanges twice."""
    shape, world = plan.gemm, plan.world_size
    compute = _product_us(plan, shape.m, cores)
    if world == 1:
        return Times(compute, 0.0, compute)
    path = _MACHINE.of_plan(plan).scaled.product
    sent = payloads(
        plan.op, shape, plan.dtype, world, partials=product_dtype(plan), results=plan.out_dtype
    )
    comm = sum(
        transfer_us((world - 1) * each, path.egress_gbs, path.exchange_us) for each in sent if each
    )
    return Times(compute, comm, compute + comm)


def _of_all_ranks(plan: CommonPart, rows: int) -> bool:
    """Return whether ``rows`` rows belong to several ranks, each of which has its own scale."""
    return plan.op == "all_gather_gemm" and plan.world_size > 1 and rows == plan.gemm.m


def _product_us(plan: CommonPart, rows: int, cores: int) -> float:
    by_kernel = scaled_by(plan, rows, cores) == "kernel"
    return (_scaled_us if by_kernel else _library_us)(plan, rows, cores)


def _library_us(plan: CommonPart, rows: int, cores: int) -> float:
    assert plan.scales is not None
    how, mode = _MACHINE.of_plan(plan).scaled, plan.scales.mode
    longer = how.by_blocks if mode == "block" else 1.0
    product = (how.fast or how.product) if plan.scales.use_fast_accum else how.product
    if mode == "tensor" and not _of_all_ranks(plan, rows):
        product = how.unscaled
    return longer * _multiplied_us(product, plan, rows, cores)


def _scaled_us(plan: CommonPart, rows: int, cores: int) -> float:
    """Predict a product without scales, in float32, followed by the kernel that scales."""
    how, elements = _MACHINE.of_plan(plan).scaled, rows * plan.gemm.n
    moved = elements * (2 * DTYPE_BYTES["float32"] + DTYPE_BYTES[plan.out_dtype])
    scaled = transfer_us(moved, how.scale_gbs, how.scale_us)
    return _multiplied_us(how.unscaled, plan, rows, cores) + scaled


def _multiplied_us(path: PathConstants, plan: CommonPart, rows: int, cores: int) -> float:
    shape, memory = plan.gemm, _MACHINE.of_plan(plan).constants.memory_gbs
    return path.products.fastest(1, rows, shape.n, shape.k, cores, memory, 1).total_us
