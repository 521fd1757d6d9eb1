"""Experts in e4m3 on `hopper`, beside ``test_calls_on_gpus``: tokens are quantised once, as torch does
it; sums are float32; no 16-bit copy of a weight exists; faults are seen."""

from __future__ import annotations

from dataclasses import replace

import calls
import expert_scales_ranks
import pytest
import torch
from calls import Decisions
from device_buffers import needs_gpus, pair, worlds
from expert_scales_ranks import FAULTS
from in_world import TOLD_S
from kept_ranks import right, run
from moe_ranks import GATHERED, IN_ORDER, Moe

import mkernel
from mkernel.backends.accelerators.cuda.capabilities import MOE, ops
from mkernel.cases.base import TOLERANCE
from mkernel.plan.model import BLOCK

pytestmark = [
    needs_gpus(1),
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(MOE[0] not in ops(), reason="hopper does not claim MoE"),
]

SHAPE = Moe(70, 384, 256, 3, 3)
both_ways = pytest.mark.parametrize("decisions", [GATHERED, IN_ORDER], ids=["gathered", "in order"])


@worlds
@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_is_quantised_once_and_as_torch_does_it(
    world: int, decisions: Decisions, dtype: torch.dtype
) -> None:
    right(world, calls.decided, decisions, expert_scales_ranks.quantised_once, SHAPE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_all_sizes_are_quantised_to_torchs_bits(dtype: torch.dtype) -> None:
    """Rows of every exponent, whose scales are numbers of many bits, or powers of 2, of which many
    quotients lie halfway between two e4m3 numbers; zeros of both signs."""
    chance = torch.Generator("cuda").manual_seed(0)
    low, high = (-133, 126) if dtype == torch.bfloat16 else (-24, 14)
    sizes = torch.arange(low, high, device="cuda", dtype=torch.float64).exp2()[:, None]
    x = torch.randn(len(sizes), 4 * BLOCK, generator=chance, device="cuda", dtype=torch.float64)
    halves = torch.randint(-464, 465, (len(x), BLOCK), generator=chance, device="cuda") / 448
    halves[:, 0] = 1
    x[:, :BLOCK] = halves
    x = (x.clamp(-1, 1) * sizes).to(dtype)
    x[:, 1], x[:, 2] = 0.0, -0.0
    expert_scales_ranks.quantised_alike(x)


@worlds
@both_ways
def test_sums_of_blocks_are_float32(world: int, decisions: Decisions) -> None:
    """Sums with 14 bits, as matrix units have them, would be off by 6.6e-2; those of blocks of 128 are
    by 5e-4, and 2.0e-3 once they are rounded (the emulation of ``test_fast_accumulation``)."""
    long = Moe(64, 4096, 256, 1, 1)
    for kept, few in run(
        calls.decided, decisions, expert_scales_ranks.promoted, long,
        nodes=1, ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    ):  # fmt: skip
        assert kept <= TOLERANCE["bfloat16"] < few / 4


@worlds
@both_ways
def test_a_token_that_is_no_number_stays_one_and_spoils_no_other(
    world: int, decisions: Decisions
) -> None:
    right(world, calls.decided, decisions, expert_scales_ranks.no_numbers, SHAPE)


@worlds
@both_ways
def test_one_rank_may_have_all_tokens_or_none(world: int, decisions: Decisions) -> None:
    right(world, calls.decided, decisions, expert_scales_ranks.one_rank, SHAPE)


@worlds
@both_ways
def test_no_copy_of_a_weight_exists(world: int, decisions: Decisions) -> None:
    """In 16 bits it would take twice what the smallest weight has."""
    found = mkernel.launch(
        calls.decided, decisions, expert_scales_ranks.memory, Moe(16, 2048, 1024, 16, 2),
        ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    )  # fmt: skip
    for each in found:
        for peak, needed in each:
            assert peak <= needed


@pair
@both_ways
def test_faults_are_seen(world: int, decisions: Decisions) -> None:
    """On every rank."""
    shape = replace(SHAPE, scales=True, quantise=True, activation="silu_and_mul")
    found = mkernel.launch(
        calls.decided, decisions, calls.faulty, [shape], FAULTS, expert_scales_ranks.planted,
        ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S,
    )  # fmt: skip
    assert [set(each) for each in found] == [set(FAULTS)] * world
