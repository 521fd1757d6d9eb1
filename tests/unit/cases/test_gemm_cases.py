"""The judge of the GEMM ops: right results pass, and each planted fault fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import wrong

from mkernel.cases import Comparison, case_of, gemm
from mkernel.cases.base import TOLERANCE, Case
from mkernel.errors import UnknownOp

WORLD = 4
GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


def case(op: str, dtype: str = "float16", out_dtype: str = "float32", **options: Any) -> Case:
    k = 256 if op == "all_gather_gemm" else 64
    sizes = {"m": 512, "n": 96, "k": k}
    return case_of(op)(sizes, dtype, out_dtype, options=options)  # type: ignore[arg-type]


def right(each: Case, iteration: int = 2, rank: int = 1) -> torch.Tensor:
    """What ``rank`` must get, by plain torch in float32."""
    inputs = [each.inputs(source, WORLD, iteration) for source in range(WORLD)]
    if each.op == "all_gather_gemm":
        return torch.cat([i["a"].float() for i in inputs]) @ inputs[rank]["b"].float()
    total = sum(i["a"].float() @ i["b"].float() for i in inputs)
    assert isinstance(total, torch.Tensor)
    return total[rank * 128 : (rank + 1) * 128] if each.op == "gemm_reduce_scatter" else total


def judge(each: Case, result: torch.Tensor, iteration: int = 2) -> bool:
    return not wrong(each, {"out": result}, 1, WORLD, iteration)


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("replicate_b", [True, False])
def test_one_rounding_passes(op: str, out_dtype: str, replicate_b: bool) -> None:
    each = case(op, out_dtype=out_dtype, replicate_b=replicate_b)
    assert judge(each, right(each).to(getattr(torch, out_dtype)))


def bf16_sums(each: Case) -> torch.Tensor:
    """Partial sums kept in bfloat16: over 8 pieces of K, or over the ranks."""
    inputs = [each.inputs(source, WORLD, 2) for source in range(WORLD)]
    if each.op != "all_gather_gemm":
        pairs = [(i["a"], i["b"]) for i in inputs]
    else:
        a, b = torch.cat([i["a"] for i in inputs]), inputs[1]["b"]
        pairs = [(a[:, at : at + 32], b[at : at + 32]) for at in range(0, 256, 32)]
    total = torch.zeros(512, 96, dtype=torch.bfloat16)
    for a, b in pairs:
        total += (a.float() @ b.float()).bfloat16()
    return total[128:256] if each.op == "gemm_reduce_scatter" else total


def without_last_row(each: Case) -> torch.Tensor:
    result = right(each)
    result[-1] = float("nan")
    return result


def without_last_chunk(each: Case) -> torch.Tensor:
    """Rows of the last chunk stay zero; for the sums, the last rank's share is missing."""
    result = right(each)
    if each.op == "all_gather_gemm":
        result[-32:] = 0
        return result
    last = each.inputs(WORLD - 1, WORLD, 2)
    partial = last["a"].float() @ last["b"].float()
    return result - (partial[128:256] if each.op == "gemm_reduce_scatter" else partial)


FAULTS: dict[str, Callable[[Case], torch.Tensor]] = {
    "zeros": lambda c: torch.zeros_like(right(c)),
    "the previous iteration's result": lambda c: right(c, 1),
    "an unwritten row": without_last_row,
    "a missing row": lambda c: right(c)[:-1],
    "the last chunk dropped": without_last_chunk,
    "ranks in the wrong order": lambda c: right(c).roll(128 if len(right(c)) > 128 else 32, 0),
    "fp16 rounding in a float32 result": lambda c: right(c).half().float(),
    "one wrong element": lambda c: right(c).index_put(
        (torch.tensor(7), torch.tensor(9)), torch.tensor(50.0)
    ),
}


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(op: str, fault: str) -> None:
    each = case(op, replicate_b=False)
    assert judge(each, right(each))
    assert not judge(each, FAULTS[fault](each))


def test_another_ranks_columns_or_rows_fail() -> None:
    for op in ("all_gather_gemm", "gemm_reduce_scatter"):
        each = case(op, replicate_b=False)
        assert not judge(each, right(each, rank=2))


@pytest.mark.parametrize("op", GEMMS)
def test_bf16_partial_sums_fail_in_bfloat16(op: str) -> None:
    each = case(op, "bfloat16", "bfloat16")
    assert judge(each, right(each).bfloat16())
    assert not judge(each, bf16_sums(each))


