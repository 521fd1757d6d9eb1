"""The GEMM ops of e4m3 operands: as the dequantised product in float64, registered, refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import SCALED_MM, close, on_ranks, operand
from torch import Tensor

import mkernel
from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError, DtypeError, PlanMismatch, ShapeError
from mkernel.ops.gemm import GemmCall
from mkernel.plan.arguments import scale_sizes

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
K, N = 256, 136
E4M3 = torch.float8_e4m3fn
MODES = ("tensor", "row", "block")
DIMS = {"all_gather_gemm": "gather_dim", "gemm_reduce_scatter": "scatter_dim"}


def scale(name: str, rank: int, *shape: int) -> Tensor:
    """Far from one another and from 1."""
    return operand(name, rank, *shape).abs().add(0.1).mul(0.01)


def drawn(mode: str, rank: int, lead: tuple[int, ...] = (6,), n: int = N) -> dict[str, Tensor]:
    """What a rank gives: b and its scales as the transposes of contiguous ones."""
    rows = torch.Size(lead).numel()
    of_a, of_b = scale_sizes(mode, rows, n, K)  # type: ignore[arg-type]
    a_scale, b_scale = scale("a_scale", rank, *of_a), scale(f"b_scale{n}", rank, *of_b[::-1]).t()
    return {
        "a": operand("a", rank, *lead, K).to(E4M3),
        "b": operand(f"b{n}", rank, n, K).to(E4M3).t(),
        "a_scale": a_scale if mode == "tensor" else a_scale.view(*lead, -1),
        "b_scale": b_scale,
    }


def wide(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """a and b times their scales, in float64."""
    a, of_a = given["a"], given["a_scale"]
    rows = of_a.view(1, 1) if of_a.numel() == 1 else of_a.flatten(0, -2)
    left = dequantised(a.flatten(0, -2), rows, torch.float64).view(a.shape)
    of_b = given["b_scale"].view(1, 1) if given["b_scale"].numel() == 1 else given["b_scale"]
    return left, dequantised(given["b"], of_b, torch.float64)


def truth(op: str, every: list[dict[str, Tensor]], rank: int, dim: int = 0) -> Tensor:
    pairs = [wide(each) for each in every]
    if op == "all_gather_gemm":
        return torch.cat([a for a, _ in pairs], dim) @ pairs[rank][1]
    total = sum((a @ b for a, b in pairs), torch.zeros(()))
    return total.chunk(RANKS, dim)[rank] if op == "gemm_reduce_scatter" else total


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE[str(dtype).removeprefix("torch.")]  # type: ignore[index]


def computed(op: str, mode: str, lead: tuple[int, ...], dim: int) -> None:
    rank = mkernel.world().rank
    every = [drawn(mode, each, lead) for each in range(RANKS)]
    wanted = truth(op, every, rank, dim)
    public = partial(getattr(mkernel, op), **({DIMS[op]: dim} if op in DIMS else {}), **every[rank])
    found = public()
    assert found.dtype == torch.bfloat16
    close(found, wanted, tolerance(torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.full(wanted.shape, float("nan"), dtype=dtype)
        assert public(out=out) is out
        close(out, wanted, tolerance(dtype), str(dtype))
    bias = operand("bias", 0, N)
    total = truth(op, every, rank, dim) + bias.double()
    close(public(bias=bias, out_dtype=torch.float32), total, tolerance(torch.float32), "bias")


@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("op", DIMS)
def test_it_is_the_dequantised_product(op: str, mode: str) -> None:
    """Along dimension 1; along 0 the kit's check ``scales`` judges every mode and dtype."""
    on_ranks(computed, op, mode, (2, 4), 1)


def planned(mode: str) -> tuple[Any, ...]:
    from mkernel.ops.all_gather_gemm import OP
    from mkernel.ops.around import Scaled

    given = drawn(mode, mkernel.world().rank)
    scaled = Scaled(given["a_scale"], given["b_scale"], False)
    plan = OP.call(GemmCall(given["a"], given["b"], scaled=scaled)).plan
    again = scaled._replace(use_fast_accum=True)
    if mode == "block":
        with pytest.raises(ArgumentError, match="use_fast_accum"):
            OP.call(GemmCall(given["a"], given["b"], scaled=again))
        again = scaled
    fast = OP.call(GemmCall(given["a"], given["b"], scaled=again)).plan
    assert (plan.digest() == fast.digest()) == (mode == "block")
    assert fast.scales is not None
    assert plan.scales is not None
    assert (plan.scales.use_fast_accum, fast.scales.use_fast_accum) == (False, mode != "block")
    return plan.scales.mode, plan.dtype, plan.out_dtype, plan.schedule.scaled_products  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_says_how_it_is_scaled_and_multiplied(mode: str) -> None:
    product = "scaled_mm" if SCALED_MM and mode != "block" else "dequantised"
    assert on_ranks(planned, mode)[0] == (mode, "float8_e4m3fn", "bfloat16", product)


def mixed() -> None:
    given = drawn("row", mkernel.world().rank)
    scales = [given["b_scale"], torch.ones(2, 2)]
    with pytest.raises(ShapeError, match="b_scale"):
        mkernel.all_gather_gemm(
            given["a"], [given["b"]] * 2, a_scale=given["a_scale"], b_scale=scales
        )
    with pytest.raises(ArgumentError, match="b_scale"):
        mkernel.all_gather_gemm(
            given["a"], [given["b"]] * 2, a_scale=given["a_scale"], b_scale=scales[:1]
        )


def test_scales_of_several_b_are_of_one_kind() -> None:
    on_ranks(mixed)


def unclaimed() -> None:
    given = drawn("row", mkernel.world().rank)
    with pytest.raises(DtypeError, match="accelerator 'ascend' takes: of e4m3 operands none"):
        mkernel.all_gather_gemm(**given)


def test_an_accelerator_without_scales_refuses() -> None:
    on_ranks(unclaimed, accelerator="ascend")


def another_mode() -> None:
    rank = mkernel.world().rank
    with pytest.raises(PlanMismatch, match="scales"):
        mkernel.all_gather_gemm(**drawn(MODES[rank], rank))


def test_another_kind_of_scales_on_another_rank_is_refused() -> None:
    on_ranks(another_mode)
