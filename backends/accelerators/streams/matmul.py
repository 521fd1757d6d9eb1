"""Matrix products that accumulate in float32, on every device and for every pair of dtypes."""

from __future__ import annotations

import torch


class Factor:
    """A right-hand matrix [K, N], prepared once for many products into one dtype of output.

    On a CPU half-precision operands are widened first: torch's float16 product is slow there, and
    no half-precision product gives float32 sums. bfloat16 into bfloat16 is the exception: torch
    accumulates that in float32, and some processors have instructions for it.
    """

    def __init__(self, b: torch.Tensor, out_dtype: torch.dtype) -> None:
        self._direct = b.dtype == out_dtype and (
            b.dtype == torch.float32 or (b.dtype == torch.bfloat16 and b.device.type == "cpu")
        )
        self._mixed = not self._direct and b.device.type == "cuda" and b.dtype != torch.float32
        self._b = b if self._direct or self._mixed else b.float()

    def product(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """out = a @ b; sums in float32, rounded once to out's dtype. Rows may be none."""
        if not len(a):
            return
        if self._direct:
            torch.mm(a, self._b, out=out)
        elif self._mixed:  # float32 sums of half-precision operands, without widening these
            if out.dtype == torch.float32:
                torch.mm(a, self._b, out_dtype=torch.float32, out=out)
            else:
                out.copy_(torch.mm(a, self._b, out_dtype=torch.float32))
        elif out.dtype == torch.float32:
            torch.mm(a.float(), self._b, out=out)
        else:
            out.copy_(torch.mm(a.float(), self._b))
