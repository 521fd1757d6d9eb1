"""The GEMM ops of 16-bit operands on GPUs by a library's products in parts, beside copy engines: right,
the same bits, in any timing, order and graph."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import fp8_ranks
import kept_ranks
import parts_ranks
import pytest
from device_buffers import needs_gpus, several
from hopper_ranks import OPS, Shape, drawn_size, normed
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


def parts(op: str, m: int, n: int, k: int, chunk: int, **more: Any) -> Shape:
    """In parts of so many rows."""
    return Shape(op, m, n, k, path="library", chunk=chunk, **more)


# With calls of one product and one collective, and of the fused path, between.
MIXED = [
    parts("all_gather_gemm", 2048, 512, 1024, 512),
    parts("all_gather_gemm", 2048, 264, 328, 300, dtype="float16", bias=True),
    parts("gemm_reduce_scatter", 2048, 768, 512, 256),
    parts("gemm_all_reduce", 1001, 1024, 640, 128, layout="column", bias=True),
    parts("gemm_all_reduce", 3, 64, 256, 1),
    Shape("all_gather_gemm", 128, 256, 4096, path="library"),
    Shape("gemm_reduce_scatter", 2048, 1024, 512, path="fused"),
    Shape("gemm_all_reduce", 64, 1024, 512, path="library"),
    normed(1001, 1032, 520, bias=True, path="library", chunk=64),
    normed(300, 264, 512, "float16", "column", "alone", path="library", chunk=1000),
]

# Of which the planner chooses the way.
KNOWN = [
    Shape("all_gather_gemm", 1032, 520, 1024),
    Shape("all_gather_gemm", 1032, 264, 520, layout="column", bias=True),
    Shape("gemm_reduce_scatter", 1032, 776, 512, dtype="float16"),
    Shape("gemm_all_reduce", 1031, 520, 640, bias=True),
    Shape("all_gather_gemm", 1032, 520, 512, gathered=True),
    Shape("gemm_all_reduce", 1031, 520, 512, norm="residual"),
]


def drawn(chance: random.Random, world: int) -> Shape:
    """Any legal shape, in parts of any number of rows."""
    size = partial(drawn_size, chance)
    op = chance.choice(OPS)
    rows = size(3000, 1 if op == "gemm_all_reduce" else world)
    each = -(-rows // world)
    return parts(
        op, rows, size(2000, 8), size(2600, 8),
        chance.choice((each, -(-each // 2), chance.randint(-(-each // 16), each))),
        dtype=chance.choice(("bfloat16", "float16")),
        layout=chance.choice(("row", "column")),
        bias=chance.random() < 0.25,
    )  # fmt: skip


@several
def test_calls_take_this_way(world: int) -> None:
    found = kept_ranks.run(fp8_ranks.planned, MIXED[:5], ranks_per_node=world, accelerator="hopper")
    kinds = ["hopper.gather_parts"] * 2 + ["hopper.reduce_parts"] * 3
    assert found == [kinds] * world


@several
def test_known_calls(world: int) -> None:
    """Native code starts those of the planner's choice."""
    right(world, parts_ranks.known, KNOWN, 16)
