"""The GEMM ops on GPUs through the public API: right, the same bits, in any timing, order and graph."""

from __future__ import annotations

import random

import hopper_ranks
import kept_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import OPS, Shape, drawn
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

worlds = pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
DRAWS = 240
MIXED = [
    Shape("all_gather_gemm", 1024, 512, 1024),
    Shape("gemm_reduce_scatter", 1024, 768, 256),
    Shape("gemm_all_reduce", 512, 1024, 320, layout="column"),
    Shape("all_gather_gemm", 128, 64, 4096, dtype="float16"),
    Shape("gemm_all_reduce", 2048, 2048, 512),
]
# Calls that end without waiting for peers, between others: pushed by copy engines, by blocks, summed.
ONE_AFTER_ANOTHER = [
    Shape("gemm_all_reduce", 64, 1024, 512, path="library"),
    Shape("all_gather_gemm", 8192, 512, 4096, path="fused"),
    Shape("gemm_reduce_scatter", 256, 1024, 512, path="library"),
    Shape("all_gather_gemm", 1024, 512, 1024, path="fused"),
    Shape("gemm_all_reduce", 1024, 2048, 256, path="library"),
    Shape("gemm_all_reduce", 2048, 2048, 512, path="fused"),
    Shape("all_gather_gemm", 64, 512, 1024, path="library"),
    Shape("all_gather_gemm", 16384, 256, 2048, path="library"),
]


@pytest.fixture(autouse=True, params=["fused", "library"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of one path: left to the planner, small calls would all take the same."""
    monkeypatch.setenv("MKERNEL_PATH", request.param)


@worlds
def test_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    shapes = [drawn(chance, world) for _ in range(DRAWS)]
    print(f"seed {seed}")
    right(world, hopper_ranks.judged, shapes, seed)


@worlds
@pytest.mark.parametrize("op", OPS)
def test_large(op: str, world: int) -> None:
    right(world, hopper_ranks.judged, [Shape(op, 4096, 4096, 2048), Shape(op, 8192, 1024, 4096)], 1)


@several
def test_sums_of_about_as_many_tiles_as_there_are_flags(world: int) -> None:
    right(world, hopper_ranks.of_many_tiles)


@several
def test_late_ranks_and_reused_memory(world: int) -> None:
    right(world, hopper_ranks.skewed, MIXED, 60, 2)


@several
def test_brief_calls_between_others(world: int) -> None:
    right(world, hopper_ranks.skewed, ONE_AFTER_ANOTHER, 60, 4)
    right(world, hopper_ranks.queued, ONE_AFTER_ANOTHER, 80, 5)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    right(world, hopper_ranks.queued, MIXED, 60, 3)


@several
@pytest.mark.parametrize("op", OPS)
def test_results_are_always_the_same_bits(op: str, world: int) -> None:
    ranks = kept_ranks.run(
        hopper_ranks.repeated, Shape(op, 2048, 1536, 1024), 20, ranks_per_node=world,
        accelerator="hopper"
    )  # fmt: skip
    for sums in ranks:
        assert len(set(sums)) == 1
    if op == "gemm_all_reduce":
        assert len({sums[0] for sums in ranks}) == 1
    else:  # the checksum sees a difference
        assert len({sums[0] for sums in ranks}) == world


@worlds
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with calls between"])
def test_graphs(world: int, mixed: bool) -> None:
    right(world, hopper_ranks.replayed, MIXED[:3], 100, mixed)


@worlds
def test_known_calls(world: int) -> None:
    right(world, hopper_ranks.known, MIXED, 24)


@several
def test_two_streams(world: int) -> None:
    right(world, hopper_ranks.two_streams, MIXED, 30)
