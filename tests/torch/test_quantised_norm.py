"""Normalised sums in e4m3 with a scale a row: near the truth, the same everywhere, food for the next
product, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import rms_norm

import mkernel
from mkernel.backends.contracts.scaled import LARGEST, quantised_rows
from mkernel.cases.base import TOLERANCE

RANKS = 2
M, K, N = 6, 16, 32
EPS = 7.0  # far from nothing beside squares of about K
LEAST = 2.0**-9
"""The step of e4m3 numbers next to 0."""

on_two = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def off(quantised: Tensor, scale: Tensor, truth: Tensor, rounding: float = 0.0) -> str:
    """What is wrong of rows in e4m3; empty where nothing is. An element is half a step off at most, a
    sixteenth of itself or half of the least step; its row was rounded before by ``rounding`` of its
    largest element."""
    if quantised.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        return f"dtypes {quantised.dtype}, {scale.dtype}"
    largest = truth.abs().amax(-1, keepdim=True)
    if scale.shape != largest.shape:
        return f"scales of shape {tuple(scale.shape)}"
    wide = scale.double()
    if ((wide * LARGEST - largest).abs() > (rounding + 1e-6) * largest).any():
        return f"scales {scale}"
    allowed = truth.abs() / 16 + wide * LEAST / 2 + (rounding + 1e-6) * largest
    error = (quantised.double() * wide - truth).abs()
    return "" if (error <= allowed).all() else f"off by {(error - allowed).max()}"


def drawn() -> Tensor:
    """Rows of very different sizes."""
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    return rows * torch.logspace(-6, 6, 64)[:, None]


def test_rows_are_quantised_to_the_nearest() -> None:
    rows = drawn()
    assert off(*quantised_rows(rows), rows.double()) == ""


def of_the_whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().max() / LARGEST).expand(len(rows), 1)
    return (rows / scale).to(torch.float8_e4m3fn), scale


def of_the_row_before(rows: Tensor) -> tuple[Tensor, Tensor]:
    quantised, scale = quantised_rows(rows)
    return quantised, scale.roll(1, 0)


def toward_zero(rows: Tensor) -> tuple[Tensor, Tensor]:
    quantised, scale = quantised_rows(rows)
    bits = quantised.view(torch.uint8)
    beyond = quantised.float().abs() > (rows / scale).abs()
    return (bits - beyond.to(torch.uint8)).view(torch.float8_e4m3fn), scale


def of_seven_eighths(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(-1, keepdim=True) * (7 / 8) / LARGEST
    return (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("fault", [of_the_whole, of_the_row_before, toward_zero, of_seven_eighths])
def test_planted_faults_are_seen(fault: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    rows = drawn()
    assert off(*fault(rows), rows.double())


def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    rows = torch.zeros(4, 8)
    rows[1, 3], rows[2, 3], rows[3, 3] = torch.inf, torch.nan, 1e-44  # the last is subnormal
    quantised, scale = quantised_rows(rows)
    assert scale[0].item() == 1
    assert (quantised[0].float() == 0).all()
    for row in (1, 2):
        assert (quantised[row].float() * scale[row]).isnan().any()
    assert quantised[3].float().isfinite().all()


def alike(dtype: torch.dtype, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """What every rank gives alike."""
    return {
        "residual": operand("residual", 0, *lead, N, dtype=dtype) * 4,
        "norm_weight": operand("weight", 0, N, dtype=dtype),
    }


def parts(op: str, dtype: torch.dtype, lead: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The operands of every rank; with ``scaled`` e4m3 ones with scales."""
    found = []
    for rank in range(RANKS):
        if op == "all_reduce":
            found.append({"x": operand("x", rank, *lead, N, dtype=dtype)})
            continue
        a, b = operand("a", rank, *lead, K, dtype=dtype), operand("b", rank, N, K, dtype=dtype)
        if op == "scaled":
            (a, of_a), (b, of_b) = quantised_rows(a), quantised_rows(b)
            found.append({"a": a, "b": b.t(), "a_scale": of_a, "b_scale": of_b.t()})
        else:
            found.append({"a": a, "b": b.t()})
    return found


