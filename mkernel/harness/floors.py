"""The least time that a call can take on a machine: work and bytes of the op over its rates. Nothing of
it depends on how mkernel runs the op."""

from __future__ import annotations

from typing import NamedTuple

from mkernel.plan.model import CombineShape, DtypeName, OpName, Shape
from mkernel.plan.predict import payloads, work
from mkernel.topology.model import Model


class Rates(NamedTuple):
    """Of one rank: TFLOP/s of its matrix unit; GB/s that it adds up, sends to one peer and sends in
    all; microseconds that a launch takes."""

    matrix_tflops: float
    sums_gbs: float
    link_gbs: float
    egress_gbs: float
    launch_us: float


class Floor(Model):
    """``us``: microseconds without the launch; ``amount``: of ``unit``, of the busiest rank."""

    resource: str
    amount: float
    unit: str
    us: float


def floors(
    op: OpName, shape: Shape, dtype: DtypeName, world: int, rates: Rates
) -> tuple[Floor, ...]:
    """Products (of a combine: sums in float32), one link, and all links of a rank.

    Ranks exchange elements of ``dtype``, each once; routing is uniform.
    """
    flop = work(shape, world)
    if isinstance(shape, CombineShape):  # a multiplication and an addition of 4 bytes each
        compute = Floor(
            resource="sums", amount=4 * flop, unit="B", us=4 * flop / rates.sums_gbs / 1e3
        )
    else:
        us = flop / rates.matrix_tflops / 1e6
        compute = Floor(resource="products", amount=flop, unit="flop", us=us)
    pair = sum(payloads(op, shape, dtype, world)) if world > 1 else 0.0
    every = pair * (world - 1)
    return (
        compute,
        Floor(resource="one link", amount=pair, unit="B", us=pair / rates.link_gbs / 1e3),
        Floor(resource="egress", amount=every, unit="B", us=every / rates.egress_gbs / 1e3),
    )


def floor_us(found: tuple[Floor, ...], rates: Rates) -> float:
    """The longest of them, and one launch."""
    return max(one.us for one in found) + rates.launch_us
