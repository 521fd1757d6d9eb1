"""The judges of these tests, which need no GPU: roundings pass, what is more than these does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from few_elements import few_right, half_step, new_residual_right, product_right
from moe_ranks import Moe

import mkernel
from mkernel.cases import case_of, compare
from mkernel.cases.base import every_row
from mkernel.cases.comparison import FEW
from mkernel.cases.gemm import GemmCase

ROUNDED = torch.finfo(torch.bfloat16)
OVER = {"all_gather_gemm": (594, 944, 967, 1071), "sums": (570, 761, 842, 1897)}
"""Seeds of draws that are off by more than the tolerance of norms as they are rounded once."""


def product(op: str, world: int, seed: int) -> GemmCase:
    sizes = {"m": world, "n": 8, "k": 16}
    case = case_of(op)(sizes, "bfloat16", "bfloat16", "column", seed=seed)
    assert isinstance(case, GemmCase)
    return case


def just_above(limit: torch.Tensor) -> torch.Tensor:
    """The least numbers of bfloat16 above."""
    near = limit.to(torch.bfloat16)
    return torch.where(
        near.double() > limit, near, near.nextafter(torch.full_like(near, torch.inf))
    )


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_few_elements_of_a_product_may_be_rounded_once(op: str) -> None:
    """No result is nearer to the truth, also where one rounding is more than the tolerance of norms, as
    in one draw of 500. One element at the other number beside the truth is wrong in each."""
    seeds = OVER.get(op, OVER["sums"])
    for seed in (*range(60), *seeds):
        case = product(op, 1, seed)
        wanted = case.reference(0, 1, 0)["out"]
        got = wanted.to(torch.bfloat16)
        over = compare(got, wanted).error > case.tolerances()["out"]
        assert over == (seed in seeds)
        assert product_right(case, got, 0, 1, 0)
        sums = 1e-5 * (case.wide_a(0, 1, 0).abs() @ case.wide_b(0, 1, 0).abs())
        other = just_above(wanted + sums + half_step(wanted.abs() + sums, got.dtype))
        wrong = torch.where(torch.arange(8) == seed % 8, other, got)
        assert not product_right(case, wrong, 0, 1, 0)


def test_few_elements_of_a_new_residual_may_be_rounded_after_their_sum_was() -> None:
    """As in one draw on two H200, where this is more than the tolerance of norms, and as in some of
    these. One element that is off by more, and many elements, are wrong."""
    op, sizes, over = case_of("gemm_all_reduce"), {"m": 2, "n": 8, "k": 16}, 0
    for seed in range(300):
        options = {"norm": "residual", "bias": True}
        case = op(sizes, "bfloat16", "bfloat16", "row", seed=seed, options=options)
        assert isinstance(case, GemmCase)
        wanted = case.reference(0, 2, 1)["residual_out"]
        residual = case.inputs(0, 2, 1)["residual"].double()
        got = ((wanted - residual).bfloat16().double() + residual).bfloat16()
        over += compare(got, wanted).error > case.tolerances()["residual_out"]
        assert new_residual_right(case, got, 0, 2, 1)
        sizes_of = case.partials(0, 2, 1)["residual_out"]
        off = torch.where(torch.arange(8) == seed % 8, wanted + 0.02 * sizes_of, got.double())
        assert not new_residual_right(case, off.bfloat16(), 0, 2, 1)
        assert not new_residual_right(case, got.repeat(FEW // 16 + 1, 1), 0, 2, 1)
    assert over > 0


def test_few_elements_of_scaled_operands_may_be_rounded_once() -> None:
    """As in 4 of 700 draws, where one rounding is more than the tolerance of norms. Rows of another
    scale, and many elements that are off by as much, are wrong."""
    op, sizes = case_of("all_gather_gemm"), {"m": 2, "n": 16, "k": 528}
    for seed in (0, 197, 273, 696):
        options = {"scales": "row"}
        case = op(sizes, "float8_e4m3fn", "bfloat16", "column", seed=seed, options=options)
        assert isinstance(case, GemmCase)
        wanted = case.reference(1, 2, 0)["out"]
        got = wanted.to(torch.bfloat16)
        assert compare(got, wanted).error > case.tolerances()["out"]
        assert few_right(case, got, 1, 2, 0)
        assert not few_right(case, got * torch.tensor([[1.0], [1.02]]).to(got), 1, 2, 0)
        assert not few_right(case, got.repeat(9, 1), 1, 2, 0)


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_what_ranks_add_may_be_rounded_before(op: str) -> None:
    """Each of two ranks' results, then their sum; one element beyond that is wrong."""
    world = 2
    for seed in range(100):
        case = product(op, world, seed)
        wanted = case.reference(1, world, 0)["out"]
        parts = torch.stack(
            [
                (case.wide_a(rank, world, 0) @ case.wide_b(rank, world, 0))[-len(wanted) :]
                for rank in range(world)
            ]
        )
        got = parts.to(torch.bfloat16).double().sum(0).to(torch.bfloat16)
        assert product_right(case, got, 1, world, 0)
        before = 1.01 * ROUNDED.eps / 2 * parts.abs().sum(0)
        limit = wanted + before + half_step(wanted.abs() + before, got.dtype)
        wrong = torch.where(torch.arange(8) == seed % 8, just_above(limit), got)
        assert not product_right(case, wrong, 1, world, 0)


