"""GEMM+AllReduce and GEMM+ReduceScatter of few rows by one kernel, through the public API: right, the
same bits, in any timing, order and graph, between calls of other kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Final

import fp8_ranks
import hopper_ranks
import kept_ranks
import norm_ranks
import pytest
import sum_ranks
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import Shape
from kept_ranks import right
from sum_ranks import NormedProduct
from survivors import judge_absence, judge_survivors

import mkernel
from mkernel.backends.accelerators.hopper.machine import machine

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

OP: Final = "gemm_all_reduce"
SCATTER: Final = "gemm_reduce_scatter"
GATHER: Final = "all_gather_gemm"
worlds = pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
DRAWS = 160
# Each height of the kernel, whole and odd tiles, one wave of them and two, sums that travel in float32
# and rounded.
SUMS = [
    Shape(OP, 1, 4096, 2048, layout="column"),
    Shape(OP, 16, 1032, 4096),
    Shape(OP, 33, 8192, 512, dtype="float16"),
    Shape(OP, 128, 5120, 1048, layout="column"),
    Shape(OP, 256, 7168, 264),
    Shape(OP, 40, 17416, 264, layout="column"),  # a second wave of tiles
]
SCATTERED = [
    Shape(SCATTER, 4, 4096, 2048, layout="column"),
    Shape(SCATTER, 36, 1032, 4096, dtype="float16", bias=True),
    Shape(SCATTER, 256, 7168, 264),
    Shape(SCATTER, 20, 17416, 520),
]
SCALED = [
    Shape(op, m, n, k, "float8_e4m3fn", "column", None, out, scales, fast=True)
    for op, m, n, k, out, scales in (
        (OP, 16, 1040, 4096, "bfloat16", "row"),
        (OP, 128, 5120, 1040, "float16", "tensor"),
        (SCATTER, 64, 4096, 2048, "bfloat16", "row"),
        (SCATTER, 256, 7168, 272, "float16", "row"),
        (SCATTER, 36, 17424, 528, "bfloat16", "tensor"),
    )
]
FEW = [*SUMS, *SCATTERED, *SCALED]
# With norms in the kernel: each height, odd tiles, shares of one row and of none, eight parts of K.
NORMED = [
    NormedProduct(1, 4096, 2048, layout="column"),
    NormedProduct(16, 1032, 4096, norm="alone"),
    NormedProduct(33, 8192, 512, dtype="float16", bias=True),
    NormedProduct(128, 5120, 1048, layout="column"),
    NormedProduct(256, 7168, 264),
    NormedProduct(3, 264, 8192, norm="alone", bias=True),
    NormedProduct(64, 8192, 4096),
]
IN_TWO_WAVES = NormedProduct(40, 17416, 264, layout="column")  # behind the kernel
MIXED = [
    *FEW,
    Shape(GATHER, 1024, 512, 1024),
    Shape(OP, 64, 1024, 512, path="library"),
    Shape(SCATTER, 256, 1024, 512, path="library"),
    Shape(OP, 2048, 2048, 512),
    Shape(GATHER, 64, 512, 1024, path="library"),
]


@pytest.fixture(scope="module")
def constants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel takes whatever fits, with norms in it."""
    constants = machine().constants
    assert constants.few_rows is not None
    everywhere = {"most_rows": 256, "least_columns": 1, "float8": True, "normalises": True}
    few = constants.few_rows.model_copy(update=everywhere)
    file = tmp_path_factory.mktemp("few_rows") / "constants.json"
    file.write_text(constants.model_copy(update={"few_rows": few}).model_dump_json())
    return file


