"""torch.autograd.gradcheck in float64 over the inputs of all ranks, which take every step together.

A function under test takes all ranks' inputs and gives all ranks' outputs, the same on every rank: so
every rank perturbs the same element at the same time, and sees what it changes anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import on_ranks, operand
from torch import Tensor, distributed

import mkernel
from mkernel.plan.pipeline import Returns

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2


def gathered(own: Tensor) -> Tensor:
    """A tensor of every rank [W, ...]."""
    found = [torch.empty_like(own) for _ in range(RANKS)]
    distributed.all_gather(found, own.contiguous())
    return torch.stack(found)


class Mine(torch.autograd.Function):
    """This rank's part of all ranks' inputs, whose gradients come from every rank."""

    @staticmethod
    def forward(ctx: Any, every: Tensor) -> Tensor:
        return every[mkernel.world().rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


class Everyones(torch.autograd.Function):
    """The outputs of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[mkernel.world().rank]


def agrees(op: Callable[..., Any], shapes: Sequence[tuple[int, ...]], *, one: bool = False) -> bool:
    """Whether an op's derivatives are those that are seen. ``one``: its output is one tensor, which
    every rank holds."""

    def every(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = op(*(Mine.apply(each) for each in inputs))
        outputs = found if isinstance(found, tuple) else (found,)
        return outputs if one else tuple(Everyones.apply(each) for each in outputs)

    inputs = [
        operand(f"input {at}", 0, RANKS, *shape, dtype=torch.float64).requires_grad_()
        for at, shape in enumerate(shapes)
    ]
    return torch.autograd.gradcheck(every, inputs)


def gemms() -> dict[str, bool]:
    rows, k, n = 2, 3, 2
    return {
        "all_gather_gemm": agrees(mkernel.all_gather_gemm, [(rows, k), (k, n)]),
        "all_gather_gemm, saved": agrees(
            lambda a, b: mkernel.all_gather_gemm(a, b, save_gathered=True), [(rows, k), (k, n)]
        ),
        "all_gather_gemm, gathered": agrees(
            lambda a, b: mkernel.all_gather_gemm(a, b, return_gathered=True), [(rows, k), (k, n)]
        ),
        "gemm_reduce_scatter": agrees(mkernel.gemm_reduce_scatter, [(2 * rows, k), (k, n)]),
        "gemm_all_reduce": agrees(mkernel.gemm_all_reduce, [(rows + 1, k), (k, n)], one=True),
    }


def attention() -> dict[str, bool]:
    def attend(causal: bool, lse: bool, *documents: int) -> Callable[..., Any]:
        bounds = torch.tensor(documents, dtype=torch.int32) if documents else None
        return lambda q, k, v: mkernel.ring_attention(
            q, k, v, causal=causal, cu_seqlens=bounds, return_lse=lse
        )

    q, kv = (1, 2, 4, 2), (1, 1, 4, 2)
    return {
        f"causal {causal}, lse {lse}": agrees(attend(causal, lse), [q, kv, kv])
        for causal, lse in ((False, False), (True, True))
    } | {"documents": agrees(attend(True, True, 0, 3, 8), [q, kv, kv])}


def experts() -> dict[str, bool]:
    rank = mkernel.world().rank
    tokens, hidden, features, each, top_k = 3, 2, 2, 2, 2
    ids = torch.tensor([[[0, 3], [3, 3], [-1, 1]], [[2, 0], [-1, -1], [1, 2]]])[rank]
    capacity = 6

    def dispatch(x: Tensor, w: Tensor) -> Tensor:
        return mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity).outputs

    def combine(y: Tensor, weights: Tensor) -> Tensor:
        x, w = torch.ones(tokens, hidden), torch.ones(each, hidden, features)
        handle = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity).handle
        return mkernel.moe_combine(y, handle, weights)

    def gemm_combine(returns: Returns) -> Callable[..., Tensor]:
        def call(h: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
            x, w = torch.ones(tokens, hidden), torch.ones(each, hidden, features)
            handle = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity).handle
            return mkernel.moe_gemm_combine(h, w2, handle, weights, returns=returns)

        return call

    sizes = [(capacity, features), (each, features, 3), (tokens, top_k)]
    return {
        "gemm_combine by slot": agrees(gemm_combine("slots"), sizes),
        "gemm_combine by rank": agrees(gemm_combine("ranks"), sizes),
        "dispatch": agrees(dispatch, [(tokens, hidden), (each, hidden, features)]),
        "combine": agrees(combine, [(capacity, features), (tokens, top_k)]),
    }


@pytest.mark.parametrize("family", [gemms, attention, experts])
def test_derivatives_are_those_that_are_seen(family: Callable[[], dict[str, bool]]) -> None:
    for found in on_ranks(family, ranks=RANKS):
        assert found == dict.fromkeys(found, True)


def wrong_dtype() -> str:
    try:
        mkernel.all_gather_gemm(torch.ones(16, 16).double(), torch.ones(16, 16).double())
    except mkernel.errors.DtypeError as error:
        return str(error)
    return ""


def test_other_accelerators_refuse_float64_by_name() -> None:
    for said in on_ranks(wrong_dtype, accelerator="ascend"):
        assert said == (
            "a.dtype = torch.float64 is not legal; expected one of float16, bfloat16, float32"
        )
