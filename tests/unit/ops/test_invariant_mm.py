"""``invariant_mm`` and the products it is made of: a library's product that depends on more than a row
is found by measuring."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.backends.contracts import invariant_product
from mkernel.backends.contracts.invariant_product import (
    block_of,
    check_products,
    first_difference,
    in_blocks,
)
from mkernel.backends.contracts.norm import row_mean
from mkernel.errors import ArgumentError, DtypeError, ShapeError, Unsupported

CPU = torch.device("cpu")
ROWS, COLUMNS = block_of(CPU)
MM = torch.mm
Multiply = Callable[[Tensor, Tensor], Tensor]


def halves(a: Tensor, b: Tensor) -> Tensor:
    """Adds even terms, then odd ones."""
    return MM(a[:, ::2].contiguous(), b[::2].contiguous()) + MM(a[:, 1::2], b[1::2])


def by_place(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((MM(a, b)[:-1], halves(a, b)[-1:]))


def by_column(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((MM(a, b)[:, :-1], halves(a, b)[:, -1:]), 1)


def by_neighbours(a: Tensor, b: Tensor) -> Tensor:
    few = (a != 0).any(1).sum() < len(a)
    return halves(a, b) if few else MM(a, b)


def by_other_rows(a: Tensor, b: Tensor) -> Tensor:
    """Adds in another order where the first row is larger than the last: what depends on values."""
    return halves(a, b) if a[0].abs().sum() > a[-1].abs().sum() else MM(a, b)


def spills(a: Tensor, b: Tensor) -> Tensor:
    """Lets what is not finite reach the other rows."""
    made = MM(a, b)
    return made if made.isfinite().all() else made.sum() * made


@pytest.mark.parametrize("k", [16, 48, 256, 1000])
def test_torchs_product_keeps_the_promise_here(k: int) -> None:
    assert first_difference(torch.mm, CPU, k) is None


@pytest.mark.parametrize("multiply", [by_place, by_column, by_neighbours, by_other_rows, spills])
def test_a_product_that_depends_on_more_than_a_row_is_found(multiply: Multiply) -> None:
    assert first_difference(multiply, CPU, 256) is not None


def test_such_a_product_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", by_place)
    with pytest.raises(Unsupported, match=r"\[64, 336\] @ \[336, 128\] .* in another place"):
        check_products(CPU, 336)
    monkeypatch.setattr(invariant_product, "first_difference", lambda *_: None)
    with pytest.raises(Unsupported, match="invariant=False"):  # it is measured once
        check_products(CPU, 336)
    invariant_product._measured.cache_clear()


def operands(rows: int = 150, k: int = 256, n: int = 200) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    a, b = torch.randn(rows, k, generator=chance), torch.randn(k, n, generator=chance)
    return a.bfloat16(), b.bfloat16()


def test_rows_alone_and_columns_alone_have_the_same_bits() -> None:
    a, b = operands()
    whole = mkernel.invariant_mm(a, b)
    assert whole.dtype == torch.bfloat16
    truth = a.double() @ b.double()
    assert (whole.double() - truth).norm() < 2 * 3e-3 * truth.norm()
    for rows in (slice(0, 1), slice(7, 8), slice(60, 70), slice(149, 150)):
        assert torch.equal(mkernel.invariant_mm(a[rows], b), whole[rows])
    assert torch.equal(mkernel.invariant_mm(a, b[:, 130:]), whole[:, 130:])
    assert torch.equal(mkernel.invariant_mm(a.view(3, 50, -1), b), whole.view(3, 50, -1))
    assert torch.equal(mkernel.invariant_mm(a, b.t().contiguous().t()), whole)


def test_segments_and_partials_decide_bits() -> None:
    a, b = operands()
    found = [
        mkernel.invariant_mm(a, b, invariant=Invariant(*each), out_dtype=torch.float32)
        for each in ((1, "float32"), (8, "float32"), (8, "bfloat16"), (16, "bfloat16"))
    ]
    assert all(not torch.equal(one, other) for one, other in pairwise(found))


def test_gradients() -> None:
    a, b = operands()
    leaf, weight = a.clone().requires_grad_(), b.clone().requires_grad_()
    of_c = torch.randn(150, 200).bfloat16()
    mkernel.invariant_mm(leaf, weight).backward(of_c)
    few = a[20:23].clone().requires_grad_()
    mkernel.invariant_mm(few, b).backward(of_c[20:23])
    assert leaf.grad is not None
    assert few.grad is not None
    assert torch.equal(leaf.grad[20:23], few.grad)
    truth = of_c.double() @ b.double().t()
    assert (leaf.grad.double() - truth).norm() < 3e-3 * truth.norm()
    assert weight.grad is not None
    truth = a.double().t() @ of_c.double()
    assert (weight.grad.double() - truth).norm() < 3e-3 * truth.norm()


def test_compiled_and_autocast() -> None:
    a, b = operands()
    how = Invariant(4, "float32")

    def product(x: Tensor, y: Tensor) -> Tensor:
        return mkernel.invariant_mm(x, y, invariant=how) * 2

    found = torch.compile(product, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(found, product(a, b))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(a.float(), b.float()), product(a, b))


def test_refusals() -> None:
    a, b = operands()
    with pytest.raises(ShapeError, match=r"k = 250 .*a multiple of 128"):
        mkernel.invariant_mm(a[:, :250], b[:250])
    with pytest.raises(DtypeError, match=r"a\.dtype = torch\.float64"):
        mkernel.invariant_mm(a.double(), b.double())
    with pytest.raises(ArgumentError, match="invariant = False"):
        mkernel.invariant_mm(a, b, invariant=False)


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1000])
def test_the_mean_of_a_row_depends_on_the_row(width: int) -> None:
    rows = torch.randn(40, width) * torch.exp2(torch.randint(-12, 12, (40, width)).float())
    whole = row_mean(rows, invariant=True)
    assert torch.equal(torch.cat([row_mean(each[None], invariant=True) for each in rows]), whole)
    assert torch.allclose(whole, rows.double().mean(-1, keepdim=True).float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("function", [torch.nn.functional.silu, lambda x: x * len(x)])
def test_elementwise_functions_see_blocks_of_one_size(
    function: Callable[[Tensor], Tensor],
) -> None:
    """One that depends on its block's size shows it for certain."""
    x = torch.randn(300, 129, generator=torch.Generator().manual_seed(4))
    whole = in_blocks(function, x)
    assert in_blocks(function, x[:0]).shape == (0, 129)
    for rows in (slice(0, 1), slice(7, 9), slice(128, 299), slice(None, None, 3)):
        assert torch.equal(in_blocks(function, x[rows]), whole[rows])
