"""The judge of MoE dispatch and combine: right results pass, and each planted fault fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import wrong

from mkernel.cases import case_of
from mkernel.cases.base import Case
from mkernel.cases.moe import ROUTINGS
from mkernel.conformance.ranks import _differs

WORLD, RANK = 4, 1
SIZES = {"tokens": 48, "hidden": 64, "features": 40, "experts": 12, "top_k": 3}
OWN = SIZES["experts"] // WORLD
Outputs = dict[str, torch.Tensor]


def case(
    dtype: str = "float16", out_dtype: str = "float16", top_k: int = 3, **options: Any
) -> Case:
    sizes = {**SIZES, "top_k": top_k}
    return case_of("moe_dispatch_gemm")(sizes, dtype, out_dtype, options=options)  # type: ignore[arg-type]


def right(
    each: Case,
    iteration: int = 2,
    *,
    experts_off: int = 0,
    sources: Callable[[int], range | reversed[int]] = range,
    weighted: bool = True,
    narrow: torch.dtype = torch.float32,
    up_first: bool = False,
) -> Outputs:
    """What rank 1 must get, row by row and by plain torch; the keywords plant faults.

    ``narrow``: what the combine keeps its sums in. ``up_first``: of gate and up.
    """
    inputs = [each.inputs(source, WORLD, iteration) for source in range(WORLD)]
    out_dtype = getattr(torch, each.out_dtype)

    def weight(expert: int) -> torch.Tensor:
        expert = (expert + experts_off) % SIZES["experts"]
        return inputs[expert // OWN]["w"][expert % OWN].float()

    def activated(product: torch.Tensor) -> torch.Tensor:
        if "activation" not in each.options:
            return product
        gate, up = reversed(product.chunk(2, -1)) if up_first else product.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    rows, counts = [], []
    for expert in range(RANK * OWN, (RANK + 1) * OWN):
        mine = [
            inputs[source]["x"][token].float()
            for source in sources(WORLD)
            for token in range(SIZES["tokens"])
            for slot in range(each.sizes["top_k"])
            if inputs[source]["topk_ids"][token, slot] == expert
        ]
        counts.append(len(mine))
        rows += [activated(torch.stack(mine) @ weight(expert))] if mine else []
    own, out = inputs[RANK], []
    for token in range(SIZES["tokens"]):
        total = torch.zeros(SIZES["features"], dtype=narrow)
        for slot in range(each.sizes["top_k"]):
            expert = int(own["topk_ids"][token, slot])
            if expert < 0:  # padding
                continue
            y = activated(own["x"][token].float() @ weight(expert)).to(out_dtype)
            factor = own["topk_weights"][token, slot] if weighted else 1.0
            total = total + (factor * y.float()).to(narrow)
        out.append(total)
    return {
        "outputs": torch.cat([torch.empty(0, SIZES["features"]), *rows]).to(out_dtype),
        "counts": torch.tensor(counts),
        "out": torch.stack(out).to(out_dtype),
    }


def judge(each: Case, outputs: Outputs, iteration: int = 2) -> tuple[bool, set[str]]:
    """Return the verdict, and which outputs are wrong."""
    names = wrong(each, outputs, RANK, WORLD, iteration)
    return not names, names


@pytest.mark.parametrize(
    ("routing", "out_dtype", "layout"),
    [
        *((routing, "float16", "row") for routing in ROUTINGS),
        ("uniform", "float32", "column"),
        ("padded", "bfloat16", "column"),
    ],
)
def test_right_results_pass(routing: str, out_dtype: str, layout: str) -> None:
    each = case("float16", out_dtype, routing=routing).with_(layout=layout)
    assert judge(each, right(each)) == (True, set())


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_activated_results_pass_and_those_of_exchanged_columns_do_not(out_dtype: str) -> None:
    each = case("float16", out_dtype, activation="silu_and_mul")
    assert judge(each, right(each)) == (True, set())
    assert judge(each, right(each, up_first=True)) == (False, {"outputs", "out"})


def test_zipf_routing() -> None:
    """No expert twice, and expert by expert as often as the power of its place says (top-k of 1)."""
    tokens, experts = 40_000, 16
    sizes = {"tokens": tokens, "hidden": 1, "features": 1, "experts": experts, "top_k": 8}
    ids = case_of("moe_dispatch_gemm")(
        sizes, "float32", "float32", options={"routing": "zipf"}
    ).inputs(0, 1, 0)["topk_ids"]
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    found = torch.bincount(ids[:, 0], minlength=experts).sort(descending=True).values / tokens
    wanted = torch.arange(1, experts + 1).double() ** -1.2
    torch.testing.assert_close(found.double(), wanted / wanted.sum(), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_any_top_k(top_k: int) -> None:
    each = case("bfloat16", "bfloat16", top_k)
    assert judge(each, right(each)) == (True, set())


def changed(outputs: Outputs, name: str, change: Callable[[torch.Tensor], object]) -> Outputs:
    copy = {**outputs, name: outputs[name].clone()}
    change(copy[name])
    return copy


FAULTS: dict[str, tuple[set[str], Callable[[Case], Outputs]]] = {
    "zeros": (
        {"outputs", "counts", "out"},
        lambda c: {name: torch.zeros_like(value) for name, value in right(c).items()},
    ),
    "the previous iteration's result": (
        {"outputs", "counts", "out"},
        lambda c: right(c, 1),
    ),
    "an unwritten row": (
        {"outputs"},
        lambda c: changed(right(c), "outputs", lambda t: t[-1].fill_(float("nan"))),
    ),
    "an unwritten token": (
        {"out"},
        lambda c: changed(right(c), "out", lambda t: t[5].fill_(float("nan"))),
    ),
    "the last chunk dropped": (
        {"outputs"},
        lambda c: changed(right(c), "outputs", lambda t: t[-4:].zero_()),
    ),
    "a row too few": ({"outputs"}, lambda c: {**right(c), "outputs": right(c)["outputs"][:-1]}),
    "off by one expert": ({"outputs", "out"}, lambda c: right(c, experts_off=1)),
    "sources in the wrong order": (
        {"outputs"},
        lambda c: right(c, sources=lambda n: reversed(range(n))),
    ),
    "two rows of one expert exchanged": (
        {"outputs"},
        lambda c: {**right(c), "outputs": right(c)["outputs"][[1, 0, *range(2, rows_of(c))]]},
    ),
    "a count too many": (
        {"counts"},
        lambda c: changed(right(c), "counts", lambda t: t[0].add_(1)),
    ),
    "counts of the neighbours exchanged": (
        {"counts"},
        lambda c: {**right(c), "counts": right(c)["counts"].roll(1)},
    ),
    "weights ignored": ({"out"}, lambda c: right(c, weighted=False)),
}


def rows_of(each: Case) -> int:
    return len(right(each)["outputs"])


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str) -> None:
    each = case()
    names, planted = FAULTS[fault]
    assert judge(each, planted(each)) == (False, names)


@pytest.mark.parametrize("fault", ["weights ignored", "off by one expert"])
def test_top_1_does_not_hide_faults(fault: str) -> None:
    each = case(top_k=1)
    assert not judge(each, FAULTS[fault][1](each))[0]


def test_sums_kept_in_bfloat16_fail() -> None:
    each = case("bfloat16", "bfloat16", top_k=8)
    assert judge(each, right(each, narrow=torch.bfloat16)) == (False, {"out"})


def test_sums_kept_in_float16_fail_in_float32() -> None:
    each = case(out_dtype="float32", top_k=2)
    assert judge(each, right(each, narrow=torch.float16)) == (False, {"out"})


def test_routings_are_what_they_say() -> None:
    def counts(routing: str, iteration: int = 2) -> torch.Tensor:
        each = case(routing=routing)
        return torch.cat([each.reference(r, WORLD, iteration)["counts"] for r in range(WORLD)])

    rows = WORLD * SIZES["tokens"] * SIZES["top_k"]
    for routing in ROUTINGS[:4]:
        assert counts(routing).sum() == rows
    assert 0 < counts("padded").sum() < rows
    tokens = [
        int((case(routing="padded").inputs(r, WORLD, 2)["topk_ids"] >= 0).any(1).sum())
        for r in range(WORLD)
    ]
    assert len(set(tokens)) > 1
    empty = counts("empty_ranks")
    assert not empty[len(empty) // 2 :].any()
    own = [case(routing="empty_ranks").inputs(r, WORLD, 2)["topk_ids"] for r in range(WORLD)]
    assert [bool((ids < 0).all()) for ids in own] == [rank % 2 == 1 for rank in range(WORLD)]
    one = counts("one_expert")
    assert (one > 0).sum() == 1
    assert (counts("some_empty") == 0).sum() == 8
    assert len({int(counts("one_expert", i).argmax()) for i in range(8)}) > 1
    twice = case(routing="duplicates").inputs(0, WORLD, 1)["topk_ids"]
    assert (twice[::2, 0] == twice[::2, 1]).all()
    distinct = case().inputs(0, WORLD, 1)["topk_ids"].sort(dim=1).values
    assert (distinct.diff(dim=1) > 0).all()
    with pytest.raises(ValueError, match="nearest"):
        case(routing="nearest").inputs(0, WORLD, 1)


def test_inputs_are_fresh_and_reproducible() -> None:
    each = case()
    for name in ("x", "topk_ids", "w", "topk_weights"):
        drawn = each.inputs(0, WORLD, 1)[name]
        assert torch.equal(drawn, each.inputs(0, WORLD, 1)[name])
        assert not torch.equal(drawn, each.inputs(1, WORLD, 1)[name])
        assert not torch.equal(drawn, each.inputs(0, WORLD, 2)[name])
    assert case(id_dtype="int32").inputs(0, WORLD, 1)["topk_ids"].dtype == torch.int32


def test_own_tensors_give_the_same_reference() -> None:
    each = case()
    parts = [each.inputs(rank, WORLD, 3) for rank in range(WORLD)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    own = each.with_(options={"tensors": whole})
    for name, value in each.reference(RANK, WORLD, 3).items():
        assert torch.equal(own.reference(RANK, WORLD, 7)[name], value)


# ---- the combine alone ----


def combine_case(**options: Any) -> Case:
    sizes = {name: size for name, size in SIZES.items() if name != "hidden"}
    return case_of("moe_combine")(sizes, "float16", "float16", options=options)


def combined(each: Case, iteration: int = 2, *, shift: int = 0, weighted: bool = True) -> Outputs:
    """``shift``: rows are taken that far off."""
    inputs = [each.inputs(source, WORLD, iteration) for source in range(WORLD)]
    ids = torch.stack([i["topk_ids"] for i in inputs])
    out = torch.zeros(SIZES["tokens"], SIZES["features"])
    for owner in range(WORLD):
        row = 0
        for expert in range(owner * OWN, (owner + 1) * OWN):
            for source, token, slot in (ids == expert).nonzero().tolist():
                if source == RANK:
                    weight = inputs[RANK]["topk_weights"][token, slot] if weighted else 1
                    y = inputs[owner]["y"]
                    out[token] += weight * y[(row + shift) % len(y)].float()
                row += 1
    return {"out": out.half()}


@pytest.mark.parametrize("routing", ROUTINGS[:-1])  # of the last this rank has no token
def test_combine(routing: str) -> None:
    each = combine_case(routing=routing)
    assert judge(each, combined(each))[0]
    for off in (
        combined(each, shift=1),
        combined(each, weighted=False),
        combined(each, iteration=1),
        {"out": torch.zeros(SIZES["tokens"], SIZES["features"])},
    ):
        assert not judge(each, off)[0]


def test_a_row_that_may_be_rounded_either_way_excuses_its_elements_alone() -> None:
    """Drawn by the soak: two terms cancel to 2.79, one of which float32 rounds the other way."""
    drawn = case_of("moe_dispatch_gemm")(
        {"tokens": 298, "features": 78, "experts": 2, "top_k": 2, "hidden": 28},
        "float32", "bfloat16", options={"routing": "uniform", "id_dtype": "int32"}, seed=282519829,
    )  # fmt: skip
    rank, iteration, at = 1, 38, 15682
    truth = drawn.reference(rank, 2, iteration)["out"]
    ties = drawn.near_ties(rank, 2, iteration)["out"]
    limit = drawn.tolerances()["out"]
    assert 0 < int((ties > 0).sum()) < truth.numel() / 20
    got = truth.to(torch.bfloat16)
    assert _differs(drawn, got, truth, limit, None, ties) == ""
    got.view(-1)[at] = -2.75  # as streams had it
    one = f"has 1 of {truth.numel()} elements that are wrong"
    assert _differs(drawn, got, truth, limit, None, None).startswith(one)
    assert _differs(drawn, got, truth, limit, None, ties) == ""
    near = ((ties.view(-1) == 0) & ((truth.view(-1) - truth.view(-1)[at]).abs() < 0.05)).nonzero()
    got = truth.to(torch.bfloat16)
    got.view(-1)[near[0]] += 0.046875  # as far off, without such a row
    assert _differs(drawn, got, truth, limit, None, ties).startswith(one)


def test_combined_tokens_are_computed_where_they_are_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = case()
    whole = each.reference(RANK, WORLD, 2)
    assert list(each.truths(RANK, WORLD, 2)) == ["outputs", "counts", "out"]
    assert torch.equal(each.truths(RANK, WORLD, 2, ("out",))["out"], whole["out"])

    def combined(*_: Any) -> torch.Tensor:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(type(each), "_combined", combined)
    found = each.truths(RANK, WORLD, 2, ("outputs", "counts"))
    assert list(found) == ["outputs", "counts"]
    assert all(torch.equal(found[name], whole[name]) for name in found)
