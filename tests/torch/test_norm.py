"""GEMM+AllReduce with a residual and RMSNorm: as torch computes them, differentiated, refused."""

from __future__ import annotations

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import rms_norm

import mkernel
from mkernel.errors import PlanMismatch

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
M, K, N = 6, 16, 24
EPS = 7.0  # far from nothing beside squares of about K


def parts(dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> list[tuple[Tensor, Tensor]]:
    """(a, b) of every rank."""
    return [
        (operand("a", rank, *lead, K, dtype=dtype), operand("b", rank, K, N, dtype=dtype))
        for rank in range(RANKS)
    ]


def given(dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> dict[str, Tensor]:
    """What every rank gives alike."""
    return {
        "residual": operand("residual", 0, *lead, N, dtype=dtype) * 4,
        "norm_weight": operand("weight", 0, N, dtype=dtype),
        "bias": operand("bias", 0, N, dtype=dtype),
    }


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_the_plan_says_who_normalises(accelerator: str) -> None:
    steps = on_ranks(planned, accelerator=accelerator)
    launch = accelerator == "streams"
    assert steps[0] == [("launch" if launch else "after", False), ("after", True)]


def planned() -> list[tuple[str, bool]]:
    from mkernel.ops.around import Normed
    from mkernel.ops.gemm_all_reduce import OP

    alike, found = given(torch.float32), []
    a, b = parts(torch.float32)[mkernel.world().rank]
    for bias in (None, alike["bias"]):
        norm = Normed(alike["residual"], alike["norm_weight"], EPS)
        done = OP.call(a, b, bias, norm=norm, out_dtype=torch.float32)
        assert done.plan.norm is not None
        found.append((done.plan.norm.step, done.plan.bias is not None))
    return found


def gradients(compile: bool, lead: tuple[int, ...]) -> None:
    dtype = torch.float64
    rank, alike = mkernel.world().rank, given(dtype, lead)
    names = ("a", "b", "residual", "norm_weight", "bias")
    mine = dict(zip(names, (*parts(dtype, lead)[rank], *alike.values()), strict=True))
    leaves = {name: value.clone().requires_grad_() for name, value in mine.items()}

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        out, new = mkernel.gemm_all_reduce(eps=EPS, **tensors)  # type: ignore[misc, arg-type]
        return (out.square() * 3).sum() + new.sin().sum()

    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compile else loss)(
        leaves
    ).backward()

    truth = {name: value.clone().requires_grad_() for name, value in mine.items()}
    others = [x @ y for at, (x, y) in enumerate(parts(dtype, lead)) if at != rank]
    total = truth["a"] @ truth["b"] + sum(others, torch.zeros(())) + truth["bias"]
    new = total + truth["residual"]
    out = rms_norm(new, (N,), truth["norm_weight"], EPS)
    ((out.square() * 3).sum() + new.sin().sum()).backward()
    for name in names:
        close(leaves[name].grad, truth[name].grad, 1e-10, name)


@pytest.mark.parametrize("lead", [(M,), (2, 3)], ids=["matrix", "activation"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_gradients(compile: bool, lead: tuple[int, ...]) -> None:
    on_ranks(gradients, compile, lead)


def without_residual() -> None:
    rank, alike = mkernel.world().rank, given(torch.float64)
    a, b = (each.requires_grad_() for each in parts(torch.float64)[rank])
    weight = alike["norm_weight"].requires_grad_()
    mkernel.gemm_all_reduce(a, b, norm_weight=weight, eps=EPS).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert weight.grad is not None


def test_gradients_without_a_residual() -> None:
    on_ranks(without_residual)


def another_eps() -> None:
    alike, rank = given(torch.float32), mkernel.world().rank
    a, b = parts(torch.float32)[rank]
    with pytest.raises(PlanMismatch, match="eps"):
        mkernel.gemm_all_reduce(a, b, norm_weight=alike["norm_weight"], eps=1.0 + rank)


def test_another_eps_on_another_rank_is_refused() -> None:
    on_ranks(another_eps)
