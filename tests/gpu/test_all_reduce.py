"""AllReduce by mail and in two exchanges, with its norm, through the public API: right, the same bits,
in any timing, order and graph, between calls of other kernels; and norms behind GEMM+AllReduce."""

from __future__ import annotations

import random
from typing import Any

import hopper_ranks
import kept_ranks
import pytest
import sum_ranks
from device_buffers import needs_gpus, takes_ranks
from hopper_ranks import Shape
from kept_ranks import right
from sum_ranks import Rows
from survivors import judge_absence, judge_survivors

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

worlds = pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
# One row, more than multiprocessors; rows of one vector, of several a thread; two exchanges, by flags,
# by mail, and by flags since results are symmetric.
SOME = [
    Rows(1, 8192, norm="residual"),
    Rows(300, 4096, norm="residual"),
    Rows(64, 8, "float16"),
    Rows(5, 24576, norm="alone"),
    Rows(128, 8192, to="x"),
    Rows(3000, 4096, norm="residual"),
    Rows(4096, 4096, norm="residual", to="x"),
    Rows(4000, 4096, to="symmetric"),
    Rows(1031, 4104, norm="residual"),
    Rows(1031, 4104, "float16", to="symmetric"),
]
MIXED: list[Any] = [
    *SOME,
    Shape("all_gather_gemm", 1024, 512, 1024),
    Shape("gemm_all_reduce", 64, 1024, 512, path="library"),
    Shape("gemm_all_reduce", 1031, 4104, 512, path="library", bias=True),
    Shape("gemm_all_reduce", 2048, 2048, 512, path="fused"),
]


@worlds
def test_random_rows(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    right(world, hopper_ranks.judged, [*SOME, *sum_ranks.drawn(seed, 80)], seed)


@several
def test_late_ranks_and_reused_memory(world: int) -> None:
    right(world, hopper_ranks.skewed, MIXED, 60, 2)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    right(world, hopper_ranks.queued, MIXED, 300, 3)


@several
def test_results_are_the_same_bits_everywhere_and_always(world: int) -> None:
    ranks = kept_ranks.run(
        sum_ranks.same_bits, [each for each in SOME if each.to != "x"], 4, ranks_per_node=world,
        accelerator="hopper"
    )  # fmt: skip
    assert all(each == ranks[0] for each in ranks)
    sums = ranks[0]
    assert all(len(set(sums[at : at + 3])) == 1 for at in range(0, len(sums), 3))


@worlds
def test_graphs(world: int) -> None:
    right(world, hopper_ranks.replayed, [*SOME[:6], *SOME[7:]], 60, True)


@several
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(world: int) -> None:
    judge_absence("hopper", SOME[0], world)  # type: ignore[arg-type]


@several
def test_a_rank_killed_while_kernels_wait_for_it(world: int) -> None:
    judge_survivors("hopper", SOME[1], world)  # type: ignore[arg-type]


@worlds
def test_norms_behind_products(world: int) -> None:
    right(world, sum_ranks.normed_products)


@worlds
def test_rows_in_e4m3_are_those_of_the_host(world: int) -> None:
    right(world, sum_ranks.quantised)
