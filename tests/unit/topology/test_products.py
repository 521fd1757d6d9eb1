"""Predicted times of products, by hand: in waves of tiles that load lines, and without waves."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import pytest
from pydantic import ValidationError

from mkernel.topology.cost import LoadedLines, PathConstants, StreamedProducts, Tile, gemm_us

COMMON = {"start_us": 0.0, "exchange_us": 0.0, "egress_gbs": 1.0}
SMALL = Tile(rows=10, columns=10, tflops_per_core=1.0)
LARGE = Tile(rows=20, columns=10, cores=2, tflops_per_core=1.0)
"""A product of 1000 of K takes either 0.2 us."""


def path_of(**fields: Any) -> PathConstants:
    return PathConstants.model_validate({**COMMON, **fields})


def streamed(**changed: Any) -> StreamedProducts:
    """Nothing but the products of 10 x 10 tiles costs anything, or what is changed."""
    free = {"depth_us": 0.0, "results_gbs": 1e12, "loads_gbs": 1e12, "sums_gbs": 1e12}
    return StreamedProducts.model_validate({"tiles": (SMALL,), **free, **changed})


def of(found: StreamedProducts, m: int, n: int, k: int, parts: int = 1) -> float:
    return path_of(streamed=found, splits=(parts,)).products.fastest(1, m, n, k, 4, 1.0, 2).total_us


def in_waves(path: PathConstants, m: int, k: int, memory_gbs: float = 1e12) -> Any:
    """Return the fastest product of [m, k] and [k, 10] on four cores."""
    return path.products.fastest(1, m, 10, k, 4, memory_gbs, 2)


def test_streamed_products_have_no_waves() -> None:
    """15 tiles on four cores are 3.75 rounds, and edges are filled up."""
    assert of(streamed(), 30, 50, 1000) == pytest.approx(15 * 0.2 / 4)
    assert of(streamed(), 21, 41, 1000) == pytest.approx(of(streamed(), 30, 50, 1000))


def test_what_streamed_products_cost_beside() -> None:
    base = of(streamed(), 30, 50, 1000)
    assert of(streamed(depth_us=3.0), 30, 50, 2000) == pytest.approx(2 * base + 6)
    assert of(streamed(depth_us=3.0), 30, 50, 2000, parts=2) == pytest.approx(2 * base + 3)
    assert of(streamed(results_gbs=1.0), 30, 50, 1000) == pytest.approx(base + 3.0)  # 3 KB
    assert of(streamed(sums_gbs=1.0), 30, 50, 1000) == pytest.approx(base)
    assert of(streamed(sums_gbs=1.0), 30, 50, 1000, parts=2) == pytest.approx(base + 24.0)
    assert of(streamed(loads_gbs=1.0), 30, 50, 1000) == pytest.approx(160.0)  # which hides them


def test_streamed_products_of_uneven_depths_are_slower() -> None:
    slow = streamed(even_depth=8, uneven_rate=0.5)
    assert of(slow, 30, 50, 1000) == pytest.approx(of(streamed(), 30, 50, 1000))
    assert of(slow, 30, 50, 1004) == pytest.approx(2 * of(streamed(), 30, 50, 1004))


def test_the_fastest_of_its_tiles_is_taken() -> None:
    both = streamed(tiles=(SMALL, Tile(rows=40, columns=10, tflops_per_core=1.6)))
    assert of(both, 40, 10, 1000) == pytest.approx(0.8 / 4 / 1.6)
    assert of(both, 10, 10, 1000) == pytest.approx(0.2 / 4)


def test_k_is_cut_where_that_is_faster() -> None:
    made = streamed(depth_us=3.0)
    path = path_of(streamed=made, splits=(1, 2), split_us=2.0)

    def taken(k: int) -> float:
        return path.products.fastest(1, 30, 50, k, 4, 1.0, 2).total_us

    assert taken(1000) == pytest.approx(of(made, 30, 50, 1000))
    assert taken(4000) == pytest.approx(of(made, 30, 50, 4000, parts=2) + 2.0)


def test_tiles_wait_for_lines_that_all_of_them_load() -> None:
    """Eight steps of 128 for K of 1000; a small tile has 20 rows in each, a large one 30."""
    lines = LoadedLines(depth=128, uneven=2.0, lines_a_us=1.0)  # products take no time beside that
    small, large = (path_of(tiles=(tile,), loaded=lines) for tile in (SMALL, LARGE))
    assert in_waves(small, 30, 1024).total_us == pytest.approx(8 * 3 * 20)
    assert in_waves(large, 40, 1024).total_us == pytest.approx(8 * 2 * 30)
    begin = 8 / 128  # of rows of 1000
    assert in_waves(small, 30, 1000).total_us == pytest.approx(480 * (begin + 2 * (1 - begin)))


def test_waves_take_as_long_as_loads_do_where_these_are_slower() -> None:
    lines = LoadedLines(depth=128, uneven=1.0, lines_a_us=1000.0)
    small, large, both = (
        path_of(tiles=tiles, loaded=lines, tile_us=1.0)
        for tiles in ((SMALL,), (LARGE,), (SMALL, LARGE))
    )
    full = 8 * 4 * 20 / 1000  # 0.64 us for four at once; for one 0.16, less than its products
    assert in_waves(small, 80, 1000).total_us == pytest.approx(2 * (1 + full))
    assert in_waves(small, 90, 1000).total_us == pytest.approx(2 * (1 + full) + 1.2)
    assert in_waves(small, 90, 1000).tile_us == pytest.approx(1 + full)
    assert in_waves(small, 10, 1000).tile_us == pytest.approx(1 + 0.2)
    of_two = 8 * 2 * 30 / 1000
    assert in_waves(large, 40, 1000).total_us == pytest.approx(1 + of_two)
    assert both.products.fastest(1, 20, 20, 1000, 4, 1e9, 2).tile == 1


def test_every_machine_finds_the_same_bits() -> None:
    """Ranks plan by these times. The digest is that of the same formulas in Python, before they were
    native: its integers are exact, and its doubles are rounded after every step."""
    draw, found = random.Random(56), hashlib.sha256()
    lines = LoadedLines(depth=64, uneven=1.7, lines_a_us=7_777.7)
    tiles = tuple(
        Tile(rows=rows, columns=columns, cores=cores, tflops_per_core=rate)
        for rows, columns, cores, rate in ((256, 128, 2, 4.9), (128, 256, 1, 5.3), (64, 64, 1, 3.1))
    )
    common = {"splits": (1, 2, 3), "split_us": 2.3, "tile_us": 0.7}
    free = {"depth_us": 2.9, "results_gbs": 1893.0, "loads_gbs": 3291.0, "sums_gbs": 2717.0}
    uneven = {"even_depth": 64, "uneven_rate": 0.83}
    paths = (
        path_of(tiles=tiles, loaded=lines, **common),
        path_of(streamed=streamed(tiles=tiles, **free, **uneven), **common),
    )
    for _ in range(300):
        m, n, k = (draw.randint(1, 1 << draw.randint(3, 31)) for _ in range(3))
        owners, cores, itemsize = draw.randint(1, 8), draw.randint(1, 132), draw.choice((1, 2, 4))
        times = [gemm_us(
            m, n, k, tile_m=128, tile_n=256, cores=cores, tflops_per_core=5.1, memory_gbs=3777.0,
            itemsize=itemsize, out_itemsize=4,
        )]  # fmt: skip
        for path in paths:
            for one in path.products.each(owners, m, n, k, cores, 3777.0, itemsize):
                times += [one.total_us, one.tile_us]
        found.update(struct.pack(f"<{len(times)}d", *times))
    assert found.hexdigest() == BITS


BITS = "b416a1cec394da4335532e9507a2b1d37b4c0386bf69f4b18a37ce94de923fbb"


@pytest.mark.parametrize("given", [{}, {"tiles": (SMALL,), "streamed": streamed()}])
def test_a_path_has_products_of_one_kind(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="either tiles, at least one, or streamed"):
        PathConstants.model_validate({**COMMON, **given})


@pytest.mark.parametrize(
    "fields",
    [
        {"splits": (0,)},
        {"splits": (1, 2**31)},
        {"tiles": ({**SMALL.model_dump(), "rows": 10**30},)},
    ],
    ids=["no part", "many parts", "large tiles"],
)
def test_sizes_that_native_formulas_cannot_take_are_refused(fields: dict[str, Any]) -> None:
    """A division by no parts would end the process."""
    with pytest.raises(ValidationError):
        path_of(**fields)
