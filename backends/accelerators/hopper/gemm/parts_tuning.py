"""The predicted times and the schedules of GEMM ops whose library's products run in parts beside
copy engines (:mod:`.gather_parts`, :mod:`.reduce_parts`).

Pure functions of a plan's sizes and of ``machine.json`` (:mod:`.machine`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.backends.accelerators.hopper.schedule import (
    FLAGS,
    GatherPartsSchedule,
    PartsSchedule,
    ReducePartsSchedule,
    ScaledBy,
)
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName
from mkernel.topology.cost import transfer_us

_MACHINE = machine()
EXCHANGES = 2
"""The most exchanges of a call, each of which has its own flags."""
WHOLE = 0
"""The number of parts that stands for one product and one collective."""


class Times(NamedTuple):
    """Times of one call, in microseconds, without its start: all products, all transfers, and the
    call."""

    compute: float
    comm: float
    pipelined: float


def ways(plan: CommonPart) -> tuple[int, ...]:
    """Return the numbers of parts of each rank in which a call may run, :data:`WHOLE` first."""
    how = _MACHINE.parts
    if plan.world_size == 1:
        return (WHOLE,)
    chunks = how.chunks_of_16_bits if plan.scales is None else how.chunks
    return (WHOLE, *(parts for parts in chunks if parts * how.least_rows <= rows_of(plan)))


def wished(plan: CommonPart, chunk: int) -> int:
    """Return the number of parts of each rank that have ``chunk`` rows, or all its rows; fewer,
    larger parts if there are not enough flags."""
    parts = -(-rows_of(plan) // min(chunk, rows_of(plan)))
    return min(parts, FLAGS // (EXCHANGES * plan.world_size))


def rows_of(plan: CommonPart) -> int:
    """Return the most rows of one rank."""
    return -(-plan.gemm.m // plan.world_size)


def name_of(parts: int) -> str:
    """Return a readable name of a way."""
    return f"{parts} of each rank" if parts else "the whole"


def schedule(
    plan: CommonPart, parts: int, product: DtypeName, scaled_by: ScaledBy | None, cores: int
) -> PartsSchedule:
    """Schedule ``parts`` parts of each rank; ``product`` and ``scaled_by`` as in
    :class:`.schedule.ProductSchedule`."""
    if plan.op == "all_gather_gemm":
        return GatherPartsSchedule(product=product, scaled_by=scaled_by, chunks=parts)
    blocks = cores * _MACHINE.parts.sum_blocks_a_core
    return ReducePartsSchedule(
        product=product, scaled_by=scaled_by, chunks=parts, sum_blocks=blocks
    )


def times(
    plan: CommonPart, parts: int, product: DtypeName, multiplied_us: Callable[[int], float]
) -> Times:
    """Predict a call in ``parts`` parts of each rank. ``product``: the dtype in which partial
    results travel; ``multiplied_us``: returns the time of a product of that many rows."""
    if plan.op == "all_gather_gemm":
        return _gathered(plan, parts, multiplied_us)
    return _summed(plan, parts, product, multiplied_us)


def _gathered(plan: CommonPart, parts: int, multiplied_us: Callable[[int], float]) -> Times:
    """Predict AllGather+GEMM. Own rows are multiplied first; each part when the previous product
    has ended and the part has arrived."""
    shape, how, world = plan.gemm, _MACHINE.parts, plan.world_size
    rows = shape.m // world
    step = -(-rows // parts)
    copy = _copy_us(plan, step * shape.k * DTYPE_BYTES[plan.dtype])
    own, part = multiplied_us(rows), multiplied_us(step)
    now, copied = own, _copy_us(plan, 1) if plan.scales is not None else 0.0  # scales go ahead
    for _ in range((world - 1) * parts):
        copied += copy
        now = max(now, copied) + how.gap_us + part
    return Times(own + (world - 1) * parts * part, copied, now + how.end_us)


def _summed(
    plan: CommonPart, parts: int, product: DtypeName, multiplied_us: Callable[[int], float]
) -> Times:
    """Predict a reduction. Peers' rows are multiplied first and leave part by part; own parts are
    added when the peers' have arrived, and those of an all-reduce are sent on."""
    shape, how, world = plan.gemm, _MACHINE.parts, plan.world_size
    step = -(-rows_of(plan) // parts)
    of_sums, of_out = DTYPE_BYTES[product], DTYPE_BYTES[plan.out_dtype]
    part, copy = multiplied_us(step), _copy_us(plan, step * shape.n * of_sums)
    moved = step * shape.n * (world * of_sums + of_out)
    cached = moved <= how.sum_cached_bytes
    added = transfer_us(moved, how.sum_cached_gbs if cached else how.sum_gbs, how.sum_us)
    now = copied = comm = 0.0
    arrived = []
    for _ in range((world - 1) * parts):
        now += part + how.gap_us
        copied = max(copied, now) + copy
        comm += copy
        arrived.append(copied)
    for own in range(parts):
        now = max(now + part + how.gap_us, arrived[(world - 2) * parts + own]) + added
        if plan.op == "gemm_all_reduce":
            for _ in range(world - 1):
                result = _copy_us(plan, step * shape.n * of_out)
                copied = max(copied, now) + result
                comm += result
    if plan.op == "gemm_all_reduce":
        landed = (world - 1) / world * shape.m * shape.n * of_out
        now = max(now, copied) + transfer_us(2 * landed, how.sum_gbs, how.sum_us)
    return Times(world * parts * part, comm, now + how.end_us)


def _copy_us(plan: CommonPart, nbytes: int) -> float:
    """Return the time of a copy by a copy engine, followed by a flag."""
    return _MACHINE.on_links_of(plan).copies.choose("put", nbytes, 0, flagged=True).microseconds