def test_a_nan_error_does_not_pass() -> None:
    each = case("all_gather_gemm")
    assert each.passed({"out": Comparison(TOLERANCE["float32"], 1)})
    assert not each.passed({"out": Comparison(float("nan"), 1)})


@pytest.mark.parametrize("op", GEMMS)
def test_inputs_are_fresh_and_reproducible(op: str) -> None:
    each = case(op, replicate_b=False)
    for name in "ab":
        drawn = each.inputs(0, WORLD, 1)[name]
        assert torch.equal(drawn, each.inputs(0, WORLD, 1)[name])
        others = (
            each.inputs(1, WORLD, 1),
            each.inputs(0, WORLD, 2),
            each.with_(seed=1).inputs(0, WORLD, 1),
        )
        assert not any(torch.equal(drawn, other[name]) for other in others)


def test_one_b_for_every_rank() -> None:
    each = case("all_gather_gemm", replicate_b=True)
    assert torch.equal(each.inputs(0, WORLD, 1)["b"], each.inputs(3, WORLD, 1)["b"])


def test_layouts_hold_the_same_numbers() -> None:
    row = case("all_gather_gemm")
    column = row.with_(layout="column").inputs(1, WORLD, 1)["b"]
    assert column.t().is_contiguous()
    assert torch.equal(column, row.inputs(1, WORLD, 1)["b"])


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("replicate_b", [True, False])
def test_own_tensors_are_cut_as_the_op_asks(op: str, replicate_b: bool) -> None:
    a, b = torch.arange(64.0).reshape(8, 8).half(), torch.arange(48.0).reshape(8, 6).half()
    gathers = op == "all_gather_gemm"
    n = 3 if gathers and not replicate_b else 6
    sizes = {"m": 8, "n": n, "k": 8 if gathers else 4}
    options = {"tensors": {"a": a, "b": b}, "replicate_b": replicate_b}
    each = case_of(op)(sizes, "float16", "float32", options=options)
    parts = [each.inputs(rank, 2, 1) for rank in range(2)]
    assert all(t.is_contiguous() for part in parts for t in part.values())
    assert torch.equal(torch.cat([p["a"] for p in parts], 0 if gathers else 1), a)
    if gathers and replicate_b:
        assert torch.equal(parts[1]["b"], b)
    else:
        assert torch.equal(torch.cat([p["b"] for p in parts], 1 if gathers else 0), b)
    wanted = a.double() @ b.double()
    found = [each.reference(rank, 2, 1)["out"] for rank in range(2)]
    if gathers and not replicate_b:
        assert torch.equal(torch.cat(found, 1), wanted)
    elif op == "gemm_reduce_scatter":
        assert torch.equal(torch.cat(found), wanted)
    else:
        assert torch.equal(found[1], wanted)


def test_unknown_op() -> None:
    with pytest.raises(UnknownOp, match="ring_attention"):
        case_of("conv")


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize(
    "options", [{}, {"replicate_b": False}, {"bias": True}, {"scales": "row"}, {"norm": "residual"}]
)
def test_products_that_are_kept_are_those_of_each_rank_and_call(
    op: str, options: dict[str, Any]
) -> None:
    """One case is asked in every order, and another each time: they say the same."""
    if "norm" in options and op != "gemm_all_reduce":
        options = {}
    dtype = "float8_e4m3fn" if "scales" in options else "float16"
    each = case(op, dtype, **options)
    asked = [
        (truth, rank, iteration)
        for iteration in (1, 2, 1)
        for rank in (0, 1, 1, 3, 0)
        for truth in ("reference", "partials")
    ]
    told = []
    for truth, *of in asked:
        found = getattr(each, truth)(of[0], WORLD, of[1])
        told.append({name: tensor.clone() for name, tensor in found.items()})
        for tensor in found.values():
            tensor.zero_()  # what was given out is not what is kept
    for (truth, *of), found in zip(asked, told, strict=True):
        wanted = getattr(case(op, dtype, **options), truth)(of[0], WORLD, of[1])
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name]), (truth, *of)


def test_products_are_made_once_and_kept_as_long_as_their_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    wide_a = gemm.GemmCase.wide_a

    def noted(self: gemm.GemmCase, rank: int, *which: int) -> torch.Tensor:
        made.append(rank)
        return wide_a(self, rank, *which)

    monkeypatch.setattr(gemm.GemmCase, "wide_a", noted)
    each = case("gemm_all_reduce")
    for rank in range(WORLD):
        each.reference(rank, WORLD, 3)
        each.partials(rank, WORLD, 3)
    assert made == list(range(WORLD))
    assert len(gemm._latest) == 1
    del each
    assert not gemm._latest
