"""MoE dispatch without a product on `hopper`: eager, in graphs, by handles, in e4m3; its faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import calls
import expert_scales_ranks
import moe_ranks
import pytest
from calls import Decisions
from device_buffers import needs_gpus, pair, several, worlds
from in_world import TOLD_S
from kept_ranks import right
from moe_ranks import ROWS_FAULTS, WANTED
from rows_ranks import Rows

import mkernel
from mkernel.backends.accelerators.cuda.capabilities import MOE, ops
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


SMALL = Rows(40, 1032, routing="uniform")


@pair
@pytest.mark.parametrize(
    ("shape", "decisions", "faults", "planted"),
    [
        (SMALL, {}, ROWS_FAULTS, moe_ranks.planted),
        (SMALL, WANTED, (*ROWS_FAULTS[:2], *moe_ranks.WANTED_FAULTS), moe_ranks.planted),
        (replace(SMALL, again=True), {}, (*ROWS_FAULTS, "tables"), moe_ranks.planted),
        (
            Rows(70, 384, scales=True), {}, expert_scales_ranks.FAULTS[:2],
            expert_scales_ranks.planted,
        ),
    ],
    ids=["as planned", "wanted", "again", "e4m3"],
)  # fmt: skip
def test_faults_are_seen(
    world: int, shape: Rows, decisions: Decisions, faults: Sequence[str], planted: Any
) -> None:
    """On every rank."""
    found = mkernel.launch(
        calls.decided, decisions, calls.faulty, [shape], faults, planted,
        ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    )  # fmt: skip
    assert [set(each) for each in found] == [set(faults)] * world
