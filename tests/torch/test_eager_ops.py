"""Eager calls that are differentiated: recorded past torch's dispatcher, unless it must see them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from ranks import on_ranks, operand
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mkernel

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ROWS, K, N, EXPERTS, TOP = 8, 16, 24, 4, 2


class Watched(TorchDispatchMode):
    """Notes which ops of mkernel torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "mkernel":
            self.seen.append(op._schema.name.partition("::")[2])
        return op(*args, **(kwargs or {}))


class Seen(TorchFunctionMode):
    """Passes all functions on, and keeps their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def gathers(a: Tensor, b: Tensor) -> Tensor:
    return mkernel.all_gather_gemm(a, b)


def gathers_and_keeps(a: Tensor, b: Tensor) -> Tensor:
    return mkernel.all_gather_gemm(a, b, save_gathered=True)


def scatters(a: Tensor, b: Tensor) -> Tensor:
    return mkernel.gemm_reduce_scatter(a, b)


def reduces(a: Tensor, b: Tensor) -> Tensor:
    return mkernel.gemm_all_reduce(a, b, bias=b[0])


def normalises(a: Tensor, b: Tensor) -> Tensor:
    rows, new = mkernel.gemm_all_reduce(a, b, residual=a @ b, norm_weight=b[0])
    return rows + new


def attends(a: Tensor, b: Tensor) -> Tensor:
    q = a.view(1, 1, ROWS, K)
    out, lse = mkernel.ring_attention(q, q + b.sum(), q, causal=False, return_lse=True)
    return out.sum(1) + lse.sum()


def asks_experts(a: Tensor, b: Tensor) -> Tensor:
    ids = torch.arange(ROWS * TOP).view(ROWS, TOP) % EXPERTS
    weights = torch.ones(ROWS, TOP)
    up = b.expand(EXPERTS // mkernel.world().size, K, N).contiguous()
    found = mkernel.moe_dispatch_gemm(a, ids, up)
    back = mkernel.moe_gemm_combine(found.outputs, up.mT.contiguous(), found.handle, weights)
    return back + mkernel.moe_combine(found.outputs @ b.t(), found.handle, weights)


CALLS = {
    gathers: 2,
    gathers_and_keeps: 2,
    scatters: 2,
    reduces: 1,
    normalises: 1,
    attends: 2,
    asks_experts: 6,
}
"""And how many ops of mkernel each has, forward and backward."""


def gradients(
    call: Callable[[Tensor, Tensor], Tensor],
    around: AbstractContextManager[Any],
    twice: bool = False,
) -> tuple[list[Tensor], str]:
    """Of a and b, by a loss that is not linear; and what recorded the call, where that is one op."""
    rank = mkernel.world().rank
    a, b = operand("a", rank, ROWS, K), operand("b", 0, K, N)
    a.requires_grad_(), b.requires_grad_()
    with around:
        c = call(a, b)
        name = c.grad_fn.name() if c.grad_fn is not None else "nothing"
        found = torch.autograd.grad(c.sin().sum(), (a, b), create_graph=twice)
        if twice:
            found = torch.autograd.grad(sum(each.sin().sum() for each in found), (a, b))
    return [each.detach() for each in found], name


def recorded(call: Callable[[Tensor, Tensor], Tensor], twice: bool) -> dict[str, Any]:
    quick, by = gradients(call, nullcontext(), twice)
    watched = Watched()
    slow, dispatched = gradients(call, watched, twice)
    return {
        "equal": all(torch.equal(one, other) for one, other in zip(quick, slow, strict=True)),
        "finite": all(bool(each.isfinite().all()) and bool(each.any()) for each in quick),
        "by": by,
        "dispatched": dispatched,
        "seen": watched.seen,
    }


@pytest.mark.parametrize(("call", "calls"), CALLS.items())
def test_gradients_are_those_that_torchs_dispatcher_records(
    call: Callable[..., Tensor], calls: int
) -> None:
    for found in on_ranks(recorded, call, False):
        assert found["equal"]
        assert found["finite"]
        assert len(found["seen"]) >= calls  # no mode looks past one


@pytest.mark.parametrize("call", [gathers, scatters, reduces])
def test_gradients_of_gradients_too(call: Callable[..., Tensor]) -> None:
    for found in on_ranks(recorded, call, True):
        assert found["equal"]
        assert found["finite"]


def test_nothing_is_dispatched_where_nothing_has_to_see_it() -> None:
    for found in on_ranks(recorded, gathers, False):
        assert found["by"] == "all_gather_gemmBackward"
        assert found["dispatched"].startswith("GeneratedBackwardFor_mkernel_all_gather_gemm")


def within_a_function_mode() -> list[str]:
    seen = Seen()
    gradients(gathers, seen)
    return [name for name in seen.names if "mkernel" in name]


def test_a_function_mode_sees_the_call() -> None:
    for names in on_ranks(within_a_function_mode):
        assert names == ["mkernel.all_gather_gemm"]
