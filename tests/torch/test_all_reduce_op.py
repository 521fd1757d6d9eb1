"""AllReduce, with a residual and RMSNorm: as torch computes them, differentiated, compiled, refused."""

from __future__ import annotations

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import rms_norm

import mkernel
from mkernel.errors import (
    ArgumentError,
    PlanMismatch,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
M, N = 7, 24
EPS = 2.0  # far from nothing beside squares of about RANKS


def terms(dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> list[Tensor]:
    """x of every rank."""
    return [operand("x", rank, *lead, N, dtype=dtype) for rank in range(RANKS)]


def given(dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> dict[str, Tensor]:
    """What every rank gives alike."""
    return {
        "residual": operand("residual", 0, *lead, N, dtype=dtype),
        "norm_weight": operand("weight", 0, N, dtype=dtype),
    }


def gradients(compile: bool, lead: tuple[int, ...]) -> None:
    dtype = torch.float64
    rank, parts = mkernel.world().rank, terms(dtype, lead)
    mine = {"x": parts[rank], **given(dtype, lead)}
    leaves = {name: value.clone().requires_grad_() for name, value in mine.items()}

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        out, new = mkernel.all_reduce(eps=EPS, **tensors)  # type: ignore[call-overload]
        whole = mkernel.all_reduce(tensors["x"])
        return (out.square() * 3).sum() + new.sin().sum() + whole.square().sum()

    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compile else loss)(
        leaves
    ).backward()

    truth = {name: value.clone().requires_grad_() for name, value in mine.items()}
    others = sum((x for at, x in enumerate(parts) if at != rank), torch.zeros(()))
    whole = truth["x"] + others
    new = whole + truth["residual"]
    out = rms_norm(new, (N,), truth["norm_weight"], EPS)
    ((out.square() * 3).sum() + new.sin().sum() + whole.square().sum()).backward()
    for name in mine:
        close(leaves[name].grad, truth[name].grad, 1e-10, name)


@pytest.mark.parametrize("lead", [(M,), (2, 3)], ids=["matrix", "activation"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_gradients(compile: bool, lead: tuple[int, ...]) -> None:
    on_ranks(gradients, compile, lead, ranks=RANKS)


def without_residual() -> None:
    x = terms(torch.float64)[mkernel.world().rank].requires_grad_()
    weight = given(torch.float64)["norm_weight"].requires_grad_()
    mkernel.all_reduce(x, norm_weight=weight, eps=EPS).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    with pytest.raises(ArgumentError, match="requires grad"):
        mkernel.all_reduce(x, out=torch.empty_like(x))


def test_gradients_without_a_residual() -> None:
    on_ranks(without_residual, ranks=RANKS)


def compiled() -> None:
    rank, parts, alike = mkernel.world().rank, terms(torch.float32), given(torch.float32)
    truth = mkernel.all_reduce(parts[rank])
    out, new = mkernel.all_reduce(parts[rank], eps=EPS, **alike)  # type: ignore[call-overload]
    held = torch.empty_like(truth)

    def step(x: Tensor, residual: Tensor, weight: Tensor, held: Tensor) -> tuple[Tensor, ...]:
        mkernel.all_reduce(x * 1, out=held)
        return mkernel.all_reduce(x * 1, residual=residual, norm_weight=weight, eps=EPS)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(
        parts[rank], *alike.values(), held
    )
    assert all(torch.equal(*pair) for pair in zip((*found, held), (out, new, truth), strict=True))


def test_it_compiles() -> None:
    on_ranks(compiled, ranks=RANKS)


def another_eps() -> None:
    alike, rank = given(torch.float32), mkernel.world().rank
    with pytest.raises(PlanMismatch, match="eps"):
        mkernel.all_reduce(
            terms(torch.float32)[rank], norm_weight=alike["norm_weight"], eps=1.0 + rank
        )


def test_another_eps_on_another_rank_is_refused() -> None:
    on_ranks(another_eps, ranks=RANKS)


def companion() -> str:
    parts = terms(torch.float16)
    truth = sum((each.double() for each in parts), torch.zeros(()))
    close(mkernel.all_reduce(parts[mkernel.world().rank]), truth, 2e-3)
    return mkernel.plan("all_reduce", m=M, n=N, dtype="float16").accelerator


def test_a_companion_has_it_where_the_first_accelerator_has_not() -> None:
    assert on_ranks(companion, accelerator="ascend,streams", ranks=RANKS) == ["streams"] * RANKS
