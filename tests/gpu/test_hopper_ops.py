"""The GEMM ops on GPUs through the public API, beside ``test_calls_on_gpus``: large ones, and those
that native code starts."""

from __future__ import annotations

import calls
import hopper_ranks
import pytest
from device_buffers import needs_gpus, several, worlds
from families import PRODUCTS
from hopper_ranks import OPS, Shape
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture(autouse=True, params=["fused", "library"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of one path: left to the planner, small calls would all take the same."""
    monkeypatch.setenv("MKERNEL_PATH", request.param)


@worlds
def test_large(world: int) -> None:
    sizes = ((4096, 4096, 2048), (8192, 1024, 4096))
    right(world, calls.judged, [Shape(op, *each) for op in OPS for each in sizes], 1)


@several
def test_sums_of_about_as_many_tiles_as_there_are_flags(world: int) -> None:
    right(world, hopper_ranks.of_many_tiles)


# Those that return more than a product: gathered rows, pushed by blocks and by copy engines; norms, of
# few rows and of many.
MORE = [
    Shape("all_gather_gemm", 1024, 512, 1024, gathered=True),
    Shape("all_gather_gemm", 8192, 512, 4096, dtype="float16", gathered=True),
    Shape("gemm_all_reduce", 64, 1024, 512, bias=True, norm="alone"),
    Shape("gemm_all_reduce", 512, 1024, 320, layout="column", norm="residual"),
    Shape("gemm_all_reduce", 2048, 2048, 512, norm="residual"),
]


@worlds
def test_known_calls(world: int) -> None:
    right(world, hopper_ranks.known, [*PRODUCTS, *MORE], 24)
