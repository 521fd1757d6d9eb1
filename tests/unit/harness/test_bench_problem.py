"""The benchmark's data and its truth, against the ops computed by hand on all ranks' inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mkernel.cases import case_of
from mkernel.cases.base import Case
from mkernel.harness.problem import ROWS, Kind, Problem, Tensors

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
WORLD = 2


def problems(op: str, m: int = 64, layout: str = "row") -> list[Problem]:
    sizes = {"m": m, "n": 24, "k": 40}
    options = {"replicate_b": False}
    case = case_of(op)(sizes, "float32", "float32", layout, None, 7, options)
    return [Problem(case, rank, WORLD, torch.device("cpu")) for rank in range(WORLD)]


def drawn(problem: Problem, kind: Kind, turn: int) -> Tensors:
    tensors: Tensors = {}
    problem.fill(kind, tensors, turn)
    return tensors


def by_hand(op: str, kind: Kind, rank: int, ranks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    wide = [{name: tensor.double() for name, tensor in each.items()} for each in ranks]
    if kind == "compute":
        return wide[rank]["a"] @ wide[rank]["b"]
    if op == "all_gather_gemm":
        if kind == "op":
            return torch.cat([each["a"] for each in wide]) @ wide[rank]["b"]
        return torch.cat([each["x"] for each in wide])
    if kind == "bytes":
        shares = [each["x"].chunk(WORLD) for each in wide]
        moved = [shares[source][rank] for source in range(WORLD)]
        if op == "gemm_all_reduce":
            moved += [shares[source][source] for source in range(WORLD)]
        return torch.cat(moved)
    total = sum((e["x"] if kind == "communication" else e["a"] @ e["b"]) for e in wide)
    assert isinstance(total, torch.Tensor)
    return total.chunk(WORLD)[rank] if op == "gemm_reduce_scatter" else total


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["op", "compute", "communication", "bytes"])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_reference(op: str, kind: Kind, layout: str) -> None:
    all_ranks = problems(op, layout=layout)
    inputs = [drawn(problem, kind, 3) for problem in all_ranks]
    for problem in all_ranks:
        wanted = by_hand(op, kind, problem.rank, inputs)
        assert wanted.shape == problem.memory(kind)["out"][0]
        (found,) = problem.compared(kind, {"out": wanted}, 3).values()
        assert found.error < 1e-12
        assert found.elements == wanted.numel()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["op", "compute", "communication", "bytes"])
def test_all_rows_of_large_results_are_judged(op: str, kind: Kind) -> None:
    all_ranks = problems(op, m=1024)
    inputs = [drawn(problem, kind, 3) for problem in all_ranks]
    for problem in all_ranks:
        right = by_hand(op, kind, problem.rank, inputs)
        rows = len(right)
        (found,) = problem.compared(kind, {"out": right}, 3).values()
        assert found.error < 1e-12
        assert found.elements == right.numel()
        for row in (1, rows // 2, rows - 1):
            at = torch.arange(rows)
            at[row] -= 1  # one row is the one before it
            (wrong,) = problem.compared(kind, {"out": right[at]}, 3).values()
            assert wrong.error > 0.1
        (wrong,) = problem.compared(kind, {"out": right.roll(1, 0)}, 3).values()
        assert wrong.error > 0.5
        (unfinished,) = problem.compared(
            kind, {"out": right.index_fill(0, torch.tensor([rows - 1]), float("nan"))}, 3
        ).values()
        assert unfinished.error == float("inf")


CASES: dict[str, Case] = {
    op: case_of(op)(sizes, "float32", "float32", seed=5)
    for op, sizes in {
        "moe_dispatch_gemm": {
            "tokens": 300, "hidden": 8, "features": 16, "experts": 4, "top_k": 2,
        },
        "moe_combine": {"tokens": 300, "features": 16, "experts": 4, "top_k": 2},
        "moe_gemm_combine": {
            "tokens": 300, "hidden": 8, "features": 16, "experts": 4, "top_k": 2,
        },
        "moe_layer": {"tokens": 300, "hidden": 8, "features": 16, "experts": 4, "top_k": 2},
        "ring_attention": {
            "batch": 2, "heads": 2, "kv_heads": 1, "sequence": 600, "head_dim": 8, "causal": True,
        },
        "ring_attention_backward": {
            "batch": 2, "heads": 2, "kv_heads": 1, "sequence": 600, "head_dim": 8, "causal": True,
        },
    }.items()
}  # fmt: skip
CASES["all_reduce"] = case_of("all_reduce")(
    {"m": 300, "n": 16}, "float32", "float32", seed=5, options={"norm": "residual"}
)


@pytest.mark.parametrize("op", CASES)
def test_references_of_some_rows_are_rows_of_the_whole_reference(op: str) -> None:
    case = CASES[op]
    problem = Problem(case, 1, WORLD, torch.device("cpu"))
    whole = case.reference(1, WORLD, 4)
    some = case.reference(1, WORLD, 4, lambda count: problem.sampled_rows(4, count))
    for name, wanted in whole.items():
        at = problem.sampled_rows(4, wanted.shape[case.row_axis])
        if name in case.tolerances():
            assert isinstance(at, torch.Tensor)
            assert torch.allclose(some[name], wanted.index_select(case.row_axis, at), rtol=1e-12)
        else:
            assert torch.equal(some[name], wanted)
    right = {name: each.to(torch.float32) for name, each in whole.items()}
    right["counts"] = whole.get("counts", torch.zeros(1))
    assert case.passed(problem.compared("op", right, 4, tuple(whole)))


def test_every_turn_and_rank_has_its_own_data() -> None:
    one, two = problems("gemm_all_reduce")
    seen = [drawn(one, "op", 1), drawn(one, "op", 2), drawn(two, "op", 1)]
    for name in ("a", "b"):
        assert torch.equal(seen[0][name], drawn(one, "op", 1)[name])
        assert not torch.equal(seen[0][name], seen[1][name])
        assert not torch.equal(seen[0][name], seen[2][name])
    assert drawn(problems("gemm_all_reduce", layout="column")[0], "op", 1)["b"].stride() == (1, 40)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["op", "compute", "communication", "bytes"])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_devices_draw_where_the_turn_before_drew(op: str, kind: Kind, layout: str) -> None:
    """In the same memory, which a captured graph reads, and without any other of its size."""
    made = problems(op, layout=layout)
    device = torch.device("cpu:0")  # is the CPU, and not taken for it
    one, two = (
        replace(each, case=each.case.with_(device=str(device), dtype="bfloat16")) for each in made
    )
    held = drawn(one, kind, 1)
    before = {name: (each, each.clone(), each.data_ptr()) for name, each in held.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty", None)
        patched.setattr(torch.Tensor, "copy_", None)
        one.fill(kind, held, 2)
    for name, (tensor, values, address) in before.items():
        assert held[name] is tensor
        assert tensor.data_ptr() == address
        assert not torch.equal(tensor, values)
        assert torch.equal(tensor, drawn(one, kind, 2)[name])
        if name == "b":
            assert tensor.is_contiguous() == (layout == "row")
    inputs = [drawn(one, kind, 3), drawn(two, kind, 3)]
    right = by_hand(op, kind, 0, inputs)
    assert one.compared(kind, {"out": right}, 3)["out"].error < 1e-12


def test_rows_are_drawn_from_everywhere() -> None:
    (problem, _) = problems("gemm_all_reduce", m=16384)
    rows = problem.sampled_rows(1, 16384)
    assert isinstance(rows, torch.Tensor)
    assert len(rows) == ROWS
    assert (rows // 128).tolist() == list(range(128))  # no row of tiles is left out
    others = problem.sampled_rows(2, 16384)
    assert isinstance(others, torch.Tensor)
    assert not torch.equal(rows, others)
    assert problem.sampled_rows(1, 64) == slice(64)