def term(given: dict[str, Tensor]) -> Tensor:
    """What a rank adds to the sum."""
    if "x" in given:
        return given["x"].double()
    a, b = given["a"].double(), given["b"].double()
    return a @ b if "a_scale" not in given else (a * given["a_scale"]) @ (b * given["b_scale"])


def called(
    op: str, dtype: torch.dtype, lead: tuple[int, ...], residual: bool, compiled: bool
) -> list[int]:
    """Judges a call; the bits of its results."""
    given, everyone = alike(dtype, lead), parts(op, dtype, lead)
    if not residual:
        del given["residual"]
    name = "gemm_all_reduce" if op == "scaled" else op
    call = partial(getattr(mkernel, name), eps=EPS, quantise="row")
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = call(**everyone[mkernel.world().rank], **given)
    quantised, scale = found[:2]
    total = sum(map(term, everyone), torch.zeros(()))
    rounding = TOLERANCE[str(dtype).removeprefix("torch.")] * 4
    if residual:
        total = total + given["residual"].double()
        close(found[2], total, rounding)
    truth = rms_norm(total, (N,), given["norm_weight"].double(), EPS)
    assert off(quantised, scale, truth, rounding) == ""
    return [
        *quantised.view(torch.uint8).flatten().tolist(),
        *scale.view(torch.int32).flatten().tolist(),
    ]


class TestOnRanks:
    pytestmark = on_two

    @pytest.mark.parametrize(
        ("lead", "residual", "compiled"), [((M,), False, True), ((2, 3), True, False)]
    )
    @pytest.mark.parametrize("op", ["all_reduce", "gemm_all_reduce", "scaled"])
    def test_a_norm_in_e4m3(
        self, op: str, lead: tuple[int, ...], residual: bool, compiled: bool
    ) -> None:
        bits = on_ranks(called, op, torch.bfloat16, lead, residual, compiled, ranks=RANKS)
        assert all(each == bits[0] for each in bits)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_norm_of_e4m3_products(self, compiled: bool) -> None:
        on_ranks(scaled_and_normalised, compiled, ranks=RANKS)

    def test_the_next_product_takes_it(self) -> None:
        on_ranks(fed, ranks=RANKS)


def fed() -> None:
    """Rows and scales as the operand of a product whose other one is exact."""
    own, given = (
        parts("all_reduce", torch.bfloat16, (M,))[mkernel.world().rank],
        alike(torch.bfloat16, (M,)),
    )
    quantised, scale, _ = mkernel.all_reduce(own["x"], eps=EPS, quantise="row", **given)
    weight = (torch.arange(N * 16).view(16, N) % 3 - 1).to(torch.float8_e4m3fn).t()
    ones = torch.ones(1, 16)
    found = mkernel.gemm_all_reduce(quantised, weight, a_scale=scale, b_scale=ones)
    truth = RANKS * (quantised.double() * scale.double()) @ weight.double()
    close(found, truth, TOLERANCE["bfloat16"] * 2)


def scaled_and_normalised(compiled: bool) -> None:
    """The norm of a product of e4m3 operands, in 16 bits, into a caller's output and a new one."""
    given, everyone = alike(torch.bfloat16, (M,)), parts("scaled", torch.bfloat16, (M,))
    total = sum(map(term, everyone), torch.zeros(())) + given["residual"].double()
    truth = rms_norm(total, (N,), given["norm_weight"].double(), EPS)
    call: Any = partial(mkernel.gemm_all_reduce, eps=EPS)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    for out in (None, torch.full((M, N), torch.nan).bfloat16()):
        normed, new = call(**everyone[mkernel.world().rank], **given, out=out)
        assert out is None or normed.data_ptr() == out.data_ptr()
        close(normed, truth, TOLERANCE["bfloat16"] * 4)
        close(new, total, TOLERANCE["bfloat16"] * 4)
