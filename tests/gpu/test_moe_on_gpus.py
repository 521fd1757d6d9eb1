"""MoE on `hopper`, beside ``test_calls_on_gpus``: tables, capacities, handles; faults are seen."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import calls
import moe_ranks
import pytest
import torch
from calls import Decisions
from device_buffers import needs_gpus, pair, several, worlds
from in_world import TOLD_S
from kept_ranks import right
from moe_ranks import (
    AGAIN_FAULTS,
    FAULTS,
    GATHERED,
    IN_ORDER,
    PERMUTED,
    WANTED,
    WANTED_FAULTS,
    Moe,
    early,
)

import mkernel
from mkernel.backends.accelerators.cuda.capabilities import MOE, ops
from mkernel.cases.moe import ROUTINGS

pytestmark = [
    needs_gpus(1),
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(MOE[0] not in ops(), reason="hopper does not claim MoE"),
]


def decided(world: int, decisions: Decisions, fn: Any, *arguments: Any) -> None:
    """No rank finds a failure where the tuning decides so."""
    right(world, calls.decided, decisions, fn, *arguments)


@worlds
def test_tables_of_random_routings(world: int) -> None:
    chance = random.Random(5)
    shapes = [moe_ranks.drawn(chance, world) for _ in range(60)]
    many = [Moe(3000, 512, 768, 2, 2), Moe(700, 64, 64, 33, 8), Moe(300, 64, 64, 300, 8)]
    listed = [replace(one, capacity=0) for one in [*shapes, *many]]
    right(world, moe_ranks.tables, listed, 1)
    for rows in (64, 128):
        decided(world, early(rows), moe_ranks.tables, listed, 1)


@worlds
def test_too_many_rows_stop_the_combine_and_the_world_goes_on(world: int) -> None:
    shape = Moe(40, 64, 64, 2, 2)
    right(world, moe_ranks.overflowed, shape)
    decided(world, PERMUTED, moe_ranks.overflowed, shape)
    if world > 1:
        decided(world, WANTED, moe_ranks.overflowed, shape)


AGAIN = [
    *(Moe(40, 1032, 64, 2, 3, routing=routing, again=True) for routing in ROUTINGS),
    Moe(700, 64, 72, 33, 8, activation="silu_and_mul", again=True),
    Moe(3000, 512, 768, 2, 2, dtype="float16", again=True),
]
SCALED_AGAIN = [
    Moe(70, 384, 256, 3, 3, scales=True, quantise=quantise, again=True)
    for quantise in (False, True)
]


@worlds
def test_products_by_a_handle(world: int) -> None:
    right(world, calls.judged, [*AGAIN, *SCALED_AGAIN], 1)
    decided(world, PERMUTED, calls.judged, AGAIN, 1)
    for decisions in (GATHERED, IN_ORDER):
        decided(world, decisions, calls.judged, [*AGAIN, *SCALED_AGAIN], 1)
    if world > 1:
        decided(world, early(64), calls.judged, [*AGAIN, *SCALED_AGAIN], 1)
        decided(world, WANTED, calls.judged, [*AGAIN, *SCALED_AGAIN], 1)


@worlds
def test_products_by_a_handle_in_graphs(world: int) -> None:
    shapes = [*AGAIN[:-1], *SCALED_AGAIN]
    bounded = [replace(one, capacity=one.tokens * one.top_k * world + 3) for one in shapes]
    right(world, calls.replayed, bounded, 12)
    decided(world, IN_ORDER, calls.replayed, bounded, 12)


@several
def test_tokens_that_come_late_belong_to_their_call(world: int) -> None:
    shape = Moe(64, 256, 64, 2, 2)
    right(world, moe_ranks.late_tokens, shape)
    decided(world, WANTED, moe_ranks.late_tokens, shape)


SMALL = Moe(40, 64, 64, 2, 2, routing="uniform", activation="silu_and_mul")


@pair
@pytest.mark.parametrize(
    ("shape", "decisions", "faults"),
    [
        (SMALL, {}, FAULTS),
        (replace(SMALL, hidden=1032, returns="ranks", narrow=True), PERMUTED, (*FAULTS, "group")),
        (Moe(40, 1032, 64, 2, 2), WANTED, WANTED_FAULTS),
        (replace(SMALL, again=True, capacity=160), GATHERED, AGAIN_FAULTS),
        (replace(SMALL, again=True, capacity=160), IN_ORDER, (*AGAIN_FAULTS, "uncounted")),
    ],
    ids=["as planned", "permuted", "wanted", "again", "permuted again"],
)
def test_faults_are_seen(world: int, shape: Moe, decisions: Decisions, faults: Any) -> None:
    """On every rank."""
    found = mkernel.launch(
        calls.decided, decisions, calls.faulty, [shape], faults, moe_ranks.planted,
        ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    )  # fmt: skip
    assert [set(each) for each in found] == [set(faults)] * world


@needs_gpus(2)
def test_gradients_by_the_companion() -> None:
    """Gradients in float16 go over NCCL, which has no two ranks share a GPU."""
    shape = Moe(24, 64, 64, 2, 2, dtype="float16")
    right(2, moe_ranks.trained, shape, accelerator="hopper,streams")


MANY = Moe(2048, 512, 256, 8, 8, activation="silu_and_mul")
"""Torch's grouped product takes large tiles for it."""


@worlds
@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch's grouped product may hang")
def test_gradients_without_a_companion(world: int) -> None:
    small = [
        replace(Moe(40, 64, 72, 2, 2), routing=routing, capacity=capacity, layout=layout)
        for routing, layout in (
            ("uniform", "row"), ("one_expert", "column"), ("duplicates", "column"),
            ("padded", "row"), ("empty_ranks", "row"),
        )
        for capacity in (0, 40 * 2 * world + 13)
    ]  # fmt: skip
    many = [MANY, replace(MANY, capacity=2048 * 8 * world, routing="some_empty", returns="slots")]
    right(world, moe_ranks.composed, [*small, *many, replace(MANY, returns="ranks", top_k=3)])
