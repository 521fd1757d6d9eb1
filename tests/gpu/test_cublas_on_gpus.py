"""Products of known calls go to cuBLAS without torch, and have the bits of torch.mm."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import cublas_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import OPS, Shape, drawn_size
from kept_ranks import right

import mkernel

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
DRAWS = 200


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_PATH", "library")


def drawn(chance: random.Random, world: int) -> Shape:
    """Of at least two rows a product, and terms that cuBLAS never leaves out."""
    size = partial(drawn_size, chance)
    op = chance.choice(OPS)
    return Shape(
        op,
        m=2 * size(1500, 1 if op == "gemm_all_reduce" else world),
        n=size(2000, 8),
        k=chance.choice((size(504, 8), size(4096, 128))),
        dtype=chance.choice(("bfloat16", "float16")),
        layout=chance.choice(("row", "column")),
    )


@several
def test_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    right(world, cublas_ranks.same_bits, [drawn(chance, world) for _ in range(DRAWS)], False)


@several
def test_products_in_parts(world: int) -> None:
    shapes = [
        Shape("all_gather_gemm", 1032, 520, 1024),
        Shape("all_gather_gemm", 1032, 264, 320, layout="column", dtype="float16"),
        Shape("gemm_reduce_scatter", 1032, 776, 512, dtype="float16"),
        Shape("gemm_all_reduce", 1031, 520, 640),
    ]
    right(world, cublas_ranks.same_bits, shapes, True)


@takes_ranks(2)
def test_two_worlds(tmp_path: Path) -> None:
    found = mkernel.launch(
        cublas_ranks.in_two_worlds, str(tmp_path), 20, ranks_per_node=2, accelerator="hopper"
    )
    assert found == [[], []]


@takes_ranks(2)
def test_switches_that_change_between_calls() -> None:
    right(2, cublas_ranks.switched)
