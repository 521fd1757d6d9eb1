"""The GEMM ops of e4m3 operands on GPUs through the public API: right with all scales, the same bits,
in any timing, order and graph, whole and in parts."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import fp8_ranks
import hopper_ranks
import kept_ranks
import pytest
from calls import judged
from device_buffers import needs_gpus, several, worlds
from hopper_ranks import OPS, Shape, drawn_size
from kept_ranks import right
from test_parts_on_gpus import parts

from mkernel.plan.model import ScaleMode

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

MODES: tuple[ScaleMode, ...] = ("tensor", "row", "block")


def scaled(op: str, m: int, n: int, k: int, scales: ScaleMode = "row", **more: Any) -> Shape:
    """e4m3, with results in bfloat16."""
    given = {"out_dtype": "bfloat16", **more}
    return Shape(op, m, n, k, dtype="float8_e4m3fn", layout="column", scales=scales, **given)


def library(op: str, m: int, n: int, k: int, scales: ScaleMode = "row", **more: Any) -> Shape:
    """The same by a library's products."""
    return scaled(op, m, n, k, scales, path="library", **more)


def fused(op: str, m: int, n: int, k: int, scales: ScaleMode = "row", **more: Any) -> Shape:
    """The same by our own kernels, which add with fewer bits."""
    return scaled(op, m, n, k, scales, path="fused", fast=True, **more)


def promoted(op: str, m: int, n: int, k: int, scales: ScaleMode = "row", **more: Any) -> Shape:
    """The same, added up in float32."""
    return scaled(op, m, n, k, scales, path="fused", **more)


FUSED = [
    fused("all_gather_gemm", 2048, 512, 1024),
    fused("all_gather_gemm", 128, 768, 1040, out_dtype="float16"),
    fused("gemm_reduce_scatter", 2048, 768, 512),
    fused("gemm_all_reduce", 1000, 1024, 640, bias=True),
    fused("all_gather_gemm", 512, 256, 512, "tensor", bias=True),
    Shape("all_gather_gemm", 1024, 512, 1024),
    fused("gemm_reduce_scatter", 512, 1024, 512, "tensor"),
    scaled("gemm_all_reduce", 64, 1024, 512),
    fused("gemm_all_reduce", 512, 528, 528, "tensor"),
]
# By our own kernels, added up in float32.
PROMOTED = [
    promoted("all_gather_gemm", 2048, 512, 1024),
    promoted("all_gather_gemm", 128, 784, 1040, out_dtype="float16"),
    promoted("gemm_reduce_scatter", 2048, 768, 512),
    promoted("gemm_all_reduce", 1000, 1040, 640, bias=True),
    fused("gemm_reduce_scatter", 2048, 768, 512),
    promoted("all_gather_gemm", 512, 256, 512, "tensor", bias=True),
    promoted("gemm_reduce_scatter", 512, 1024, 528),
    scaled("gemm_all_reduce", 64, 1024, 512),
    promoted("gemm_all_reduce", 512, 528, 528, "tensor"),
]
# Of all tilings, by blocks that push and by copy engines, with sizes that tiles do not divide.
EXACT = [
    fused("all_gather_gemm", 64, 256, 512),
    fused("all_gather_gemm", 2400, 1040, 496),
    fused("all_gather_gemm", 8192, 2048, 512, "tensor"),
    fused("all_gather_gemm", 8192, 2048, 512, out_dtype="float16"),
    fused("gemm_reduce_scatter", 256, 272, 512),
    fused("gemm_reduce_scatter", 4096, 2048, 512, "tensor", out_dtype="float16"),
    fused("gemm_reduce_scatter", 8192, 2048, 496),
    fused("gemm_all_reduce", 300, 272, 512),
    fused("gemm_all_reduce", 4096, 2064, 512),
    fused("all_gather_gemm", 256, 10240, 512),  # of 192 columns
    fused("gemm_reduce_scatter", 256, 10240, 512),
]
EXACT_PROMOTED = [dataclasses.replace(shape, fast=False) for shape in EXACT]
# Small ones, which the planner leaves to a library, and larger ones, which it does not.
KNOWN = [
    scaled("all_gather_gemm", 128, 512, 1024, fast=True),
    scaled("all_gather_gemm", 128, 512, 1024, "block"),
    scaled("gemm_reduce_scatter", 128, 512, 1024, "tensor", fast=True),
    scaled("gemm_reduce_scatter", 128, 512, 1024, bias=True),
    scaled("gemm_all_reduce", 64, 1024, 512),
]
KNOWN_FUSED = [
    scaled("all_gather_gemm", 1024, 5120, 8192, fast=True),
    scaled("gemm_reduce_scatter", 1024, 5120, 8192, fast=True),
    scaled("gemm_reduce_scatter", 1024, 5120, 8192),
]

