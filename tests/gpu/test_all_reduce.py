"""AllReduce on GPUs, beside ``test_calls_on_gpus``: results in e4m3, and known calls."""

from __future__ import annotations

import hopper_ranks
import norm_ranks
import pytest
from device_buffers import needs_gpus, worlds
from families import ROWS
from hopper_ranks import Shape, normed, rows
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


# By mail in one exchange, of a row of several vectors a thread too, and in two; by flags, whose rows
# threads that normalise them keep, or read again.
QUANTISED = [
    rows(1, 4096, norm="residual"),
    rows(700, 1032, norm="alone"),
    rows(5, 24576, norm="alone"),
    rows(1024, 8192, norm="residual"),
    rows(1031, 4104, "float16", norm="residual"),
    rows(4096, 4096, norm="residual"),
    rows(3000, 16392, norm="alone"),
]
# Of products: in the kernel that takes rows by mail, rounded ones and others, or in one behind.
PRODUCTS = [
    normed(1, 8192, 512, layout="column"),
    normed(33, 4096, 1024, "float16", norm="alone"),
    normed(1526, 5440, 256),
    normed(64, 1032, 512, bias=True),
    *(
        Shape("gemm_all_reduce", m, n, k, "float8_e4m3fn", "column", None, "bfloat16", "row", True,
              norm="residual")
        for m, n, k in ((1, 4096, 2048), (64, 7168, 272), (1024, 2048, 512))
    ),
]  # fmt: skip


@worlds
def test_rows_in_e4m3_are_those_of_the_host(world: int) -> None:
    right(world, norm_ranks.quantised, QUANTISED, 3)


@worlds
@pytest.mark.parametrize("path", ["library", "fused"])
def test_rows_of_products_in_e4m3(path: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_PATH", path)
    right(world, norm_ranks.quantised, PRODUCTS, 3)


@worlds
def test_known_calls(world: int) -> None:
    """Native code starts them, whichever way they take."""
    right(world, hopper_ranks.known, [shape for shape in ROWS if shape.to == "own"], 24)
