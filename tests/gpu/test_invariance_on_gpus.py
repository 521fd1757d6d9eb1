"""Invariant results on ``hopper`` and ``cuda``: a row has the same bits in any batch, order, graph and
world; where sums of segments are exact, they are those of the tree. Planted faults are seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

import kept_ranks
import pytest
import torch
from device_buffers import needs_gpus, pair, several, worlds
from invariance_ranks import (
    E4M3,
    ROWS,
    Draw,
    every_batch,
    given,
    in_registers,
    leaves_of,
    many_rows,
    planted,
)
from torch import Tensor

from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.hopper.gemm.tuning import LEVELS
from mkernel.backends.contracts.tree import tree_sum
from mkernel.errors import MkernelError

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

SUMS = [
    Draw("all_reduce"),
    Draw("all_reduce", torch.float16, exact=True),
    Draw("all_reduce", normed=True),
]
GATHERS = [
    Draw("all_gather_gemm"),
    Draw("all_gather_gemm", torch.float16, bias=True, column=True),
    Draw("all_gather_gemm", E4M3, scales="row"),
    Draw("all_gather_gemm", E4M3, scales="tensor", fast=True),
]
REDUCTIONS = [
    Draw("gemm_reduce_scatter", column=True),
    Draw("gemm_reduce_scatter", torch.float16, exact=True, bias=True),
    Draw("gemm_reduce_scatter", E4M3, scales="row"),
    Draw("gemm_all_reduce"),
    Draw("gemm_all_reduce", exact=True),
    Draw("gemm_all_reduce", torch.float16, normed=True, bias=True),
    Draw("gemm_all_reduce", segments=64),
    Draw("gemm_all_reduce", E4M3, exact=True, scales="tensor", fast=True),
]
DRAWS = [*SUMS, *GATHERS, *REDUCTIONS]
MANY = 65536


def batches(world: int) -> list[list[int]]:
    """Rows in orders of their own, of numbers that change paths, tiles and exchanges."""
    chance = random.Random(world)
    counts = sorted({world * max(1, each // world) for each in (1, 16, 33, 64, 129, 260, ROWS)})
    return [chance.sample(range(ROWS), each) for each in counts]


def rows_of(draw: Draw, results: Sequence[Tensor]) -> Tensor:
    """All rows of a call, of what ranks got."""
    if draw.op == "all_gather_gemm":
        return torch.cat(list(results), 1)
    if draw.op == "gemm_reduce_scatter":
        return torch.cat(list(results))
    assert all(torch.equal(bits(each), bits(results[0])) for each in results)
    return results[0]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def alone() -> list[Tensor]:
    """All rows of every draw, in order, on one rank."""
    found = kept_ranks.run(
        every_batch, DRAWS, [list(range(ROWS))], ranks_per_node=1, accelerator="hopper"
    )
    return [each[0] for each in found[0]]


def differences(
    draws: Sequence[Draw],
    found: Sequence[list[list[Tensor]]],
    rows: list[list[int]],
    whole: Sequence[Tensor],
) -> list[str]:
    """Batches of which a row has other bits than among all rows on one rank. ``found``: by rank."""
    return [
        f"{draw} of {len(batch)} rows"
        for number, (draw, right) in enumerate(zip(draws, whole, strict=True))
        for at, batch in enumerate(rows)
        if not torch.equal(
            bits(rows_of(draw, [rank[number][at] for rank in found])), bits(right[batch])
        )
    ]


@worlds
@pytest.mark.parametrize("replays", [False, True], ids=["eager", "graph"])
def test_a_row_has_the_same_bits_in_every_batch_and_world(
    world: int, replays: bool, alone: list[Tensor]
) -> None:
    rows = batches(world)
    found = kept_ranks.run(
        every_batch, DRAWS, rows, replays, ranks_per_node=world, accelerator="hopper"
    )
    assert not differences(DRAWS, found, rows, alone)


@several
def test_the_cuda_backend_sums_rows_as_hopper_does(world: int, alone: list[Tensor]) -> None:
    rows = batches(world)
    found = kept_ranks.run(every_batch, SUMS, rows, ranks_per_node=world, accelerator="cuda")
    assert not differences(SUMS, found, rows, alone[: len(SUMS)])


def test_exact_segments_are_added_by_the_tree(alone: list[Tensor]) -> None:
    seen = 0
    for draw, found in zip(DRAWS, alone, strict=True):
        if not draw.exact:
            continue
        whole = given(draw, "cpu")
        total = tree_sum(leaves_of(draw, whole)).float() + whole.get("bias", torch.zeros(1)).float()
        assert torch.equal(found.float(), total.to(draw.out).float()), draw
        seen += 1
    assert seen == 4


@worlds
@pytest.mark.parametrize(
    "draw",
    [Draw("all_reduce"), Draw("all_gather_gemm"), Draw("gemm_all_reduce")],
    ids=lambda d: d.op,
)
def test_a_row_has_the_same_bits_among_65536(world: int, draw: Draw, alone: list[Tensor]) -> None:
    found = kept_ranks.run(many_rows, draw, MANY, ranks_per_node=world, accelerator="hopper")
    right = alone[DRAWS.index(draw)][[0, (MANY - 1) % ROWS]]
    each = [rows_of(draw, [rank[at : at + 1] for rank in found]) for at in (0, 1)]
    assert torch.equal(bits(torch.cat(each)), bits(right))


@pytest.mark.parametrize("tiling", ["wide", "medium", "narrow"])
def test_levels_in_registers_add_as_the_kernel_behind_does(
    tiling: TilingName, alone: list[Tensor]
) -> None:
    draws = [draw for draw in REDUCTIONS if draw.scales is None and draw.segments == 8]
    whole = [alone[DRAWS.index(draw)] for draw in draws]
    for levels in (0, LEVELS[tiling]):
        found = kept_ranks.run(
            in_registers, draws, batches(1), tiling, levels, ranks_per_node=1, accelerator="hopper"
        )
        assert not differences(draws, found, batches(1), whole)


@pytest.mark.parametrize("fault", ["cut", "order", "registers"])
def test_planted_faults_are_seen_on_one_rank(fault: str) -> None:
    draw = Draw("gemm_all_reduce")
    rows = [list(range(16)), list(range(ROWS))]
    few, all_rows = kept_ranks.run(
        planted, draw, rows, fault, ranks_per_node=1, accelerator="hopper"
    )[0][0]
    assert not torch.equal(bits(few), bits(all_rows[:16]))


@pair
def test_a_tree_that_is_turned_by_rank_is_seen(world: int, alone: list[Tensor]) -> None:
    draw = Draw("gemm_all_reduce")
    rows = [list(range(ROWS))]
    found = kept_ranks.run(planted, draw, rows, "tree", ranks_per_node=world, accelerator="hopper")
    assert differences([draw], found, rows, [alone[DRAWS.index(draw)]])


def test_other_segments_have_other_bits(alone: list[Tensor]) -> None:
    eight, sixty_four = (alone[DRAWS.index(Draw("gemm_all_reduce", segments=s))] for s in (8, 64))
    assert not torch.equal(bits(eight), bits(sixty_four))


def test_ops_that_promise_nothing_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        MkernelError, match="does not promise invariant results of 'gemm_all_reduce'"
    ):
        kept_ranks.run(
            every_batch, [Draw("gemm_all_reduce")], [[0]], ranks_per_node=1, accelerator="cuda"
        )
    monkeypatch.setenv("MKERNEL_PATH", "library")
    with pytest.raises(MkernelError, match="with invariant results"):
        kept_ranks.run(
            every_batch, [Draw("all_gather_gemm")], [[0]], ranks_per_node=1, accelerator="hopper"
        )
