"""The signatures of torch's symmetric memory, on one rank: dimensions, scales, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.errors import ArgumentError, LayoutError, MkernelError, NotInitialized, ShapeError

E4M3 = torch.float8_e4m3fn
needs_scaled_mm = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="this torch multiplies no e4m3 on CPUs",
)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


A, BS = drawn(2, 6, 16), [drawn(16, 8), drawn(16, 24)]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_gathers(dim: int, count: int, whole: bool) -> None:
    gathered, products = mkernel.fused_all_gather_matmul(A, BS[:count], dim, None, return_A=whole)
    if whole:
        assert gathered is not None
        torch.testing.assert_close(gathered, A, rtol=0, atol=0)
    else:
        assert gathered is None
    assert len(products) == count
    for got, b in zip(products, BS, strict=False):
        torch.testing.assert_close(got, A @ b, rtol=1e-4, atol=1e-4)


def test_what_was_gathered_is_returned_by_default() -> None:
    gathered, _ = mkernel.fused_all_gather_matmul(A, BS, 0, None)
    assert gathered is not None


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatters(dim: int, op: str, dtype: torch.dtype) -> None:
    a, b = A.to(dtype), BS[0].to(dtype)
    found = mkernel.fused_matmul_reduce_scatter(a, b, op, dim, None)
    assert found.dtype == dtype
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, a @ b, rtol=limit, atol=limit)


def operands() -> tuple[Tensor, list[Tensor]]:
    return drawn(2, 8, 32).to(E4M3), [drawn(n, 32).to(E4M3).t() for n in (16, 48)]


@needs_scaled_mm
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_of_e4m3(by_rows: bool, biased: bool, dim: int) -> None:
    a, several = operands()
    of_a = drawn(2, 8, 1).abs() if by_rows else torch.tensor(0.5)
    of_b = [drawn(1, n).abs() if by_rows else torch.tensor([n / 8.0]) for n in (16, 48)]
    biases = [drawn(16), None] if biased else [None, None]
    gathered, found = mkernel.fused_all_gather_scaled_matmul(
        a, several, of_a, of_b, dim, None, biases, [None] * 2, [torch.float32] * 2, [False] * 2
    )
    assert torch.equal(gathered.view(torch.uint8), a.view(torch.uint8))
    for got, b, scale, bias in zip(found, several, of_b, biases, strict=True):
        wanted = (a.double() * of_a) @ (b.double() * scale)
        if bias is not None:
            wanted = wanted + bias
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@needs_scaled_mm
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_scatters_of_e4m3(by_rows: bool, op: str, dim: int, flat: bool) -> None:
    a, (b, _) = operands()
    of_a = drawn(2, 8, 1).abs() if by_rows else torch.tensor(0.5)
    of_b = drawn(1, 16).abs() if by_rows else torch.tensor(2.0)
    wanted = (a.double() * of_a) @ (b.double() * of_b)
    given, scale = (a.flatten(0, 1), of_a.flatten(0, 1) if by_rows else of_a) if flat else (a, of_a)
    found = mkernel.fused_scaled_matmul_reduce_scatter(
        given, b, scale, of_b, op, dim, 0, None, [2, 8, 16] if flat else None,
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def scaled_gather(**changed: Any) -> Any:
    a, several = operands()
    given: dict[str, Any] = {
        "gather_dim": 0, "group_name": None, "biases": [None] * 2, "result_scales": [None] * 2,
        "out_dtypes": [torch.bfloat16] * 2, "use_fast_accum": [False] * 2,
    }  # fmt: skip
    ones = torch.ones(1)
    given = {"A": a, "Bs": several, "A_scale": ones, "B_scales": [ones] * 2} | given | changed
    return mkernel.fused_all_gather_scaled_matmul(**given)


def scaled_scatter(
    *rest: Any, dim: int = 0, after: int = 0, op: str = "sum", **options: Any
) -> Any:
    a, (b, _) = operands()
    options = {"out_dtype": torch.bfloat16} | options
    one = torch.ones(1)
    return mkernel.fused_scaled_matmul_reduce_scatter(
        a, b, one, one, op, dim, after, None, *rest, **options
    )


REFUSED: list[tuple[Callable[[], Any], type[MkernelError], str]] = [
    (lambda: mkernel.fused_all_gather_matmul(A, [], 0, None), ArgumentError, "Bs"),
    (lambda: mkernel.fused_all_gather_matmul(A, [BS[0][0]], 0, None), ShapeError, r"Bs\[0\]"),
    (lambda: mkernel.fused_all_gather_matmul(A, BS, 3, None), ArgumentError, "gather_dim = 3"),
    (lambda: mkernel.fused_all_gather_matmul(A, BS, -4, None), ArgumentError, "gather_dim = -4"),
    (lambda: mkernel.fused_all_gather_matmul(A[0, 0], BS, 0, None), ShapeError, "A = "),
    (lambda: mkernel.fused_matmul_reduce_scatter(A, BS[0], "max", 0, None), ArgumentError,
     "reduce_op"),
    (lambda: mkernel.fused_matmul_reduce_scatter(A, A, "sum", 0, None), ShapeError, "B = "),
    (lambda: mkernel.fused_matmul_reduce_scatter(A, BS[0], "sum", 3, None), ArgumentError,
     "scatter_dim = 3"),
    (lambda: mkernel.fused_matmul_reduce_scatter(A, BS[0], "sum", 0, "no such group"),
     NotInitialized, "no such group"),
    (lambda: scaled_gather(gather_dim=2), ArgumentError, "gather_dim = 2"),
    (lambda: scaled_gather(use_fast_accum=()), ArgumentError, "use_fast_accum"),
    (lambda: scaled_gather(Bs=[b.contiguous() for b in operands()[1]]), LayoutError, "K-major"),
    (lambda: scaled_gather(Bs=[]), ArgumentError, "Bs"),
    (lambda: scaled_gather(biases=[None]), ArgumentError, "biases"),
    (lambda: scaled_gather(result_scales=[None, torch.ones(1)]), ArgumentError, "result_scales"),
    (lambda: scaled_gather(out_dtypes=[None, None]), ArgumentError, "out_dtypes"),
    (lambda: scaled_gather(out_dtypes=[torch.float32, torch.bfloat16]), ArgumentError, "out_dtypes"),
    (lambda: scaled_gather(Bs=[A, A]), ShapeError, r"Bs\[0\]"),
    (lambda: scaled_scatter([2, 8, 17]), ShapeError, "output_shape"),
    (lambda: scaled_scatter([3, 8, 16]), ShapeError, "output_shape"),
    (lambda: scaled_scatter([16, 16], dim=2), ArgumentError, "orig_scatter_dim = 2"),
    (lambda: scaled_scatter(None, dim=-1), ArgumentError, "orig_scatter_dim = -1"),
    (lambda: scaled_scatter(None, after=3), ArgumentError, "scatter_dim_after_maybe_reshape"),
    (lambda: scaled_scatter(None, op="max"), ArgumentError, "reduce_op"),
    (lambda: scaled_scatter(None, torch.ones(16)), ArgumentError, "bias"),
    (lambda: scaled_scatter(None, None, torch.ones(1)), ArgumentError, "result_scale"),
    (lambda: scaled_scatter(None, out_dtype=None), ArgumentError, "out_dtype"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_refused_by_name(at: int) -> None:
    call, error, said = REFUSED[at]
    with pytest.raises(error, match=said) as raised:
        call()
    assert type(raised.value) is error
