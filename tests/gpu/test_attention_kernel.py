"""Ring attention on `hopper` by one kernel: right in float64, in any timing, order and graph; faults
are seen."""

from __future__ import annotations

import random
from dataclasses import replace

import attention_ranks
import pytest
from attention_ranks import KERNEL_FAULTS, Attention, drawn_for_kernel
from device_buffers import needs_gpus, takes_ranks
from survivors import judge_absence, judge_survivors
from test_attention_on_gpus import both, launched, right, several

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

DRAWS = 40


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept ranks plan a size once, so these have processes of their own."""
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "kernel")


MIXED = [
    Attention(1, 4, 4, 256, causal=True, way="kernel"),
    Attention(2, 4, 1, 128, lies="positions", way="kernel"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions", way="kernel"),
    Attention(2, 2, 2, 384, dtype="float16", way="kernel"),
]


@several
def test_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    right(world, attention_ranks.judged, [drawn_for_kernel(chance) for _ in range(DRAWS)], seed)


@several
@both
def test_large(world: int, causal: bool) -> None:
    """More tiles than blocks, several chunks of each part."""
    shapes = [
        Attention(1, 8, 2, 4096, causal=causal, way="kernel"),
        Attention(1, 8, 8, 4096, causal=causal, lies="positions", way="kernel"),
    ]
    right(world, attention_ranks.judged, shapes, 1)


@several
def test_late_ranks_and_reused_memory(world: int) -> None:
    right(world, attention_ranks.skewed, MIXED, 24, 2)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    right(world, attention_ranks.queued, MIXED, 24, 3)


@several
def test_graphs(world: int) -> None:
    right(world, attention_ranks.replayed, MIXED, 24)


@several
def test_two_streams(world: int) -> None:
    right(world, attention_ranks.two_streams, MIXED, 16)


@several
@both
def test_results_are_always_the_same_bits(world: int, causal: bool) -> None:
    shape = Attention(1, 8, 2, 512, causal=causal, way="kernel")
    right(world, attention_ranks.repeated, shape, 12)


@several
@both
def test_extreme_scores(world: int, causal: bool) -> None:
    shape = Attention(1, 4, 2, 256, causal=causal, dtype="float16", way="kernel")
    right(world, attention_ranks.extreme, shape)


@several
@both
def test_nan_passes(world: int, causal: bool) -> None:
    right(world, attention_ranks.nan_passes, Attention(1, 2, 2, 256, causal=causal, way="kernel"))


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
def test_faults_are_seen(world: int) -> None:
    shape = Attention(1, 4, 2, 512, causal=True, way="kernel")
    for found in launched(world, attention_ranks.faulty_kernel, shape):
        assert {fault for fault, failures in found.items() if failures} == set(KERNEL_FAULTS)


@several
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(world: int) -> None:
    judge_absence("hopper", replace(MIXED[0], rows=512), world)


@several
def test_a_rank_killed_while_others_wait_for_it(world: int) -> None:
    judge_survivors("hopper", replace(MIXED[3], batch=1), world)
