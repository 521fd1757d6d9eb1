"""Outputs in memory of other arguments: refused by name, but where a call is right all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks, operand
from torch import Tensor

import mkernel
from mkernel.errors import ArgumentError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
M, K = 8, 16


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with; empty where it is not."""
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return ""


def outputs_in_inputs() -> dict[str, str]:
    rank = mkernel.world().rank
    shard, square = operand("a", rank, M // RANKS, M), operand("b", rank, M, M)
    rows, bias = operand("rows", rank, M, M), torch.ones(M)
    gathers, reduces = mkernel.all_gather_gemm, mkernel.gemm_all_reduce
    whole, residual, weight = torch.zeros(M, M), operand("r", 0, M, M), torch.ones(M)
    gathers(shard, square, out=torch.empty(M, M), gathered=whole)  # as the wrong ones look
    calls = {
        "out is b": lambda: gathers(shard, square, out=square),
        "out holds a": lambda: gathers(whole[: M // RANKS], square, out=whole),
        "out holds bias": lambda: gathers(shard, square, bias=whole[1], out=whole),
        "out is gathered": lambda: gathers(shard, square, out=whole, gathered=whole),
        "gathered is b": lambda: gathers(shard, square, gathered=square),
        "gathered holds a": lambda: gathers(
            whole[1 : 1 + M // RANKS], square, gathered=whole, return_gathered=True
        ),
        "another out is b": lambda: gathers(
            shard, [square, square[:, :4]], out=[whole, square.view(-1)[: 4 * M].view(M, 4)]
        ),
        "two outs are one": lambda: gathers(shard, [square, rows], out=[whole, whole]),
        "an out is gathered": lambda: gathers(
            shard, [square, rows], out=[torch.empty(M, M), whole], gathered=whole
        ),
        "sum over a": lambda: reduces(rows, square, out=rows),
        "sum over bias": lambda: reduces(rows, square, bias=whole[0], out=whole),
        "part over a": lambda: mkernel.gemm_reduce_scatter(rows, square, out=rows[: M // RANKS]),
        "norm over residual": lambda: reduces(
            rows, square, residual=residual, norm_weight=weight, out=residual
        ),
        "part of x": lambda: mkernel.all_reduce(whole[:4], out=whole[1:5]),
        "sum over residual": lambda: mkernel.all_reduce(
            rows, residual=residual, norm_weight=weight, out=residual
        ),
    }
    calls["apart"] = lambda: gathers(shard, square, bias=bias, out=whole)
    return {name: refusal(call) for name, call in calls.items()}


def test_an_output_in_memory_of_another_argument_is_refused_by_name() -> None:
    for said in on_ranks(outputs_in_inputs):
        assert said.pop("apart") == ""
        for name, text in said.items():
            assert "shares no memory with" in text, name
        assert said["out is gathered"].startswith("gathered = Tensor(")
        assert said["out is b"].endswith("with b")
        assert said["two outs are one"].startswith("out[1] = ")
        assert said["another out is b"].endswith("with b[0]")


def in_place() -> list[bool]:
    rank = mkernel.world().rank
    a, b = operand("a", rank, M // RANKS, K), operand("b", rank, K, M)
    wanted, whole = mkernel.all_gather_gemm(a, b, return_gathered=True)
    held: Tensor = torch.zeros(M, K)
    own = held.chunk(RANKS)[rank].copy_(a)
    found, gathered = mkernel.all_gather_gemm(own, b, gathered=held, return_gathered=True)
    x = operand("x", rank, M, K)
    total = mkernel.all_reduce(x)
    mkernel.all_reduce(x, out=x)
    return [
        bool(torch.equal(found, wanted)),
        gathered is held,
        bool(torch.equal(held, whole)),
        bool(torch.equal(x, total)),
    ]


@pytest.mark.parametrize("accelerator", ["streams", "ascend,streams"])
def test_own_rows_of_what_is_gathered_and_sums_in_place_are_right(accelerator: str) -> None:
    assert on_ranks(in_place, accelerator=accelerator) == [[True] * 4] * RANKS
