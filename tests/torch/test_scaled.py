"""The GEMM ops of e4m3 operands: as the dequantised product in float64, registered, refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import SCALED_MM, checked, close, on_ranks, operand
from torch import Tensor

import mkernel
from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError, DtypeError, PlanMismatch, ShapeError
from mkernel.plan.scales import scale_sizes

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
K, N = 256, 136
E4M3 = torch.float8_e4m3fn
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
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


@pytest.mark.parametrize(("lead", "dim"), [((6,), 0), ((2, 4), 0), ((2, 4), 1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_it_is_the_dequantised_product(op: str, mode: str, lead: tuple[int, ...], dim: int) -> None:
    if op not in DIMS and dim:
        pytest.skip("its rows are no rank's")
    on_ranks(computed, op, mode, lead, dim)


def planned(mode: str) -> tuple[Any, ...]:
    from mkernel.ops.all_gather_gemm import OP
    from mkernel.ops.scales import Scaled

    given = drawn(mode, mkernel.world().rank)
    scaled = Scaled(given["a_scale"], given["b_scale"], False)
    plan = OP.call(given["a"], given["b"], scaled=scaled).plan
    again = scaled._replace(use_fast_accum=True)
    if mode == "block":
        with pytest.raises(ArgumentError, match="use_fast_accum"):
            OP.call(given["a"], given["b"], scaled=again)
        again = scaled
    fast = OP.call(given["a"], given["b"], scaled=again).plan
    assert (plan.digest() == fast.digest()) == (mode == "block")
    assert fast.scales is not None
    assert plan.scales is not None
    assert (plan.scales.use_fast_accum, fast.scales.use_fast_accum) == (False, mode != "block")
    return plan.scales.mode, plan.dtype, plan.out_dtype, plan.schedule.scaled_products  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_says_how_it_is_scaled_and_multiplied(mode: str) -> None:
    product = "scaled_mm" if SCALED_MM and mode != "block" else "dequantised"
    assert on_ranks(planned, mode)[0] == (mode, "float8_e4m3fn", "bfloat16", product)


def several(mode: str, lead: tuple[int, ...], dim: int) -> None:
    rank, widths = mkernel.world().rank, (24, N, 40)
    every = [[drawn(mode, each, lead, n) for n in widths] for each in range(RANKS)]
    mine = every[rank]
    given: dict[str, Any] = {
        "a": mine[0]["a"],
        "b": [one["b"] for one in mine],
        "a_scale": mine[0]["a_scale"],
        "b_scale": [one["b_scale"] for one in mine],
        "gather_dim": dim,
    }
    bias = [operand("bias", 0, n, dtype=torch.bfloat16) for n in widths]
    found, whole = mkernel.all_gather_gemm(return_gathered=True, **given)
    added = mkernel.all_gather_gemm(bias=bias, **given)
    gathered = torch.cat([each[0]["a"] for each in every], dim)
    assert torch.equal(whole.view(torch.uint8), gathered.view(torch.uint8))
    for at, (result, more) in enumerate(zip(found, added, strict=True)):
        wanted = truth("all_gather_gemm", [each[at] for each in every], rank, dim)
        close(result, wanted, tolerance(torch.bfloat16), f"b[{at}]")
        close(more, wanted + bias[at].double(), 2 * tolerance(torch.bfloat16), f"bias[{at}]")
    one, _ = mkernel.all_gather_gemm(return_gathered=True, gather_dim=dim, **mine[0])
    wanted = truth("all_gather_gemm", [each[0] for each in every], rank, dim)
    close(one, wanted, tolerance(torch.bfloat16))


@pytest.mark.parametrize(("lead", "dim"), [((6,), 0), ((2, 4), 1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_several_b_share_a_gather(mode: str, lead: tuple[int, ...], dim: int) -> None:
    on_ranks(several, mode, lead, dim)


def strided() -> None:
    """Parts of larger matrices, scales with any strides."""
    rank = mkernel.world().rank
    every = [drawn("block", each) for each in range(RANKS)]
    mine = every[rank]
    wider = torch.zeros(N, K + 32).to(E4M3)
    wider[:, :K] = mine["b"].t()
    apart = mine["a_scale"].repeat_interleave(2, -1)[..., ::2]
    rows = mine["b_scale"].contiguous()
    assert not apart.is_contiguous()
    assert not rows.t().is_contiguous()
    found = mkernel.all_gather_gemm(mine["a"], wider[:, :K].t(), a_scale=apart, b_scale=rows)
    close(found, truth("all_gather_gemm", every, rank), tolerance(torch.bfloat16))


def test_strides_are_the_callers() -> None:
    on_ranks(strided)


_WITHOUT_SUMS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Of opcheck: its test of the schema adds e4m3 tensors up, which torch cannot."""


def registered(op: str) -> dict[str, str]:
    given = drawn("row", mkernel.world().rank)
    names = ("a", "b", "a_scale", "b_scale")
    found = getattr(torch.ops.mkernel, f"{op}_scaled")
    return checked(found, [given[name] for name in names], tests=_WITHOUT_SUMS)


@pytest.mark.parametrize("op", OPS)
def test_the_registered_op_is_what_its_schema_says(op: str) -> None:
    assert on_ranks(registered, op) == [{}] * RANKS


def registered_many() -> dict[str, str]:
    given = drawn("row", mkernel.world().rank)
    arguments = (given["a"], [given["b"]], given["a_scale"], [given["b_scale"]], [])
    found = torch.ops.mkernel.all_gather_gemms_scaled
    return checked(found, arguments, tests=_WITHOUT_SUMS)


def test_the_registered_op_of_several_b_is_what_its_schema_says() -> None:
    assert on_ranks(registered_many) == [{}] * RANKS


def compiled(op: str) -> None:
    given = drawn("row", mkernel.world().rank)

    def call(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
        found: Tensor = getattr(mkernel, op)(a, b, a_scale=a_scale, b_scale=b_scale) * 2
        return found

    eager = call(**given)
    again = torch.compile(call, fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(eager, again)


@pytest.mark.parametrize("op", OPS)
def test_compiled(op: str) -> None:
    on_ranks(compiled, op)


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
