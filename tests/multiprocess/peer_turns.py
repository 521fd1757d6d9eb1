"""Turns of peers outside of `mkernel bench`, with stand-ins for products of e4m3 that torch has on CUDA
devices alone."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases import Case, case_of
from mkernel.harness.contenders import Contender, experts
from mkernel.harness.problem import Inputs, Problem

SIZES = {"tokens": 60, "hidden": 64, "features": 128, "experts": 4, "top_k": 2}
SCALED_SIZES = {"tokens": 61, "hidden": 384, "features": 128, "experts": 6, "top_k": 2}


def wrong(
    kind: type[Contender],
    op: str,
    options: dict[str, Any],
    case: Case | None = None,
    **where: Any,
) -> list[str]:
    """List what is wrong with two turns of a peer, in the memory of the first."""
    world = mkernel.world()
    case = case or case_of(op)(SIZES, "bfloat16", "bfloat16", options=options)
    if "scales" in options:
        case = case.with_(sizes=SCALED_SIZES, dtype="float8_e4m3fn", layout="column")
    problem = Problem(case, world.rank, world.size, torch.device("cpu"), **where)
    peer, inputs, found = kind(problem), Inputs(), []
    for turn in (3, 4):
        problem.fill("op", inputs, turn)
        peer.before(inputs)
        outputs = peer.outputs()
        peer.place(inputs, outputs)
        results = peer.judged(peer.call(inputs, outputs), inputs)
        compared = problem.compared("op", results, turn, peer.promised())
        limits = peer.limits()
        assert compared
        found += [
            f"{kind.name} {op} {options}: {name} {one.error} {one.why}"
            for name, one in compared.items()
            if not one.error <= limits.get(name, 0.0)
        ]
    peer.close()
    return found


def block_product(a: Tensor, b: Tensor, scale: Tensor, padded: Tensor, out: Tensor) -> None:
    """As torch's on a CUDA device, in float32."""
    assert padded.shape[0] % 4 == 0
    assert padded.t().is_contiguous()
    assert b.t().is_contiguous()
    of_b = padded[: len(b) // 128]
    out.copy_(dequantised(a, scale) @ dequantised(b, of_b))


def grouped(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, *, offs: Tensor, **options: Any
) -> Tensor:
    """As torch's on a CUDA device, in float32; nobody's rows are anything."""
    assert (options["out_dtype"], of_a.shape, of_b.shape) == (
        torch.bfloat16, (len(a),), (len(b), b.shape[2]),
    )  # fmt: skip
    assert b.transpose(1, 2).is_contiguous()
    out = torch.full((len(a), b.shape[2]), float("nan"), dtype=torch.bfloat16)
    for expert, (first, last) in enumerate(pairwise([0, *offs.tolist()])):
        rows = a[first:last].float() * of_a[first:last, None]
        out[first:last] = (rows @ (b[expert].float() * of_b[expert])).bfloat16()
    return out


def grouped_apart(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, experts: Tensor
) -> None:
    """As DeepGEMM's, in float32: each 128 rows are one expert's, or nobody's."""
    assert all(each.is_contiguous() for each in (*b, out, experts))
    assert experts.dtype == torch.int32
    out.fill_(float("nan"))
    for first in range(0, len(out), 128):
        (expert,) = experts[first : first + 128].unique().tolist()
        rows = slice(first, first + 128)
        assert len(out[rows]) == 128
        if expert >= 0:
            wide = dequantised(b[0][expert], b[1][expert])
            out[rows] = (dequantised(a[0][rows], a[1][rows]) @ wide.t()).bfloat16()


def scaled_errors(kind: type[Contender], op: str, **where: Any) -> list[str]:
    options: dict[str, Any] = {"scales": "block", "routing": "zipf"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "block_product", block_product)
        patch.setattr(torch, "_scaled_grouped_mm", grouped)
        library = SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=grouped_apart)
        patch.setitem(sys.modules, "deep_gemm", library)
        found = wrong(kind, op, options, **where)
        return found if found else wrong(kind, op, {**options, "capacity": 244}, **where)
