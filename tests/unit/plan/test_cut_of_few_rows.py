"""How the kernel for few rows cuts K: all cores, in one wave of tiles where that is possible."""

from __future__ import annotations

import pytest
from shipped import constants_of

from mkernel.plan.few_rows import MOST_SPLITS, Cut, cut, places
from mkernel.topology.cost import FewRowsConstants

CORES = 132


def shipped() -> FewRowsConstants:
    few = constants_of("hopper").few_rows
    assert few is not None
    return few


def made(n: int, k: int, cores: int = CORES) -> Cut:
    return cut(n, k, 2, cores, shipped())


@pytest.mark.parametrize(
    ("n", "k", "splits", "blocks"),
    [
        (4096, 2048, 3, 114),  # 32 clusters of 4 do not find a place on every device
        (8192, 4096, 2, 132),
        (7168, 8192, 2, 132),
        (16384, 1024, 1, 132),
        (512, 64, 1, 132),
    ],
)
def test_weights_are_read_by_clusters_that_find_a_place(
    n: int, k: int, splits: int, blocks: int
) -> None:
    how = made(n, k)
    assert (how.splits, how.splits * how.clusters, how.waves) == (splits, blocks, 1)


@pytest.mark.parametrize("blocks", range(1, MOST_SPLITS + 1))
@pytest.mark.parametrize(
    "parts", [(16,) * 6 + (18,) * 2, (18,) * 6 + (12,) * 2, (18,) * 7 + (6,)], ids=str
)
def test_clusters_find_a_place_however_cores_are_spread(
    parts: tuple[int, ...], blocks: int
) -> None:
    assert sum(parts) == CORES
    assert places(CORES, blocks) <= sum(part // blocks for part in parts)


@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (5120, 8192), (10040, 1480)])
def test_bytes_count_and_not_elements(n: int, k: int) -> None:
    assert cut(n, 2 * k, 1, CORES, shipped()) == made(n, k)


def test_few_columns_are_cut_into_the_most_parts() -> None:
    assert made(512, 8192).splits == MOST_SPLITS
    assert made(512, 8192, cores=4).splits == 1


@pytest.mark.parametrize(("n", "k"), [(10040, 1480), (8896, 392), (5120, 8192)])
def test_a_second_wave_costs_more_than_fuller_blocks_gain(n: int, k: int) -> None:
    """In two and three waves the first two of these took 17.3 and 30.8 us on two H100, 5 to 6 a further
    wave more than one of one (hopper_random_11_h100_2 of ways.json)."""
    assert made(n, k).waves == 1
    free = shipped().model_copy(update={"wave_us": 0.0, "block_gbs": 25.0})
    assert cut(n, k, 2, CORES, free).waves > 1


def test_every_further_wave_is_paid() -> None:
    """224 tiles are two waves of any cluster that finds a place."""
    few = shipped()
    how = cut(28672, 1024, 2, CORES, few)
    assert how.waves == 2
    assert how.total_us(few) == how.weights_us + few.wave_us


def test_weights_come_as_memory_or_a_block_draws_them() -> None:
    few = shipped().model_copy(update={"weights_gbs": 1000.0, "block_gbs": 100.0})
    assert cut(8192, 4096, 2, CORES, few).weights_us == pytest.approx(8192 * 4096 * 2 / 1e6)
    alone = few.model_copy(update={"weights_gbs": 1e6})
    assert cut(128, 64, 2, CORES, alone).weights_us == pytest.approx(128 * 64 * 2 / 1e5)
