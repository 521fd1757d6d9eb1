"""The judge of results: what it lets pass, and what it says of the rest."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import mkernel
from mkernel.cases import Case, Outcome, case_of, poison
from mkernel.cases.gemm import GemmCase
from mkernel.conformance import ranks
from mkernel.conformance.checks.memory import Guarded
from mkernel.conformance.checks.repetition import rank_poison
from mkernel.conformance.ranks import Judge
from mkernel.ops import all_gather_gemm
from mkernel.world.identity import Identity


class OneRank:
    """As much of a world as the judge asks for; it is its own accelerator too."""

    identity = Identity(0, 1, 1)
    rank, size = 0, 1
    rounded_partials = False

    @property
    def accelerator(self) -> OneRank:
        return self

    def capabilities(self) -> OneRank:
        return self


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setattr(mkernel, "world", OneRank)
    monkeypatch.setattr(ranks.mkernel, "world", OneRank)
    case = case_of("all_gather_gemm")(
        sizes={"m": 200, "n": 300, "k": 64}, dtype="float16", out_dtype="float32"
    )
    return Judge(case)


def outcome(out: torch.Tensor) -> Outcome:
    nothing: Any = None
    return Outcome({"out": out}, nothing, nothing)


def right(case: Case, iteration: int) -> torch.Tensor:
    return case.reference(0, 1, iteration)["out"].float()


def test_the_truth_passes(judge: Judge) -> None:
    for iteration in range(6):
        assert judge.problems(outcome(right(judge.case, iteration)), iteration) == []


def test_each_draw_of_inputs_says_that_the_rank_goes_on(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of checks which call the case themselves, as ``leaks`` does in all its worlds."""
    told = []
    monkeypatch.setattr(ranks, "report_progress", lambda: told.append(None))
    monkeypatch.setattr(ranks, "moved", lambda tensors: tensors)
    for iteration in range(3):
        judge.inputs(iteration)
    assert len(told) == 3


@pytest.mark.parametrize("claimed", [False, True])
def test_rounded_partial_results_pass_where_they_are_claimed(
    claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneRank, "rounded_partials", claimed)
    monkeypatch.setattr(OneRank, "size", 2)
    monkeypatch.setattr(ranks.mkernel, "world", OneRank)
    case = case_of("gemm_reduce_scatter")(
        sizes={"m": 200, "n": 300, "k": 64}, dtype="bfloat16", out_dtype="bfloat16"
    )
    parts = []
    for rank in range(2):
        inputs = case.inputs(rank, 2, 0)
        parts.append((inputs["a"].double() @ inputs["b"].double()).bfloat16().double())
    out = sum(parts, torch.zeros(()))[:100].bfloat16()
    found = Judge(case).problems(outcome(out), 0)
    assert (found == []) == claimed
    out[7, 8] += 0.1 * out.abs().max()
    assert Judge(case).problems(outcome(out), 0) != []


def test_rounded_terms_of_few_elements_pass_where_they_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found on a GPU beside CPUs: the terms of eight elements are rounded by so much that the norm is
    off by 5.4e-4, where the limit of many is 5e-4."""
    monkeypatch.setattr(OneRank, "rounded_partials", True)
    monkeypatch.setattr(OneRank, "rank", 2)
    monkeypatch.setattr(OneRank, "size", 4)
    monkeypatch.setattr(ranks.mkernel, "world", OneRank)
    case = case_of("gemm_reduce_scatter")(
        sizes={"m": 4, "n": 8, "k": 8}, dtype="float16", out_dtype="float16"
    )
    given = [case.inputs(rank, 4, 0) for rank in range(4)]
    a, b, c, d = ((each["a"].double() @ each["b"].double())[2:3] for each in given)

    def problems(*terms: torch.Tensor) -> list[str]:
        total = sum((each.half().double() for each in terms), torch.zeros(()))
        return Judge(case).problems(outcome(total.half()), 0)

    assert problems(a + b, c + d) == []
    for wrong in ((a + b, c), (a + b, c + d.flip(1)), ((a + b) * (1 + 2**-8), c + d)):
        assert problems(*wrong)
    monkeypatch.setattr(OneRank, "rounded_partials", False)
    assert problems(a + b, c + d)


def test_a_sum_may_be_rounded_to_either_side_where_it_lies_near_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the campaign: of token 3, column 34, slot 6 sums up to -16.187499, and in float32 to
    -16.1875, the middle between -16.125 and -16.25."""
    monkeypatch.setattr(OneRank, "size", 4)
    monkeypatch.setattr(ranks.mkernel, "world", OneRank)
    case = case_of("moe_dispatch_gemm")(
        sizes={"tokens": 171, "features": 64, "experts": 12, "top_k": 8, "hidden": 80},
        dtype="float16",
        out_dtype="bfloat16",
        layout="column",
        seed=198557948,
    )
    true = case.reference(0, 4, 0)
    out = true["out"].bfloat16()
    exact, ties = float(true["out"][3, 34]), case.near_ties(0, 4, 0)["out"]
    assert exact == pytest.approx(-2.783931, abs=1e-6)
    out[3, 34] = -2.703125  # with -16.25 for -16.125, weighted by 0.598, and rounded itself
    given = {"outputs": true["outputs"].bfloat16(), "counts": true["counts"]}
    allowed = 2.0**-7 * true["out"].abs() + 2e-3 * true["out"].square().mean().sqrt()
    nothing: Any = None

    def problems(out: torch.Tensor) -> list[str]:
        return Judge(case).problems(Outcome({**given, "out": out}, nothing, nothing), 0)

    assert problems(out) == []
    assert float(ties[3, 34]) == pytest.approx(0.598 * 0.125, rel=1e-3)
    assert 0 < float((ties / allowed).mean()) < 0.1  # all others are judged as before, nearly
    far = (ties == 0).nonzero()[0].tolist()
    for row, column in ([3, 34], far):
        wrong = out.clone()
        wrong[row, column] = true["out"][row, column] + 2 * (allowed + ties)[row, column]
        (found,) = problems(wrong)
        assert "out has 1 of 10944 elements that are wrong" in found


