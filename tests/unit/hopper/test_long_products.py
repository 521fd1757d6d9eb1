"""Products whose library leaves the last terms out are right all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_fabric import Fabric
from test_hopper_library import planned

from mkernel.backends.accelerators.cuda import long_products
from mkernel.backends.accelerators.cuda.gemm import library as library_path
from mkernel.backends.accelerators.cuda.long_products import (
    STEP,
    Matrix,
    addmm,
    may_lose_terms,
    mm,
    proven,
    untried_mm,
)
from mkernel.plan.two_generation_cache import TwoGenerationCache

K = 5 * STEP + 40


class Library:
    """Products by float32, on any device; of ``split`` rows without the last terms."""

    def __init__(self, lost: int = 64, split: int = 6, loses_with_bias: bool = False) -> None:
        self.lost, self.split, self.loses_with_bias = lost, split, loses_with_bias
        self.biased = 0
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.shapes.append((len(a), a.shape[1]))
        k = a.shape[1]
        if len(a) == self.split and k > STEP:
            k = k // self.lost * self.lost
        out.copy_(a[:, :k].float() @ b[:k].float())

    def with_bias(
        self, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.biased += 1
        k = a.shape[1] // 64 * 64 if self.loses_with_bias else a.shape[1]
        out.copy_(a[:, :k].float() @ b[:k].float() + bias)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    """Takes the place of torch's, with nothing known of it."""

    def take(**how: int) -> Library:
        made = Library(**how)
        monkeypatch.setattr(long_products, "torch_mm", made)
        monkeypatch.setattr(long_products, "torch_addmm", made.with_bias)
        monkeypatch.setattr(long_products, "_right", TwoGenerationCache())
        return made

    return take


def operands(rows: int = 6, k: int = K, n: int = 24, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rows, k, generator=draw), torch.randn(k, n, generator=draw)
    return a.bfloat16(), b.bfloat16()


def off(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: Any = None) -> float:
    truth = a.double() @ b.double()
    if bias is not None:
        truth += bias.double()
    return float((out.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("lost", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
def test_a_library_that_leaves_terms_out(
    library: Callable[..., Library], lost: int, dtype: torch.dtype, turned: bool
) -> None:
    made = library(lost=lost)
    for seed in range(3):
        a, b = operands(seed=seed)
        b = b.t().contiguous().t() if turned else b
        out = torch.full((6, 24), torch.nan, dtype=dtype)
        made(a, b, out)
        assert off(out, a, b) > 0.05, "the library is right: nothing is tested"
        mm(a, b, dtype, out=out)
        assert off(out, a, b) <= (2.0e-3 if dtype == torch.bfloat16 else 1e-6)
    tries = made.shapes.count((6, K)) - 3
    assert tries == 1


@pytest.mark.parametrize(("loses", "products"), [(False, 2), (True, 1)])
def test_a_bias_is_added_before_the_one_rounding(
    library: Callable[..., Library], loses: bool, products: int
) -> None:
    """Whether terms are lost with a bias is tried with one: that is another kernel."""
    made = library(split=6 if not loses else 7, loses_with_bias=loses)
    a, b = operands()
    bias = 1000 * torch.randn(24, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.empty(6, 24, dtype=torch.bfloat16)
    addmm(bias, a, b, out=out)
    exact = a.double() @ b.double() + bias.double()
    assert torch.equal(out, exact.bfloat16())
    assert made.biased == products


def test_one_that_is_right_multiplies_once(library: Callable[..., Library]) -> None:
    made = library(split=7)
    a, b = operands()
    out = torch.empty(6, 24, dtype=torch.bfloat16)
    mm(a, b, out=out)
    assert made.shapes == [(6, K)] * 2
    mm(a, b, out=out)
    assert made.shapes == [(6, K)] * 3
    assert off(out, a, b) <= 2.0e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [6, 7])
def test_what_a_trial_proves(
    library: Callable[..., Library], split: int, dtype: torch.dtype
) -> None:
    library(split=split)
    a, b = operands()
    out = torch.empty(6, 24, dtype=dtype)
    each = [Matrix(x.dtype, tuple(x.shape), x.stride()) for x in (a, b, out)]
    assert not proven(out.device, *each)
    mm(a, b, dtype, out=out)
    assert proven(out.device, *each) == (split == 7)
    assert not proven(torch.device("cuda", 0), *each)
    assert not proven(out.device, each[0], Matrix(b.dtype, b.shape, (1, K)), each[2])
    short = [Matrix(a.dtype, shape, (1, 1)) for shape in ((6, 40), (40, 24))]
    assert proven(out.device, *short, each[2]), "of a kind that is not tried"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_a_trial(library: Callable[..., Library], dtype: torch.dtype) -> None:
    made = library(lost=64)
    a, b = operands()
    out = torch.full((6, 24), torch.nan, dtype=dtype)
    untried_mm(a, b, out=out)
    assert off(out, a, b) <= (2.0e-3 if dtype == torch.bfloat16 else 1e-6)
    assert made.shapes == [(6, 5 * STEP), (6, 40)]


def test_wide_operands_are_multiplied_as_they_are() -> None:
    a, b = (each.double() for each in operands())
    out = torch.empty(6, 24, dtype=torch.float64)
    untried_mm(a, b, out=out)
    assert torch.equal(out, a @ b)


@pytest.mark.parametrize("last", [0.0, float("nan")])
def test_rows_of_b_that_do_not_tell_decide_nothing(
    library: Callable[..., Library], last: float
) -> None:
    made = library()
    a, b = operands()
    b[K // STEP * STEP :] = last
    out = torch.empty(6, 24, dtype=torch.bfloat16)
    mm(a, b, out=out)
    assert last == 0.0 or out.isnan().all()
    a, b = operands(seed=1)
    mm(a, b, out=out)
    assert off(out, a, b) <= 2.0e-3
    assert made.shapes.count((6, K)) == 2


@pytest.mark.parametrize("rows", [1, 6])
def test_kinds_are_tried_by_themselves(library: Callable[..., Library], rows: int) -> None:
    made = library()
    out = torch.empty(rows, 24, dtype=torch.bfloat16)
    for other in (rows, 7 - rows):
        a, b = operands(other)
        out = torch.empty(other, 24, dtype=torch.bfloat16)
        mm(a, b, out=out)
        assert off(out, a, b) <= 2.0e-3
    assert made.shapes.count((6, K)) == 1
    assert made.shapes.count((1, K)) == 2


@pytest.mark.parametrize("k", [STEP, 5 * STEP, 40, 511])
def test_others_are_not_tried(library: Callable[..., Library], k: int) -> None:
    assert not may_lose_terms(k)
    made = library(split=7)
    a, b = operands(k=k)
    mm(a, b, out=torch.empty(6, 24, dtype=torch.bfloat16))
    assert made.shapes == [(6, k)]


@pytest.mark.parametrize(("k", "tried"), [(512, False), (520, True), (72, False)])
def test_native_code_multiplies_by_the_same(
    monkeypatch: pytest.MonkeyPatch, k: int, tried: bool
) -> None:
    made = Fabric(2)
    monkeypatch.setattr(library_path, "native", lambda: made)
    given: list[Any] = []
    monkeypatch.setattr(made, "torch_product", lambda *how: given.append(how))
    plan = planned("gemm_all_reduce", 6, 264, k, 2)
    library_path.starters_product(plan)
    ours = (long_products.mm, long_products.addmm)
    assert given[0][:2] == (ours if tried else (torch.mm, torch.addmm))