@dataclass
class World:
    rank: int
    size: int
    accelerator: Any = field(default_factory=lambda: SimpleNamespace(name="hopper"))
    identity: Any = field(default_factory=lambda: SimpleNamespace(nodes=1))


EIGHT_OF_ONE_EXPERT = Moe(
    tokens=1, hidden=296, features=264, experts=4, top_k=8, routing="some_empty", dtype="float16",
    capacity=29, activation="silu_and_mul", narrow=True,
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("accelerator", "narrow", "roundings"),
    [("hopper", True, 3), ("hopper", False, 1), ("cuda", False, 2)],
)
def test_sums_of_gated_experts_stay_in_float16(
    rank: int, accelerator: str, narrow: bool, roundings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results rounded once are right, whatever is drawn; off by more than all roundings of the way, or
    infinite, they are not."""
    world = World(rank, 2, SimpleNamespace(name=accelerator))
    monkeypatch.setattr(mkernel, "world", lambda: world)
    for seed in range(12):
        work = replace(EIGHT_OF_ONE_EXPERT, narrow=narrow).work(seed, "cpu")
        truth = work.case.reference(rank, 2, 1)
        found = {name: truth[name].to(torch.float16) for name in ("outputs", "out")}
        wanted, terms = work._home(1)
        assert float(terms.max()) < torch.finfo(torch.float16).max / 2
        found |= {"counts": truth["counts"], "home": wanted.to(torch.float16)}
        assert work.failure(1, found) == []
        limit = work.case.tolerances()["out"] * roundings**0.5
        for wrong in (
            wanted * (1 + 1.1 * limit),
            wanted.index_fill(1, torch.tensor([7]), torch.inf),
        ):
            found["home"] = wrong.to(torch.float16)
            assert ["GEMM+combine" in text for text in work.failure(1, found)] == [True]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_combines_of_scaled_experts_are_judged_by_their_rows_and_by_the_reference(
    kind: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element on the other side of a step is right where rows say so. Sums of others' rows are
    wrong, also where those came home likewise, and so are sums that are not of their rows."""
    monkeypatch.setattr(mkernel, "world", lambda: World(0, 2))
    dtype = str(kind).removeprefix("torch.")
    shape = Moe(3, 128, 128, dtype=dtype, scales=True, activation="silu_and_mul")
    work = shape.work(seed, "cpu")
    case, truth = work.moe, work.case.reference(0, 2, 1)
    slots = case._activate(case._sent(0, 2, 1, every_row)).transpose(0, 1).contiguous().to(kind)
    slots.view(-1)[slots.double().abs().argmax()] *= 1 + torch.finfo(kind).eps
    limit = work.case.tolerances()["out"]
    for off, rows, right in (
        (0.0, slots, True),
        (0.0, slots.roll(1, 1), False),
        (2 * limit, slots, False),
    ):
        out = torch.einsum("tk,kti->ti", case._weights(0, 1).double(), rows.double()) * (1 + off)
        found = {"outputs": truth["outputs"].to(kind), "counts": truth["counts"], "slots": rows}
        wrong = work.failure(1, found | {"out": out.to(kind)})
        assert all("out is off" in text for text in wrong)
        assert bool(wrong) != right, wrong


def test_few_sums_below_the_least_normal_number_are_judged_by_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step there is a large part of a sum, as of one token in one draw on two H200."""
    monkeypatch.setattr(mkernel, "world", lambda: World(0, 2))
    shape = Moe(1, 128, 128, dtype="float16", scales=True, activation="silu_and_mul")
    work = shape.work(0, "cpu")
    slots = torch.randn(work.top_k, 1, 128, generator=torch.Generator().manual_seed(0)) * 2e-5
    weights = work.moe._weights(0, 1).double()
    wanted = torch.einsum("tk,kti->ti", weights, slots.half().double())
    step = 2.0**-24
    assert compare(wanted.half(), wanted).error > work.case.tolerances()["out"]
    for off, right in ((0.0, True), (1.01 * step, False)):
        told = work._combined(1, (wanted + off).half(), slots.half())
        assert any("by its rows" in text for text in told) != right


def test_rows_that_repeat_are_few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """288 elements of which 48 differ: these draws are off by more than the tolerance of norms as they
    are rounded once, as 6 of 6000 are."""
    monkeypatch.setattr(mkernel, "world", lambda: World(0, 2))
    shape = Moe(
        tokens=3, hidden=72, features=8, experts=4, top_k=6, routing="one_expert",
        dtype="bfloat16", activation="silu_and_mul",
    )  # fmt: skip
    for seed in (718, 2111, 5237):
        work = shape.work(seed, "cpu")
        truth = work.case.reference(0, 2, 1)
        got = {name: truth[name].to(torch.bfloat16) for name in ("outputs", "out")}
        got["counts"] = truth["counts"]
        error = compare(got["outputs"], truth["outputs"]).error
        assert error > work.case.tolerances()["outputs"], "nothing is tested"
        assert work.failure(1, got) == []
        off = truth["outputs"] * torch.linspace(1, 1.02, 36).double()[:, None]
        assert work.failure(1, {**got, "outputs": off.to(torch.bfloat16)}) != []
