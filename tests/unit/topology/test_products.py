"""Predicted times of products, by hand: in waves of tiles that load lines, and without waves."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mkernel.topology.cost import (
    LoadedLines,
    PathConstants,
    StreamedProducts,
    Tile,
    fastest,
    in_waves,
    products,
)

COMMON = {"start_us": 0.0, "exchange_us": 0.0, "egress_gbs": 1.0}
SMALL = Tile(rows=10, columns=10, tflops_per_core=1.0)
LARGE = Tile(rows=20, columns=10, cores=2, tflops_per_core=1.0)
"""A product of 1000 of K takes either 0.2 us."""


def streamed(**changed: Any) -> StreamedProducts:
    """Nothing but the products of 10 x 10 tiles costs anything, or what is changed."""
    free = {"depth_us": 0.0, "results_gbs": 1e12, "loads_gbs": 1e12, "sums_gbs": 1e12}
    return StreamedProducts.model_validate({"tiles": (SMALL,), **free, **changed})


def of(found: StreamedProducts, m: int, n: int, k: int, parts: int = 1) -> float:
    return found.total_us(m, n, k, parts, cores=4, itemsize=2)


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
    path = PathConstants.model_validate(
        {**COMMON, "streamed": made, "splits": (1, 2), "split_us": 2.0}
    )

    def taken(k: int) -> float:
        return fastest(products(path, 1, 30, 50, k, cores=4, memory_gbs=1.0, itemsize=2)).total_us

    assert taken(1000) == pytest.approx(of(made, 30, 50, 1000))
    assert taken(4000) == pytest.approx(of(made, 30, 50, 4000, parts=2) + 2.0)


def test_tiles_wait_for_lines_that_all_of_them_load() -> None:
    """Eight steps of 128 for K of 1000; a small tile has 20 rows in each, a large one 30."""
    lines = LoadedLines(depth=128, uneven=2.0, lines_a_us=1000.0)
    assert lines.loaded_us(SMALL, 3, 1024) == pytest.approx(8 * 3 * 20 / 1000)
    assert lines.loaded_us(LARGE, 3, 1024) == pytest.approx(8 * 3 * 30 / 1000)
    begin = 8 / 128  # of rows of 1000
    assert lines.loaded_us(SMALL, 3, 1000) == pytest.approx(0.48 * (begin + 2 * (1 - begin)))


def test_waves_take_as_long_as_loads_do_where_these_are_slower() -> None:
    lines = LoadedLines(depth=128, uneven=1.0, lines_a_us=1000.0)
    path = PathConstants.model_validate(
        {**COMMON, "tiles": (SMALL, LARGE), "loaded": lines, "tile_us": 1.0}
    )
    full = 8 * 4 * 20 / 1000  # 0.64 us for four at once; for one 0.16, less than its products
    assert in_waves(path, SMALL, 8, 1000, 4).total_us == pytest.approx(2 * (1 + full))
    assert in_waves(path, SMALL, 9, 1000, 4).total_us == pytest.approx(2 * (1 + full) + 1.2)
    assert in_waves(path, SMALL, 9, 1000, 4).tile_us == pytest.approx(1 + full)
    assert in_waves(path, SMALL, 1, 1000, 4).tile_us == pytest.approx(1 + 0.2)
    of_two = 8 * 2 * 30 / 1000
    assert in_waves(path, LARGE, 2, 1000, 4).total_us == pytest.approx(1 + of_two)
    found = fastest(products(path, 1, 20, 20, 1000, cores=4, memory_gbs=1e9, itemsize=2))
    assert found.tile == LARGE


@pytest.mark.parametrize("given", [{}, {"tiles": (SMALL,), "streamed": streamed()}])
def test_a_path_has_products_of_one_kind(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="either tiles, at least one, or streamed"):
        PathConstants.model_validate({**COMMON, **given})
