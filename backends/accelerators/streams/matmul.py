"""Matrix products that accumulate in float32, or in float64 if an operand or the result is float64,
on every device and for every pair of dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from mkernel.backends.accelerators.cuda import long_products

_WIDE = (torch.float32, torch.float64)


class Factor:
    """A right-hand matrix [K, N], prepared once for many products into one dtype of output.

    On a CPU half-precision operands are widened first: torch's float16 product is slow there, and
    no half-precision product gives float32 sums. bfloat16 into bfloat16 is the exception: torch
    accumulates it in float32, and some processors have instructions for it. The library on CUDA
    devices accumulates in float32 too, once it is told not to add parts of a product in half
    precision.
    """

    def __init__(self, b: torch.Tensor, out_dtype: torch.dtype) -> None:
        self._direct = b.dtype == out_dtype and (
            b.dtype in _WIDE
            or b.device.type == "cuda"
            or (b.dtype == torch.bfloat16 and b.device.type == "cpu")
        )
        narrow = b.dtype not in _WIDE and out_dtype != torch.float64
        self._mixed = not self._direct and b.device.type == "cuda" and narrow
        self._sums = torch.float64 if torch.float64 in (b.dtype, out_dtype) else torch.float32
        self._b = b if self._direct or self._mixed else b.to(self._sums)

    def product(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out = a @ b; sums are rounded once, to out's dtype. There may be no rows."""
        if not len(a):
            return
        if self._direct:
            if a.is_cuda:
                with float32_sums():
                    long_products.untried_mm(a, self._b, out=out)
            else:
                torch.mm(a, self._b, out=out)
        elif self._mixed:  # float32 sums of half-precision operands, without widening these
            sums = (
                out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
            )
            long_products.untried_mm(a, self._b, out=sums)
            if sums is not out:
                out.copy_(sums)
        elif out.dtype == self._sums:
            torch.mm(a.to(self._sums), self._b, out=out)
        else:
            out.copy_(torch.mm(a.to(self._sums), self._b))


def mixed_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = a @ b of operands that may differ in dtype; both are then converted to the
    wider one."""
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
    Factor(b, out.dtype).product(a, out)


def grouped_product(
    a: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    segments: Iterable[tuple[int, int, int]],
    out: torch.Tensor,
    *,
    grouped: bool,
) -> None:
    """Compute out = rows of ``a`` [R, K] times their experts' ``w`` [E, K, N]. Rows of experts
    without tokens are not read.

    Args:
        counts: [E], rows of each expert. segments: (expert, first row, end row) of those that have
            any.
        grouped: use one product for all experts if torch has it; otherwise one per expert.
    """
    packed = (a.data_ptr() | w.data_ptr()) % 16 == 0
    if grouped and len(a) and packed and _has_groups(a.device, w.is_contiguous()):
        with float32_sums() if a.is_cuda else nullcontext():
            out.copy_(_product_of_groups(a, w, counts.cumsum(0, dtype=torch.int32)))
        return
    for expert, start, end in segments:
        Factor(w[expert], out.dtype).product(a[start:end], out[start:end])


def _product_of_groups(a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch._grouped_mm(a, w, offs=ends)
    return found


@cache
def _has_groups(where: torch.device, row_major: bool) -> bool:
    """Return whether this torch has the grouped product on that device for weights of that layout;
    older releases have it on a few GPUs."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    a = torch.zeros((64, 64), dtype=torch.bfloat16, device=where)
    w = a[None] if row_major else a[None].transpose(1, 2)
    try:
        _product_of_groups(a, w, torch.full((1,), 64, dtype=torch.int32, device=where))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@contextmanager
def float32_sums() -> Iterator[None]:
    """Make products that are started inside, on CUDA devices, add in float32 however they are
    split. The switch is process-wide and is restored afterwards."""
    switches: Any = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    try:
        for dtype in ("bf16", "fp16"):
            name = f"allow_{dtype}_reduced_precision_reduction"
            if getattr(switches, name):
                split = getattr(switches, f"{name}_split_k", None)  # of newer torch
                before[name] = True if split is None else (True, split)
                setattr(switches, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(switches, name, value)
