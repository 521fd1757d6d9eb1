"""torch.autograd.gradcheck in float64 of every op, each input by itself and all at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.ops.registration import ops
from mkernel.world.world import World

IDS = torch.tensor([[0, 1], [1, -1], [0, 0]])
NOTHING = torch.full_like(IDS, -1)
"""Beside a handle only the shape of ids is read."""
OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "all_gather_gemm": (lambda a, b, c: mkernel.all_gather_gemm(a, b, bias=c), [(2, 3), (3, 2), (2,)]),
    "all_gather_gemm, gathered": (
        lambda a, b: mkernel.all_gather_gemm(a, b, return_gathered=True), [(2, 3), (3, 2)]
    ),
    "all_gather_gemm, saved": (
        lambda a, b: mkernel.all_gather_gemm(a, b, save_gathered=True), [(2, 3), (3, 2)]
    ),
    "all_gather_gemm, along 1": (
        lambda a, b: mkernel.all_gather_gemm(a, b, gather_dim=1), [(2, 2, 3), (3, 2)]
    ),
    "all_gather_gemm, several": (
        lambda a, b, c, x, y: tuple(mkernel.all_gather_gemm(a, [b, c], bias=[x, y])),
        [(2, 3), (3, 2), (3, 1), (2,), (1,)],
    ),
    "all_gather_gemm, several and gathered": (
        lambda *given: several(*given),  # noqa: PLW0108 - which is defined below
        [(2, 3), (3, 2), (3, 1)],
    ),
    "all_gather_gemm, several along 1": (
        lambda a, b, c: tuple(mkernel.all_gather_gemm(a, [b, c], gather_dim=1)),
        [(2, 2, 3), (3, 2), (3, 1)],
    ),
    "gemm_reduce_scatter": (
        lambda a, b, c: mkernel.gemm_reduce_scatter(a, b, bias=c), [(2, 3), (3, 2), (2,)]
    ),
    "gemm_reduce_scatter, along 1": (
        lambda a, b: mkernel.gemm_reduce_scatter(a, b, scatter_dim=1), [(2, 2, 3), (3, 2)]
    ),
    "gemm_all_reduce": (
        lambda a, b, c: mkernel.gemm_all_reduce(a, b, bias=c), [(2, 2, 3), (3, 2), (2,)]
    ),
    "gemm_all_reduce, normalised": (
        lambda a, b, w, r, c: mkernel.gemm_all_reduce(
            a, b, norm_weight=w, residual=r, bias=c, eps=0.1
        ),
        [(2, 3), (3, 2), (2,), (2, 2), (2,)],
    ),
    "gemm_all_reduce, without a residual": (
        lambda a, b, w: mkernel.gemm_all_reduce(a, b, norm_weight=w), [(2, 3), (3, 2), (2,)]
    ),
    "all_reduce": (mkernel.all_reduce, [(2, 3)]),
    "all_reduce, normalised": (
        lambda x, w, r: mkernel.all_reduce(x, norm_weight=w, residual=r, eps=0.1),
        [(2, 2, 3), (3,), (2, 2, 3)],
    ),
    "all_reduce, without a residual": (
        lambda x, w: mkernel.all_reduce(x, norm_weight=w), [(2, 3), (3,)]
    ),
    "moe_dispatch": (
        lambda x: mkernel.moe_dispatch(x, IDS, num_experts=2, capacity=7).rows, [(3, 2)]
    ),
    "moe_dispatch, routed": (
        lambda x: mkernel.moe_dispatch(x, IDS, num_experts=2, handle=handle()).rows, [(3, 2)]
    ),
    "moe_dispatch_gemm": (
        lambda x, w: mkernel.moe_dispatch_gemm(x, IDS, w).outputs, [(3, 2), (2, 2, 4)]
    ),
    "moe_dispatch_gemm, activated": (
        lambda x, w: mkernel.moe_dispatch_gemm(
            x, IDS, w, capacity=7, activation="silu_and_mul"
        ).outputs,
        [(3, 2), (2, 2, 4)],
    ),
    "moe_dispatch_gemm, routed": (
        lambda x, w: mkernel.moe_dispatch_gemm(
            x, NOTHING, w, activation="silu_and_mul", handle=handle()
        ).outputs,
        [(3, 2), (2, 2, 4)],
    ),
    "moe_combine": (lambda y, t: mkernel.moe_combine(y, handle(), t), [(5, 3), (3, 2)]),
    "moe_gemm_combine": (
        lambda h, w, t: mkernel.moe_gemm_combine(h, w, handle(), t), [(5, 4), (2, 4, 3), (3, 2)]
    ),
    "moe_gemm_combine, by rank": (
        lambda h, w, t: mkernel.moe_gemm_combine(h, w, handle(), t, returns="ranks"),
        [(5, 4), (2, 4, 3), (3, 2)],
    ),
    "ring_attention": (
        lambda q, k, v: mkernel.ring_attention(q, k, v, scale=0.7),
        [(1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)],
    ),
    "ring_attention, causal": (
        lambda q, k, v: mkernel.ring_attention(q, k, v, causal=True, return_lse=True),
        [(1, 2, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2)],
    ),
    "ring_attention, lse alone": (
        lambda q, k, v: mkernel.ring_attention(q, k, v, return_lse=True)[1],
        [(1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)],
    ),
    "ring_attention, documents": (
        lambda q, k, v: mkernel.ring_attention(
            q, k, v, causal=True, cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32)
        ),
        [(1, 2, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2)],
    ),
    "ring_attention, by positions": (
        lambda q, k, v: mkernel.ring_attention(*(each.transpose(1, 2) for each in (q, k, v))),
        [(2, 3, 2, 2), (2, 3, 1, 2), (2, 3, 1, 2)],
    ),
}  # fmt: skip


def several(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    results, whole = mkernel.all_gather_gemm(a, [b, c], return_gathered=True, save_gathered=True)
    return (*results, whole)


def handle() -> mkernel.MoeHandle:
    x, w = torch.ones(3, 2, dtype=torch.float64), torch.ones(2, 2, 4, dtype=torch.float64)
    return mkernel.moe_dispatch_gemm(x, IDS, w).handle


@pytest.mark.parametrize("name", OPS)
def test_derivatives_are_those_that_are_seen(name: str) -> None:
    op, shapes = OPS[name]
    generator = torch.Generator().manual_seed(len(name))
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    places = range(len(values))
    # Backwards of products call other ops for other pairs of inputs; others' inputs are independent.
    pairs = [] if name.startswith(("moe", "ring")) else combinations(places, len(values) - 1)
    for some in [*((each,) for each in places), *pairs, (*places,)]:
        if not some or (name.endswith("lse alone") and some == (2,)):  # no function of v
            continue
        inputs: list[Tensor] = [
            value.clone().requires_grad_(at in some) for at, value in enumerate(values)
        ]
        assert torch.autograd.gradcheck(op, inputs)


def test_a_gradient_that_nobody_asks_for_is_none() -> None:
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2)
    mkernel.gemm_reduce_scatter(a, b).sum().backward()
    assert b.grad is None
    assert torch.equal(a.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_gradients_have_the_dtype_of_their_tensors(op: str) -> None:
    half = torch.ones(2, 8, dtype=torch.float16, requires_grad=True)
    b = torch.ones(8, 8, dtype=torch.float16, requires_grad=True)
    bias = torch.ones(8, dtype=torch.float16, requires_grad=True)
    c = getattr(mkernel, op)(half, b, bias=bias, out_dtype=torch.float32)
    assert c.dtype == torch.float32
    c.sum().backward()
    for given in (half, b, bias):
        assert given.grad is not None
        assert given.grad.dtype == torch.float16


def test_what_was_gathered_has_the_dtype_of_a_and_the_product_its_own() -> None:
    a = torch.ones(2, 8, dtype=torch.float16, requires_grad=True)
    c, whole = mkernel.all_gather_gemm(
        a, a.detach().t(), return_gathered=True, out_dtype=torch.float32
    )
    assert (c.dtype, whole.dtype) == (torch.float32, torch.float16)  # type: ignore[union-attr]


def test_sums_with_gradients_have_the_dtype_that_is_asked_for() -> None:
    x = torch.ones(2, 8, dtype=torch.float16, requires_grad=True)
    weight = torch.ones(8, dtype=torch.float16)
    for found in (
        mkernel.all_reduce(x, out_dtype=torch.float32),
        mkernel.all_reduce(x, norm_weight=weight, out_dtype=torch.float32),
        mkernel.gemm_all_reduce(x, x.detach().t(), norm_weight=weight[:2], out_dtype=torch.float32),
    ):
        assert isinstance(found, Tensor)
        assert found.dtype == torch.float32
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert gradient.dtype == torch.float16


def test_weights_of_another_dtype_have_gradients_of_theirs() -> None:
    y = torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True)
    x, w = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(2, 8, 4, dtype=torch.bfloat16)
    given = mkernel.moe_dispatch_gemm(x, IDS, w).handle
    weights = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    mkernel.moe_combine(y, given, weights).float().sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float64
    assert torch.equal(weights.grad, torch.where(IDS < 0, 0.0, 4.0).double())


def test_plans_of_gradients_are_of_the_call_s_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = mkernel.world().accelerator
    launch, plans = accelerator.launch, {}

    def seen(call: Any) -> Any:
        plans[call.plan.op] = call.plan.shape
        return launch(call)

    monkeypatch.setattr(accelerator, "launch", seen)
    x, w = torch.ones(3, 8, requires_grad=True), torch.ones(2, 8, 4)
    mkernel.moe_dispatch_gemm(x, IDS, w, capacity=7).outputs.sum().backward()
    assert plans["moe_dispatch_backward"].capacity == 7
    mkernel.moe_dispatch_gemm(x, IDS, w).outputs.sum().backward()
    assert plans["moe_dispatch_backward"].capacity is None
    for layout in ("heads", "positions"):
        q = torch.ones(1, 4, 2, 8)
        q = (q.transpose(1, 2) if layout == "positions" else q).requires_grad_()
        mkernel.ring_attention(q, q, q).sum().backward()
        assert plans["ring_attention_backward"].layout == layout


@pytest.mark.parametrize("eager", [False, True])
def test_the_registered_attention_without_documents(alone: World, eager: bool) -> None:
    """``cu_seqlens`` may be left out, of torch's op too."""
    q, k, v = (torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    called = ops.ring_attention if eager else torch.ops.mkernel.ring_attention
    out, _ = called(q, k, v, causal=True, group=alone.name)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), (q, k, v)))
