"""AllReduce, with a residual and RMSNorm: as torch computes them, differentiated, compiled, refused."""

from __future__ import annotations

import pytest
import torch
from ranks import checked, close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import rms_norm

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import (
    ArgumentError,
    PlanMismatch,
    Unsupported,
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


def limit(dtype: torch.dtype) -> float:
    return TOLERANCE[str(dtype).removeprefix("torch.")]


def summed(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    rank, parts = mkernel.world().rank, terms(dtype, lead)
    truth = sum((each.double() for each in parts), torch.zeros(()))
    x, kept = parts[rank], parts[rank].clone()
    found = mkernel.all_reduce(x)
    assert found.dtype == dtype
    close(found, truth, limit(dtype))
    assert torch.equal(x, kept), "an input was written"
    held = torch.full_like(x, float("nan"))
    assert mkernel.all_reduce(x, out=held) is held
    assert torch.equal(held, found)
    apart = torch.stack([x, x], -1)[..., 0]
    assert not apart.is_contiguous()
    assert torch.equal(mkernel.all_reduce(apart), found)
    wide = mkernel.all_reduce(x, out_dtype=torch.float64)
    assert wide.dtype == torch.float64
    close(wide, truth, 1e-12)
    assert mkernel.all_reduce(x, out=x) is x
    assert torch.equal(x, found)


@pytest.mark.parametrize("lead", [(M,), (1,), (2, 3)], ids=["matrix", "row", "activation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_sum(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    on_ranks(summed, dtype, lead, ranks=RANKS)


def normed(dtype: torch.dtype, lead: tuple[int, ...], residual: bool, in_place: bool) -> None:
    rank, parts, alike = mkernel.world().rank, terms(dtype, lead), given(dtype, lead)
    total = sum((each.double() for each in parts), torch.zeros(()))
    if residual:
        total = total + alike["residual"].double()
    else:
        del alike["residual"]
    before = {name: value.clone() for name, value in alike.items()}
    for _ in range(2):
        x = parts[rank].clone()
        found = mkernel.all_reduce(x, eps=EPS, out=x if in_place else None, **alike)  # type: ignore[call-overload]
        out, new = found if residual else (found, None)
        assert not in_place or out is x
        close(out, rms_norm(total, (N,), alike["norm_weight"].double(), EPS), limit(dtype))
        if residual:
            close(new, total, limit(dtype))
    assert all(torch.equal(alike[name], before[name]) for name in alike), "an input was written"


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("lead", [(M,), (2, 3)], ids=["matrix", "activation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_norm_behind_it(
    dtype: torch.dtype, lead: tuple[int, ...], residual: bool, in_place: bool
) -> None:
    on_ranks(normed, dtype, lead, residual, in_place, ranks=RANKS)


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

    found = torch.compile(step, fullgraph=True)(parts[rank], *alike.values(), held)
    assert all(torch.equal(*pair) for pair in zip((*found, held), (out, new, truth), strict=True))


@pytest.mark.slow
def test_it_compiles() -> None:
    on_ranks(compiled, ranks=RANKS)


def registered() -> list[dict[str, str]]:
    alike, x = given(torch.float32), terms(torch.float32)[mkernel.world().rank]
    arguments = (x, alike["norm_weight"], alike["residual"])
    return [
        checked(torch.ops.mkernel.all_reduce, (x,)),
        checked(torch.ops.mkernel.all_reduce_norm, arguments, eps=EPS),
    ]


def test_the_registered_ops_are_what_their_schemas_say() -> None:
    assert on_ranks(registered, ranks=RANKS) == [[{}, {}]] * RANKS


def another_eps() -> None:
    alike, rank = given(torch.float32), mkernel.world().rank
    with pytest.raises(PlanMismatch, match="eps"):
        mkernel.all_reduce(
            terms(torch.float32)[rank], norm_weight=alike["norm_weight"], eps=1.0 + rank
        )


def test_another_eps_on_another_rank_is_refused() -> None:
    on_ranks(another_eps, ranks=RANKS)


def unprovided() -> None:
    with pytest.raises(Unsupported, match="'ascend' does not provide 'all_reduce'"):
        mkernel.all_reduce(terms(torch.float16)[mkernel.world().rank])


def test_an_accelerator_without_it_says_so() -> None:
    on_ranks(unprovided, accelerator="ascend", ranks=RANKS)


def companion() -> str:
    summed(torch.float16, (M,))
    return mkernel.plan("all_reduce", m=M, n=N, dtype="float16").accelerator


def test_a_companion_has_it_where_the_first_accelerator_has_not() -> None:
    assert on_ranks(companion, accelerator="ascend,streams", ranks=RANKS) == ["streams"] * RANKS
