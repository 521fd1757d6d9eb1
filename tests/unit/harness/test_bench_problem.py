"""The benchmark's data and its truth, against the ops computed by hand on all ranks' inputs."""

from __future__ import annotations

import pytest
import torch

from mkernel.cases import compare
from mkernel.harness.problem import ROWS, Kind, Problem

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
WORLD = 2


def problems(op: str, m: int = 64, layout: str = "row") -> list[Problem]:
    return [
        Problem(op, m, 24, 40, "float32", layout, 7, rank, WORLD, torch.device("cpu"))
        for rank in range(WORLD)
    ]


def drawn(problem: Problem, kind: Kind, turn: int) -> dict[str, torch.Tensor]:
    tensors = problem.empty(kind)
    problem.fill(tensors, problem.rank, turn)
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
        rows = problem.sampled_rows(kind, 3)
        wanted = by_hand(op, kind, problem.rank, inputs)
        assert wanted.shape == problem.out_shape(kind)
        assert compare(wanted[rows], problem.reference(kind, 3, rows)).error < 1e-12


def test_every_turn_and_rank_has_its_own_data() -> None:
    one, two = problems("gemm_all_reduce")
    seen = [drawn(one, "op", 1), drawn(one, "op", 2), drawn(two, "op", 1)]
    for name in ("a", "b"):
        assert torch.equal(seen[0][name], drawn(one, "op", 1)[name])
        assert not torch.equal(seen[0][name], seen[1][name])
        assert not torch.equal(seen[0][name], seen[2][name])
    assert drawn(problems("gemm_all_reduce", layout="column")[0], "op", 1)["b"].stride() == (1, 40)


def test_rows_are_drawn_from_everywhere() -> None:
    (problem, _) = problems("gemm_all_reduce", m=16384)
    rows = problem.sampled_rows("op", 1)
    assert len(rows) == ROWS
    assert (rows // 128).tolist() == list(range(128))  # no row of tiles is left out
    assert not torch.equal(rows, problem.sampled_rows("op", 2))
    assert problems("gemm_all_reduce")[0].sampled_rows("op", 1).tolist() == list(range(64))
