"""The predicted times and the schedules of GEMM ops whose library's products run in parts beside
copy engines (:mod:`.gather_parts`, :mod:`.reduce_parts`).

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import (
    FLAGS,
    GatherPartsSchedule,
    PartsSchedule,
    ReducePartsSchedule,
    ScaledBy,
)
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName

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
    how, rows = _MACHINE.parts, rows_of(plan)
    if plan.world_size == 1:
        return (WHOLE,)
    chunks = how.chunks_of_16_bits if plan.scales is None else how.chunks
    return (WHOLE, *(parts for parts in chunks if parts * how.least_rows <= rows))


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
    shape, world, forms = plan.gemm, plan.world_size, _MACHINE.of_plan(plan).in_parts
    rows = rows_of(plan)
    part = multiplied_us(-(-rows // parts))
    if plan.op == "all_gather_gemm":
        own = multiplied_us(rows)
        return Times(*forms.gathered(
            world, shape.m, shape.k, DTYPE_BYTES[plan.dtype], parts, own, part,
            plan.scales is not None,
        ))  # fmt: skip
    return Times(*forms.summed(
        plan.op == "gemm_all_reduce", world, shape.m, shape.n, parts,
        DTYPE_BYTES[product], DTYPE_BYTES[plan.out_dtype], part,
    ))  # fmt: skip
