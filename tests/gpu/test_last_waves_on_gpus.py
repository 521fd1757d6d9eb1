"""Tiles of a last wave in parts along K: right, the same bits, in any timing and graph."""

from __future__ import annotations

import random

import hopper_ranks
import kept_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import OPS, Shape, cut, drawn
from kept_ranks import right

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]

worlds = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
parts = pytest.mark.parametrize("splits", [2, 3, 4])
DRAWS = 60
# Waves before the last one, of each tiling; and K of fewer steps than there are parts.
LONG = [
    *(Shape(op, 3400, 4096, 4096) for op in OPS),
    *(Shape(op, 4096, 2184, 2056, layout="column", dtype="float16") for op in OPS),
    *(Shape(op, 2560, 2560, 128, bias=True) for op in OPS),
]
# Of five clusters' rows of the all-reduce the first of two owners has three.
MIXED = [
    Shape("all_gather_gemm", 1032, 776, 1544),
    Shape("gemm_reduce_scatter", 1032, 1288, 520),
    Shape("gemm_all_reduce", 1032, 1032, 904, layout="column"),
]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls would take the library."""
    monkeypatch.setenv("MKERNEL_PATH", "fused")


@worlds
@parts
def test_random_shapes(splits: int, world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    shapes = [drawn(chance, world) for _ in range(DRAWS)]
    print(f"seed {seed}")
    right(world, cut, splits, hopper_ranks.judged, shapes, seed)


@worlds
@parts
def test_waves_before_the_last_one(splits: int, world: int) -> None:
    right(world, cut, splits, hopper_ranks.judged, LONG, splits)


@worlds
@parts
def test_late_ranks_and_reused_memory(splits: int, world: int) -> None:
    """What a call before has kept is not taken for this one's: inputs are fresh."""
    right(world, cut, splits, hopper_ranks.skewed, MIXED, 40, splits)


@worlds
def test_graphs(world: int) -> None:
    right(world, cut, 3, hopper_ranks.replayed, MIXED, 60, True)


@worlds
@pytest.mark.parametrize("op", OPS)
def test_results_are_always_the_same_bits(op: str, world: int) -> None:
    shape = Shape(op, 2064, 1544, 1032)
    ranks = kept_ranks.run(
        cut, 4, hopper_ranks.repeated, shape, 20, ranks_per_node=world, accelerator="hopper"
    )
    for sums in ranks:
        assert len(set(sums)) == 1
    wanted = 1 if op == "gemm_all_reduce" else world
    assert len({sums[0] for sums in ranks}) == wanted
