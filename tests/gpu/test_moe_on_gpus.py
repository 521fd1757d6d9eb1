"""MoE on `hopper`: right in float64, in any routing, timing and graph; faults are seen."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import moe_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from in_world import TOLD_S
from kept_ranks import right
from moe_ranks import FAULTS, WANTED_FAULTS, Moe
from survivors import judge_survivors

import mkernel
from mkernel.backends.accelerators.hopper.capabilities import MOE, ops

pytestmark = [
    needs_gpus(1),
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(MOE[0] not in ops(), reason="hopper does not claim MoE"),
]

worlds = pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
DRAWS = 200
BOUNDED = [
    Moe(37, hidden=72, features=136, experts=3, top_k=3, capacity=4 * 37 * 3),
    Moe(64, 128, 264, 4, 2, routing="padded", capacity=4 * 64 * 2, returns="ranks", narrow=True),
]


def launched(world: int, fn: Any, *arguments: Any, accelerator: str = "hopper") -> list[Any]:
    return mkernel.launch(
        fn, *arguments, ranks_per_node=world, accelerator=accelerator, timeout_s=TOLD_S
    )


@worlds
def test_random_routings(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    right(world, moe_ranks.judged, [moe_ranks.drawn(chance, world) for _ in range(DRAWS)], seed)


@worlds
def test_random_routings_of_rows_that_are_put_in_order(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    shapes = [moe_ranks.drawn(chance, world) for _ in range(DRAWS)]
    right(world, moe_ranks.permuted, moe_ranks.judged, shapes, seed)


@worlds
def test_tables_of_random_routings(world: int) -> None:
    chance = random.Random(5)
    shapes = [moe_ranks.drawn(chance, world) for _ in range(60)]
    many = [Moe(3000, 512, 768, 2, 2), Moe(700, 64, 64, 33, 8), Moe(300, 64, 64, 300, 8)]
    listed = [replace(one, capacity=0) for one in [*shapes, *many]]
    right(world, moe_ranks.tables, listed, 1)
    for rows in (64, 128):
        right(world, moe_ranks.early, rows, moe_ranks.tables, listed, 1)


@worlds
def test_many_rows_of_few_experts(world: int) -> None:
    """Tiles of every height, and of own tokens alone."""
    gated = Moe(1024 + 13, 512, 264, 2, 2, activation="silu_and_mul")
    shapes = [
        Moe(2048 + 77, 256, 512, 2, 2),
        Moe(1536, 128, 776, 1, 1, routing="one_expert"),
        gated,
        replace(gated, layout="column", dtype="float16"),
    ]
    right(world, moe_ranks.judged, shapes, 3)
    right(world, moe_ranks.permuted, moe_ranks.judged, shapes, 3)
    right(world, moe_ranks.early, 128, moe_ranks.permuted, moe_ranks.judged, shapes, 3)


@worlds
def test_sums_by_rank_of_wide_tiles(world: int) -> None:
    shapes = [
        Moe(513, hidden, 136, 3, 3, returns="ranks", narrow=True, dtype=dtype, layout=layout)
        for hidden, dtype, layout in (
            (256, "bfloat16", "row"), (1032, "float16", "column"), (2104, "bfloat16", "column"),
        )
    ]  # fmt: skip
    right(world, moe_ranks.permuted, moe_ranks.judged, shapes, 5)
    right(world, moe_ranks.permuted, moe_ranks.queued, shapes, 12, 5)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    shapes = [*BOUNDED, Moe(129, 256, 64, 2, 2)]
    right(world, moe_ranks.queued, shapes, 24, 3)
    right(world, moe_ranks.permuted, moe_ranks.queued, shapes, 24, 3)


@worlds
def test_graphs_whose_routing_changes(world: int) -> None:
    right(world, moe_ranks.replayed, BOUNDED, 100)
    right(world, moe_ranks.permuted, moe_ranks.replayed, BOUNDED, 100)


@worlds
@pytest.mark.parametrize("returns", ["slots", "ranks"])
def test_results_are_always_the_same_bits(world: int, returns: Any) -> None:
    shape = Moe(300, 1032, 512, 4, 4, returns=returns, narrow=True)
    right(world, moe_ranks.repeated, shape, 12)
    right(world, moe_ranks.permuted, moe_ranks.repeated, shape, 12)


@worlds
def test_too_many_rows_stop_the_combine_and_the_world_goes_on(world: int) -> None:
    right(world, moe_ranks.overflowed, Moe(40, 64, 64, 2, 2))
    right(world, moe_ranks.permuted, moe_ranks.overflowed, Moe(40, 64, 64, 2, 2))


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, world: int) -> None:
    shape = Moe(40, 64, 64, 2, 2, routing="uniform", activation="silu_and_mul")
    assert all(launched(world, moe_ranks.faulty, shape, fault)), "on every rank"


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@pytest.mark.parametrize("fault", [*FAULTS, "group"])
def test_faults_of_rows_that_are_put_in_order_are_seen(fault: str, world: int) -> None:
    shape = Moe(
        40, 1032, 64, 2, 2, routing="uniform", activation="silu_and_mul", returns="ranks",
        narrow=True,
    )  # fmt: skip
    found = launched(world, moe_ranks.permuted, moe_ranks.faulty, shape, fault)
    assert all(found), "on every rank"


@several
@pytest.mark.parametrize("permuted", [False, True])
def test_random_routings_of_tokens_where_they_are_wanted(world: int, permuted: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    shapes = [moe_ranks.drawn(chance, world) for _ in range(DRAWS // 2)]
    how = [moe_ranks.permuted] if permuted else []
    right(world, moe_ranks.wanted, *how, moe_ranks.judged, shapes, seed)


@several
def test_many_wanted_rows_of_few_experts(world: int) -> None:
    """Also beside tiles of own tokens, which leave the push its multiprocessors."""
    shapes = [Moe(2048 + 77, 256, 512, 2, 2), Moe(1536, 1032, 776, 1, 1), Moe(700, 7168, 264, 2, 1)]
    right(world, moe_ranks.wanted, moe_ranks.judged, shapes, 3)
    right(world, moe_ranks.wanted, moe_ranks.permuted, moe_ranks.judged, shapes, 3)
    right(
        world,
        moe_ranks.wanted,
        moe_ranks.early,
        128,
        moe_ranks.permuted,
        moe_ranks.judged,
        shapes,
        3,
    )


@several
def test_graphs_and_queues_of_wanted_tokens(world: int) -> None:
    right(world, moe_ranks.wanted, moe_ranks.replayed, BOUNDED, 50)
    right(world, moe_ranks.wanted, moe_ranks.permuted, moe_ranks.replayed, BOUNDED, 50)
    right(world, moe_ranks.wanted, moe_ranks.queued, [*BOUNDED, Moe(129, 256, 64, 2, 2)], 24, 3)
    right(world, moe_ranks.wanted, moe_ranks.repeated, Moe(300, 1032, 512, 4, 4, narrow=True), 12)
    right(world, moe_ranks.wanted, moe_ranks.overflowed, Moe(40, 64, 64, 2, 2))


@several
def test_tokens_that_come_late_belong_to_their_call(world: int) -> None:
    shape = Moe(64, 256, 64, 2, 2)
    right(world, moe_ranks.late_tokens, shape)
    right(world, moe_ranks.wanted, moe_ranks.late_tokens, shape)


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@pytest.mark.parametrize("fault", WANTED_FAULTS)
def test_faults_of_wanted_tokens_are_seen(fault: str, world: int) -> None:
    shape = Moe(40, 1032, 64, 2, 2)
    found = launched(world, moe_ranks.wanted, moe_ranks.faulty, shape, fault)
    assert all(found), "on every rank"


@worlds
def test_rows_of_another_number_are_refused(world: int) -> None:
    found = launched(world, moe_ranks.other_rows, Moe(16))
    assert all("a row for each" in text for each in found for text in each)
    assert all(found)


@worlds
def test_a_handle_of_another_world_is_refused_and_the_own_one_serves_twice(world: int) -> None:
    right(world, moe_ranks.foreign, Moe(33, 64, 64, 2, 2))


@several
def test_a_rank_killed_while_others_wait_for_it(world: int) -> None:
    judge_survivors("hopper", replace(BOUNDED[0], capacity=0), world)


@needs_gpus(2)
def test_gradients_by_the_companion() -> None:
    """NCCL, which carries them, has no two ranks share a GPU."""
    right(2, moe_ranks.trained, Moe(24, 64, 64, 2, 2), accelerator="hopper,streams")