# In parts, of one product and one collective, and calls of other operands between.
MIXED = [
    library("all_gather_gemm", 2048, 512, 1024, chunk=512),
    library("gemm_reduce_scatter", 2048, 768, 512, chunk=256),
    library("gemm_all_reduce", 1000, 1024, 640, "block", chunk=128),
    library("all_gather_gemm", 128, 256, 4096),
    library("gemm_reduce_scatter", 256, 1024, 512, "tensor"),
    Shape("all_gather_gemm", 1024, 512, 1024),
    library("gemm_all_reduce", 64, 1024, 512),
    Shape("gemm_reduce_scatter", 1024, 1024, 512),
    library("gemm_all_reduce", 1, 4096, 512, norm="residual"),
    library("gemm_all_reduce", 64, 1024, 512, "tensor", norm="residual", bias=True),
    library("gemm_all_reduce", 1526, 5440, 256, norm="alone", out_dtype="float16"),
    library("gemm_all_reduce", 1000, 1024, 640, "block", norm="residual", chunk=128),
]


def drawn(chance: random.Random, world: int, make: Any = scaled, most_k: int = 2600) -> Shape:
    """Any legal shape, a third of them in parts."""
    size = partial(drawn_size, chance)
    op, mode = chance.choice(OPS), chance.choice(MODES if make is scaled else MODES[:2])
    rows = size(3000, 1 if op == "gemm_all_reduce" else world)
    return make(
        op,
        rows,
        size(2000, 16),
        size(most_k, 128 if mode == "block" else 16),
        mode,
        out_dtype=chance.choice(("bfloat16", "float16")),
        bias=chance.random() < 0.25,
        chunk=chance.choice((None, None, chance.randint(1, 1000))) if rows > 64 else None,
    )


def drawn_scaled(chance: random.Random, world: int) -> Shape:
    """Any legal shape of the planner's choice, or of the fused path."""
    make, most_k = chance.choice(((scaled, 2600), (fused, 1200), (promoted, 2600)))
    return drawn(chance, world, make, most_k)


by_sums = pytest.mark.parametrize("shapes", [EXACT, EXACT_PROMOTED], ids=["fast", "promoted"])


@worlds
@by_sums
def test_every_bit_of_the_fused_path(world: int, shapes: list[Shape]) -> None:
    right(world, fp8_ranks.exact, shapes)


@several
def test_large(world: int) -> None:
    shapes = [library(op, 8192, 2048, 2048, mode) for op in OPS for mode in MODES]
    found = kept_ranks.run(fp8_ranks.planned, shapes, ranks_per_node=world, accelerator="hopper")
    assert {kind for each in found for kind in each} == {
        "hopper.gather_parts",
        "hopper.reduce_parts",
    }
    right(world, judged, shapes, 1)


@several
@pytest.mark.parametrize("shapes", [KNOWN, KNOWN_FUSED], ids=["library", "fused"])
def test_known_calls(world: int, shapes: list[Shape]) -> None:
    """Native code starts those of the planner's choice."""
    right(world, hopper_ranks.known, shapes, 16)


@several
def test_products_accumulate_as_torch_s_do(world: int) -> None:
    shape = scaled("all_gather_gemm", 1024 * world, 1024, 8192, "tensor", chunk=512)
    for error, gap, fast_error, fast_gap in kept_ranks.run(
        fp8_ranks.fast, shape, ranks_per_node=world, accelerator="hopper"
    ):
        assert error < fast_error
        assert gap == fast_gap == 0


@several
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("parts", "no wait"),
        ("parts", "rows of other places"),
        ("parts", "rows of the call before"),
        ("library", "no wait"),
        *(
            (way, fault)
            for way in ("library", "fused")
            for fault in ("scales of other rows", "scales of the call before")
        ),
        ("library", "a block of K without its scale"),
        ("fused", "scales of b left out"),
    ],
)
def test_planted_faults_are_caught(world: int, op: str, way: str, fault: str) -> None:
    size = (2048, 512, 1024)
    if way == "parts":
        shape = parts(op, *size, 1024 // world)
    elif way == "library":
        shape = library(op, *size, "block" if "block" in fault else "row", chunk=1024 // world)
    else:
        shape = fused(op, *size)
    found = kept_ranks.run(
        fp8_ranks.faulty, way, fault, shape, ranks_per_node=world, accelerator="hopper"
    )
    assert sum(found) > 0


@several
def test_gathered_rows(world: int) -> None:
    """On all paths, whole and in parts."""
    size = "all_gather_gemm", 256 * world, 512, 512
    shapes = [fused(*size, mode) for mode in MODES[:2]]
    shapes += [library(*size, mode, chunk=chunk) for mode in MODES for chunk in (None, 96)]
    for shape in (*shapes, parts(*size, 96)):
        right(world, fp8_ranks.gathered, shape)
