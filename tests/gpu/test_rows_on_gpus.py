"""MoE dispatch without a product on `hopper`: eager, in graphs, by handles, in e4m3."""

from __future__ import annotations

from dataclasses import replace

import calls
import pytest
from device_buffers import needs_gpus, several, worlds
from kept_ranks import right
from moe_ranks import WANTED
from rows_ranks import Rows

from mkernel.backends.accelerators.hopper.capabilities import MOE, ops
from mkernel.cases.moe import ROUTINGS

pytestmark = [
    needs_gpus(1),
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(MOE[0] not in ops(), reason="hopper does not claim MoE"),
]

ROUTED = [
    Rows(40, hidden, top_k=3, routing=routing, dtype=dtype)
    for routing in ROUTINGS
    for hidden, dtype in ((8, "float16"), (1032, "bfloat16"))
]
LARGE = [Rows(1), Rows(700, 64, 33, 8), Rows(3000, 7168, 4, 8)]
SCALED = [Rows(40, 128, scales=True), Rows(300, 7168, 4, 4, scales=True, routing="padded")]
EVERY = [*ROUTED, *LARGE, *SCALED]
AGAIN = [replace(each, again=True) for each in EVERY]


def bounded(shapes: list[Rows], world: int) -> list[Rows]:
    """With room for all rows that can come."""
    return [replace(each, capacity=each.tokens * each.top_k * world + 3) for each in shapes]


@worlds
def test_rows_of_every_routing(world: int) -> None:
    right(world, calls.judged, [*EVERY, *AGAIN, *bounded([*EVERY, *AGAIN], world)], 1)


@several
def test_rows_that_are_pushed_where_they_are_wanted(world: int) -> None:
    shapes = [*EVERY, *AGAIN, *bounded(SCALED, world)]
    right(world, calls.decided, WANTED, calls.judged, shapes, 1)


@worlds
def test_rows_in_graphs(world: int) -> None:
    right(world, calls.replayed, bounded([*ROUTED, *SCALED, *AGAIN], world), 12)