@pytest.fixture(autouse=True)
def always(constants_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused path, and the kernel wherever it fits."""
    monkeypatch.setenv("MKERNEL_CONSTANTS", str(constants_file))
    monkeypatch.setenv("MKERNEL_PATH", "fused")


def drawn(chance: random.Random) -> Shape:
    """Any legal shape of up to 256 rows, for up to four ranks."""
    op = chance.choice((OP, SCATTER))
    m = chance.choice((1, 2, 8, 15, 16, 17, 32, 64, 100, 128, 129, 256, chance.randint(1, 256)))
    n = 8 * chance.randint(1, chance.choice((4, 40, 160, 1100, 2400)))
    k = 8 * chance.randint(1, chance.choice((2, 40, 400, 1000)))
    m = m if op == OP else min(256, -(-m // 4) * 4)
    out, bias = chance.choice(("bfloat16", "float16")), chance.random() < 0.25
    if chance.random() < 0.3:
        scales = chance.choice(("row", "tensor"))
        n, k = (-(-size // 16) * 16 for size in (n, k))
        return Shape(op, m, n, k, "float8_e4m3fn", "column", None, out, scales, True, bias)
    return Shape(op, m, n, k, out, chance.choice(("row", "column")), bias=bias)


@worlds
def test_that_it_is_this_kernel(world: int) -> None:
    kinds = kept_ranks.run(fp8_ranks.planned, FEW, ranks_per_node=world, accelerator="hopper")
    for found in kinds:
        assert found == ["hopper.few_rows"] * len(FEW)


@worlds
def test_every_bit_of_exact_sums(world: int) -> None:
    right(world, fp8_ranks.exact, SCALED)


@several
def test_sums_in_float32_are_another_kernels(world: int) -> None:
    """Which moves them into other registers now and then."""
    exact = [replace(shape, fast=False) for shape in SCALED]
    kinds = kept_ranks.run(fp8_ranks.planned, exact, ranks_per_node=world, accelerator="hopper")
    assert not any("few_rows" in kind for found in kinds for kind in found)


@several
@pytest.mark.parametrize("fault", ["scales of other rows", "scales of the call before"])
@pytest.mark.parametrize("shape", [SCALED[0], SCALED[2]], ids=str)
def test_wrong_scales_are_seen(world: int, shape: Shape, fault: str) -> None:
    found = kept_ranks.run(
        fp8_ranks.faulty_fused, fault, shape, ranks_per_node=world, accelerator="hopper"
    )
    assert all(wrong > 0 for wrong in found)


@worlds
def test_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    right(world, hopper_ranks.judged, [*FEW, *(drawn(chance) for _ in range(DRAWS))], seed)


@several
def test_late_ranks_and_reused_memory(world: int) -> None:
    right(world, hopper_ranks.skewed, MIXED, 80, 2)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    right(world, hopper_ranks.queued, MIXED, 1000, 3)


@several
@pytest.mark.parametrize("shape", [SUMS[3], SCATTERED[2]], ids=str)
def test_results_are_always_the_same_bits(world: int, shape: Shape) -> None:
    ranks = kept_ranks.run(
        hopper_ranks.repeated, shape, 20, ranks_per_node=world, accelerator="hopper"
    )
    assert all(len(set(sums)) == 1 for sums in ranks)
    if shape.op == OP:
        assert len({bits for sums in ranks for bits in sums}) == 1


@worlds
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with calls between"])
def test_graphs(world: int, mixed: bool) -> None:
    right(world, hopper_ranks.replayed, FEW, 100, mixed)


@worlds
def test_known_calls(world: int) -> None:
    right(world, hopper_ranks.known, FEW, 24)


@several
def test_zeros_arrive(world: int) -> None:
    right(world, hopper_ranks.of_zeros, SUMS)


@several
def test_bias_is_added_once(world: int) -> None:
    right(world, hopper_ranks.with_bias, SUMS)


@worlds
def test_norms_behind_it(world: int) -> None:
    right(world, sum_ranks.normed_products)


def drawn_norm(chance: random.Random) -> NormedProduct:
    """Any legal shape of up to 256 rows, with a norm."""
    shape = drawn(chance)
    while shape.scales is not None:
        shape = drawn(chance)
    return NormedProduct(
        shape.m, shape.n, shape.k, shape.dtype, shape.layout,
        chance.choice(("alone", "residual")), shape.bias,
    )  # fmt: skip


@several
def test_norms_are_in_the_kernel_where_all_tiles_run_at_once(world: int) -> None:
    right(world, norm_ranks.inside, NORMED, True)
    right(world, norm_ranks.inside, [IN_TWO_WAVES], False)


@several
def test_random_shapes_with_norms(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    shapes = [*NORMED, IN_TWO_WAVES, *(drawn_norm(chance) for _ in range(DRAWS))]
    right(world, hopper_ranks.judged, shapes, seed)


@several
def test_norms_with_late_ranks_and_other_calls(world: int) -> None:
    right(world, hopper_ranks.skewed, [*NORMED, *MIXED], 60, 2)


@several
def test_norms_of_many_calls_in_the_queue(world: int) -> None:
    right(world, hopper_ranks.queued, [*NORMED, *MIXED], 400, 3)


@several
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with calls between"])
def test_norms_in_graphs(world: int, mixed: bool) -> None:
    right(world, hopper_ranks.replayed, [*NORMED, IN_TWO_WAVES], 60, mixed)


@several
@pytest.mark.parametrize("shape", [NORMED[3], NORMED[6]], ids=str)
def test_normed_results_are_always_the_same_bits(world: int, shape: NormedProduct) -> None:
    ranks = mkernel.launch(
        norm_ranks.same_bits, shape, 20, ranks_per_node=world, accelerator="hopper", timeout_s=30
    )
    assert len({bits for sums in ranks for bits in sums}) == 1


@several
@pytest.mark.parametrize("shape", [NORMED[3], NORMED[6]], ids=str)
def test_norms_while_others_have_some_multiprocessors(world: int, shape: NormedProduct) -> None:
    right(world, norm_ranks.crowded, shape, 20)


@several
def test_the_last_block_normalises_the_rows_of_those_that_left(world: int) -> None:
    right(world, norm_ranks.planted, NORMED[3], norm_ranks.LEFT)


@several
def test_rows_that_are_never_said_to_be_whole_are_seen(world: int) -> None:
    """A planted fault: the blocks that come are never as many as tiles, so each leaves."""
    found = mkernel.launch(
        norm_ranks.planted, NORMED[3], 1 << 20, ranks_per_node=world, accelerator="hopper",
        timeout_s=30,
    )  # fmt: skip
    assert all(found)


@several
@pytest.mark.parametrize("shape", [SUMS[1], SCATTERED[1]], ids=str)
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(
    world: int, shape: Shape
) -> None:
    judge_absence("hopper", shape, world)


@several
@pytest.mark.parametrize("shape", [SUMS[2], SCATTERED[2]], ids=str)
def test_a_rank_killed_while_kernels_wait_for_it(world: int, shape: Shape) -> None:
    judge_survivors("hopper", shape, world)