def test_zeros_are_named(judge: Judge) -> None:
    (found,) = judge.problems(outcome(torch.zeros(200, 300)), 0)
    assert "all zeros" in found
    assert "all_gather_gemm m=200" in found


def test_what_is_unwritten_is_counted(judge: Judge) -> None:
    out = right(judge.case, 0)
    poison.fill(out[3, :7])
    (found,) = judge.problems(outcome(out), 0)
    assert "7 of 60000 elements that were never written" in found


def test_an_earlier_call_is_named(judge: Judge) -> None:
    judge.problems(outcome(right(judge.case, 0)), 0)
    (found,) = judge.problems(outcome(right(judge.case, 0)), 1)
    assert "the result of call 0: stale" in found


def test_wrong_rows_are_named(judge: Judge) -> None:
    out = right(judge.case, 0)
    out[[5, 9]] = out[[9, 5]]
    (found,) = judge.problems(outcome(out), 0)
    assert "2 of 200 rows are wrong: 5, 9" in found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_wrong_element_of_many_is_found(judge: Judge, dtype: str) -> None:
    judge.case = judge.case.with_(out_dtype=dtype)
    out = right(judge.case, 0).to(getattr(torch, dtype))
    assert judge.problems(outcome(out), 0) == []
    out[100, 100] += 2
    assert len(judge.problems(outcome(out), 0)) == 1


def test_one_stale_row_is_found(judge: Judge) -> None:
    judge.problems(outcome(right(judge.case, 0)), 0)
    out = right(judge.case, 1)
    assert judge.stale_rows(outcome(out), 1) == []
    out[7] = right(judge.case, 0)[7]
    (found,) = judge.stale_rows(outcome(out), 1)
    assert "1 rows of out are those of call 0" in found


class Allocates(GemmCase):
    """Its call notes what is in memory that torch gives it."""

    op = "all_gather_gemm"
    gemm = all_gather_gemm.OP
    seen: ClassVar[list[bool]] = []

    def call(self, tensors: Any, outputs: Any, **options: Any) -> Outcome:
        self.seen.append(bool(torch.empty(1000).isnan().all()))
        return outcome(outputs["out"].copy_(tensors["a"].double() @ tensors["b"].double()))

    def reference(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        given = self.inputs(rank, world_size, iteration)
        return {"out": given["a"].double() @ given["b"].double()}


def test_what_an_op_allocates_is_filled(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call of the kit that goes through the case, and in those of the check of poison."""
    monkeypatch.setattr("mkernel.cases.base.current", OneRank)
    monkeypatch.setattr(OneRank, "device", "cpu", raising=False)
    monkeypatch.setattr(Allocates, "seen", [])
    case = Allocates(judge.case.sizes, "float16", "float32")
    case.run(case.inputs(0, 1, 0))
    assert Allocates.seen == [True]
    assert list(rank_poison(case)) == []
    assert Allocates.seen == [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_guards_see_every_write(turned: bool, dtype: torch.dtype) -> None:
    plain = torch.arange(60).reshape(6, 10).to(dtype)
    plain = plain.t() if turned else plain
    guarded = Guarded(plain, 16)
    assert torch.equal(guarded.tensor, plain)
    assert guarded.tensor.stride() == plain.stride()
    assert guarded.tensor.data_ptr() % 16 == 0
    guarded.tensor[2, 2] = 99
    assert guarded.guards_intact()
    assert not guarded.intact()
    end = guarded.tensor.storage_offset() + 60
    guarded.tensor.as_strided((1,), (1,), end).fill_(1)
    assert not guarded.guards_intact()
