"""The least time that a call can take on a machine: work and bytes of the op over its rates. Nothing of
it depends on how mkernel runs the op."""

from __future__ import annotations

from typing import NamedTuple

from mkernel.plan.model import (
    DTYPE_BYTES,
    AttentionShape,
    CombineShape,
    DtypeName,
    OpName,
    Shape,
    SumShape,
)
from mkernel.plan.predict import payloads, work
from mkernel.plan.traffic import Routing
from mkernel.topology.model import Model


class Rates(NamedTuple):
    """The rates of one rank: TFLOP/s of its matrix unit; GB/s that it adds up, sends to one peer and
    sends in all; microseconds that a launch takes. ``between_units_gbs``: GB/s between its matrix and
    its vector units, where these meet in memory alone."""

    matrix_tflops: float
    sums_gbs: float
    link_gbs: float
    egress_gbs: float
    launch_us: float
    between_units_gbs: float | None = None


class Floor(Model):
    """``us``: microseconds without the launch; ``amount``: of ``unit``, of the busiest rank."""

    resource: str
    amount: float
    unit: str
    us: float


def floors(
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    world: int,
    rates: Rates,
    routing: Routing = "uniform",
) -> tuple[Floor, ...]:
    """Compute the floors of products (of a sum or a combine: additions in float32), of one link, and of
    all links of a rank.

    Ranks exchange elements of ``dtype``, each once; a token that several experts of a rank get goes
    there once, with that ``routing``. Attention's scores go from
    matrix to vector units in float32, the weights made of them back in ``dtype``: each is stored and
    loaded.
    """
    flop = work(shape, world)
    if isinstance(
        shape, CombineShape | SumShape
    ):  # a multiplication and an addition of 4 bytes each
        compute = Floor(
            resource="sums", amount=4 * flop, unit="B", us=4 * flop / rates.sums_gbs / 1e3
        )
    else:
        us = flop / rates.matrix_tflops / 1e6
        compute = Floor(resource="products", amount=flop, unit="flop", us=us)
    pair = sum(payloads(op, shape, dtype, world, routing=routing)) if world > 1 else 0.0
    every = pair * (world - 1)
    meetings: tuple[Floor, ...] = ()
    if isinstance(shape, AttentionShape) and rates.between_units_gbs is not None:
        amount = 2.0 * (4 + DTYPE_BYTES[dtype]) * flop / (4.0 * shape.head_dim)
        us = amount / rates.between_units_gbs / 1e3
        meetings = (Floor(resource="scores and weights", amount=amount, unit="B", us=us),)
    return (
        compute,
        *meetings,
        Floor(resource="one link", amount=pair, unit="B", us=pair / rates.link_gbs / 1e3),
        Floor(resource="egress", amount=every, unit="B", us=every / rates.egress_gbs / 1e3),
    )


def floor_us(found: tuple[Floor, ...], rates: Rates) -> float:
    """Return the longest of them, and one launch."""
    return max(one.us for one in found) + rates.launch_us
