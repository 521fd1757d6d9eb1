"""Backward passes of all ops: what they call, what they keep, where they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from python_calls import plans
from ranks import on_ranks, operand
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mkernel
from mkernel.ops import inductor

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
M, K, N = 8, 16, 24


# ---- what they call ------------------------------------------------------------------------------

Calls = list[tuple[str, tuple[int, ...]]]


def calls_of(run: Callable[[], Any]) -> Calls:
    """(op, M, N and K) of each call of the world."""
    with plans() as made:
        run()
    return [(plan.op, (plan.gemm.m, plan.gemm.n, plan.gemm.k)) for plan in made]


def backward_calls(op: str, options: dict[str, Any], needed: str) -> Calls:
    rank = mkernel.world().rank
    rows = M // RANKS if op == "all_gather_gemm" else M
    a, b = operand("a", rank, rows, K), operand("b", rank, K, N)
    for name, each in (("a", a), ("b", b)):
        each.requires_grad_(name in needed)
    c = getattr(mkernel, op)(a, b, **options)
    return calls_of((c[0] if isinstance(c, tuple) else c).sum().backward)


GATHER = "all_gather_gemm"
SCATTER = ("gemm_reduce_scatter", (M, K, N))
"""dC @ b^T of an AllGather+GEMM: of all rows, K columns, and nothing but dC to contract."""


@pytest.mark.parametrize(
    ("op", "options", "needed", "expected"),
    [
        (GATHER, {}, "ab", [SCATTER, (GATHER, (M, 8, K))]),
        (GATHER, {}, "a", [SCATTER]),
        (GATHER, {}, "b", [(GATHER, (M, 8, K))]),
        (GATHER, {"save_gathered": True}, "ab", [SCATTER]),
        (GATHER, {"return_gathered": True}, "ab", [SCATTER]),
        (GATHER, {"save_gathered": True}, "b", []),
        ("gemm_reduce_scatter", {}, "ab", [(GATHER, (M, K, N))]),
        ("gemm_reduce_scatter", {}, "a", [(GATHER, (M, K, N))]),
        ("gemm_reduce_scatter", {}, "b", [(GATHER, (M, 8, N))]),
        ("gemm_all_reduce", {}, "ab", []),
    ],
)
def test_a_backward_gathers_what_it_needs_once(
    op: str, options: dict[str, Any], needed: str, expected: Calls
) -> None:
    assert on_ranks(backward_calls, op, options, needed) == [expected] * RANKS


# ---- layers of all ops ---------------------------------------------------------------------------


def gemm_layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = mkernel.gemm_reduce_scatter(mkernel.all_gather_gemm(x, up).relu(), down)
    return mkernel.gemm_all_reduce(y, up)


def attention_layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    q = (x @ up @ down).view(1, 2, M, K // 2)
    return mkernel.ring_attention(q, q.relu(), q, causal=True)


def expert_layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ids = torch.arange(2 * len(x)).view(-1, 2) % (2 * RANKS)
    sent = mkernel.moe_dispatch_gemm(x, ids, torch.stack([up, up.relu()]), capacity=2 * M)
    weights = x[:, :2].contiguous()
    return mkernel.moe_combine(sent.outputs.relu() @ down, sent.handle, weights)


LAYERS = {"gemm": gemm_layer, "attention": attention_layer, "experts": expert_layer}


def parameters() -> list[Tensor]:
    rank = mkernel.world().rank
    shapes = {"x": (M, K), "up": (K, N), "down": (N, K)}
    return [operand(name, rank, *shape).requires_grad_() for name, shape in shapes.items()]


def gradients(layer: Callable[..., Tensor]) -> list[Tensor]:
    given = parameters()
    return list(torch.autograd.grad(layer(*given).sin().sum(), given))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(found, wanted, strict=True)
    )


# ---- activation checkpointing --------------------------------------------------------------------


def checkpointed(name: str, backend: str) -> bool:
    layer = LAYERS[name]

    def again(*given: Tensor) -> Tensor:
        return checkpoint(layer, *given, use_reentrant=False)  # type: ignore[no-any-return]

    wanted = gradients(layer)
    if backend:
        again = torch.compile(again, backend=backend, fullgraph=True)
    return same(gradients(again), wanted)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "") for name in LAYERS),
        ("gemm", "inductor"),  # others are divided alike, and no code is made of them
        *((name, "aot_eager_decomp_partition") for name in ("attention", "experts")),
    ],
)
def test_checkpointed_layers_have_the_same_gradients(name: str, backend: str) -> None:
    assert on_ranks(checkpointed, name, backend) == [True] * RANKS


def refused(name: str) -> str:
    with mock.patch.object(inductor, "keeps_order", return_value=False):
        try:
            checkpointed(name, "aot_eager")
        except Exception as error:
            return str(error)
    return "nothing"


def test_a_torch_that_cannot_compile_checkpointed_regions_is_refused_by_name() -> None:
    for said in on_ranks(refused, next(iter(LAYERS))):
        assert "compiles no checkpointed region in which an op communicates" in said


# ---- threads -------------------------------------------------------------------------------------


def elsewhere(name: str) -> bool:
    """The backward on a thread that has called nothing before."""
    layer, given = LAYERS[name], parameters()
    wanted = gradients(layer)
    loss = layer(*given).sin().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return same([each.grad for each in given if each.grad is not None], wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_may_run_on_another_thread(name: str) -> None:
    assert on_ranks(elsewhere, name) == [True] * RANKS


# ---- what is overwritten -------------------------------------------------------------------------


def overwritten() -> dict[str, str]:
    """What a backward says of a symmetric buffer that was written since it was saved."""
    rank, found = mkernel.world().rank, {}
    b = operand("b", rank, K, K).requires_grad_()
    writes: dict[str, Callable[[Tensor], object]] = {
        "torch": lambda buffer: buffer.zero_(),
        "an op": lambda buffer: mkernel.gemm_all_reduce(
            torch.ones(M, K), torch.ones(K, K), out=buffer
        ),
        "gathered": lambda buffer: mkernel.all_gather_gemm(
            torch.ones(M // RANKS, K), torch.ones(K, K), gathered=buffer
        ),
        "nothing": lambda buffer: None,
    }
    for name, write in writes.items():
        buffer = mkernel.empty((M, K), torch.float32)
        buffer.copy_(operand("a", rank, M, K))
        loss = mkernel.gemm_all_reduce(buffer, b).sum()
        write(buffer)
        found[name] = said_by(loss.backward)
    return found


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_symmetric_buffer_that_was_overwritten_is_no_silent_gradient() -> None:
    for found in on_ranks(overwritten):
        assert found.pop("nothing") == ""
        for name, said in found.items():
            assert "modified by an inplace operation" in said, name
