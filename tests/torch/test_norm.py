"""AllReduce and GEMM+AllReduce with a residual and RMSNorm: differentiated, compiled, refused. Their
values are judged by the kit's checks ``norms`` and ``shapes``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import rms_norm

import mkernel
from mkernel.errors import PlanMismatch
from mkernel.ops.gemm import GemmCall

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
M, K, N = 6, 16, 24
EPS = 7.0  # far from nothing beside squares of about K
OPS = ("all_reduce", "gemm_all_reduce")
Tensors = dict[str, Tensor]


def operands(op: str, rank: int, dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> Tensors:
    """Return what a rank gives alone, and its bias, which all give alike."""
    if op == "all_reduce":
        return {"x": operand("x", rank, *lead, N, dtype=dtype)}
    return {
        "a": operand("a", rank, *lead, K, dtype=dtype),
        "b": operand("b", rank, K, N, dtype=dtype),
        "bias": operand("bias", 0, N, dtype=dtype),
    }


def given(dtype: torch.dtype, lead: tuple[int, ...] = (M,)) -> Tensors:
    """Return what every rank gives alike."""
    return {
        "residual": operand("residual", 0, *lead, N, dtype=dtype) * 4,
        "norm_weight": operand("weight", 0, N, dtype=dtype),
    }


def summand(tensors: Tensors) -> Tensor:
    return tensors["x"] if "x" in tensors else tensors["a"] @ tensors["b"]


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_the_plan_says_who_normalises(accelerator: str) -> None:
    steps = on_ranks(planned, accelerator=accelerator)
    launch = accelerator == "streams"
    assert steps[0] == [("launch" if launch else "after", False), ("after", True)]


def planned() -> list[tuple[str, bool]]:
    from mkernel.ops.around import Normed
    from mkernel.ops.gemm_all_reduce import OP

    alike, found = given(torch.float32), []
    a, b, own = operands("gemm_all_reduce", mkernel.world().rank, torch.float32).values()
    for bias in (None, own):
        norm = Normed(alike["residual"], alike["norm_weight"], EPS)
        done = OP.call(GemmCall(a, b, bias, norm=norm, out_dtype=torch.float32))
        assert done.plan.norm is not None
        found.append((done.plan.norm.step, done.plan.bias is not None))
    return found


def gradients(op: str, compile: bool, lead: tuple[int, ...]) -> None:
    dtype, rank, call = torch.float64, mkernel.world().rank, getattr(mkernel, op)
    own = operands(op, rank, dtype, lead)
    mine = own | given(dtype, lead)
    leaves, truth = (
        {name: value.clone().requires_grad_() for name, value in mine.items()} for _ in range(2)
    )

    def loss(tensors: Tensors) -> Any:
        plain = {name: each for name, each in tensors.items() if name in own}
        out, new = call(eps=EPS, **tensors)
        return (out.square() * 3).sum() + new.sin().sum() + call(**plain).square().sum()

    (torch.compile(loss, fullgraph=True, backend="aot_eager") if compile else loss)(
        leaves
    ).backward()

    others = [summand(operands(op, other, dtype, lead)) for other in range(RANKS) if other != rank]
    total = summand(truth) + sum(others, torch.zeros(())) + truth.get("bias", 0)
    new = total + truth["residual"]
    out = rms_norm(new, (N,), truth["norm_weight"], EPS)
    ((out.square() * 3).sum() + new.sin().sum() + total.square().sum()).backward()
    for name in mine:
        close(leaves[name].grad, truth[name].grad, 1e-10, name)


@pytest.mark.parametrize(("compile", "lead"), [(False, (M,)), (False, (2, 3)), (True, (2, 3))])
@pytest.mark.parametrize("op", OPS)
def test_gradients(op: str, compile: bool, lead: tuple[int, ...]) -> None:
    on_ranks(gradients, op, compile, lead, ranks=RANKS)


def another_eps(op: str) -> None:
    rank, weight = mkernel.world().rank, given(torch.float32)["norm_weight"]
    with pytest.raises(PlanMismatch, match="eps"):
        getattr(mkernel, op)(
            **operands(op, rank, torch.float32), norm_weight=weight, eps=1.0 + rank
        )


@pytest.mark.parametrize("op", OPS)
def test_another_eps_on_another_rank_is_refused(op: str) -> None:
    on_ranks(another_eps, op, ranks=RANKS)


def companion() -> str:
    terms = [operands("all_reduce", rank, torch.float16)["x"] for rank in range(RANKS)]
    truth = sum((each.double() for each in terms), torch.zeros(()))
    close(mkernel.all_reduce(terms[mkernel.world().rank]), truth, 2e-3)
    return mkernel.plan("all_reduce", m=M, n=N, dtype="float16").accelerator


def test_a_companion_has_it_where_the_first_accelerator_has_not() -> None:
    assert on_ranks(companion, accelerator="ascend,streams", ranks=RANKS) == ["streams"] * RANKS
