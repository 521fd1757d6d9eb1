"""Outputs of the caller's in compiled functions: written without a break in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.errors import ArgumentError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
M, K, N = 8, 16, 24
ROWS = {"all_gather_gemm": M // RANKS, "gemm_reduce_scatter": M, "gemm_all_reduce": M}
OUT = {"all_gather_gemm": M, "gemm_reduce_scatter": M // RANKS, "gemm_all_reduce": M}


def outputs(op: str) -> dict[str, Tensor]:
    made = {"out": torch.full((OUT[op], N), float("nan"))}
    return made | ({"gathered": torch.empty(M, K)} if op == "all_gather_gemm" else {})


def compiled(op: str, backend: str) -> tuple[list[bool], int]:
    """Whether a function of two calls into the same output has what it has uncompiled; graphs."""
    rank = mkernel.world().rank
    a, b = operand("a", rank, ROWS[op], K), operand("b", rank, K, N)
    call = getattr(mkernel, op)

    def twice(a: Tensor, b: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first = call(a, b, **given) * 2
        return first, call(a * 3, b, **given)

    wanted, held = outputs(op), outputs(op)
    expected = [each.clone() for each in twice(a, b, wanted)]
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    found = torch.compile(twice, backend=graphs, fullgraph=True)(a, b, held)
    same = [torch.allclose(x, y) for x, y in zip(found, expected, strict=True)]
    same += [torch.allclose(held[name], wanted[name]) for name in wanted]
    return same, graphs.frame_count


@pytest.mark.parametrize(
    ("op", "backend"), [*((op, "aot_eager") for op in ROWS), ("all_gather_gemm", "inductor")]
)
def test_a_compiled_function_writes_to_the_callers_output(op: str, backend: str) -> None:
    for same, graphs in on_ranks(compiled, op, backend):
        assert all(same)
        assert graphs == 1


def refused(change: dict[str, Any]) -> str:
    rank = mkernel.world().rank
    a, b = operand("a", rank, M, K), operand("b", rank, K, N)
    given = {"out": torch.empty(M, N), **change}
    a.requires_grad_(given.pop("requires_grad", False))
    torch._dynamo.reset()
    run = torch.compile(lambda: mkernel.gemm_all_reduce(a, b, **given), backend="aot_eager")
    try:
        run()
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"out": torch.empty(M, N - 1)}, "out = "),
        ({"out": torch.empty(N, M).t()}, "out = "),
        ({"out_dtype": torch.float16}, "out = "),
        ({"requires_grad": True}, "requires grad"),
    ],
)
def test_a_wrong_output_is_refused_as_outside_of_it(change: dict[str, Any], said: str) -> None:
    for found in on_ranks(refused, change):
        assert said in found
