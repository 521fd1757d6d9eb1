"""Products of the library path, by torch: sums are rounded once, to the dtype of the result.

Products of e4m3 operands have scales (``mkernel/plan/arguments.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.long_products import addmm, mm
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import ProductSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import aligned
from mkernel.backends.contracts.scaled import block_product, padded_blocks
from mkernel.plan.model import Scales

Multiply = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""A function of (rows of A, their scales, results) that fills the results."""


def multiply_of(
    call: Call, how: ProductSchedule, context: DispatchContext, bias: torch.Tensor | None = None
) -> Multiply:
    """Return products with a call's B, as :func:`multiply_by` makes them."""
    return multiply_by(
        call.tensors["b"], call.tensors.get("b_scale"), call.plan.scales, how, context, bias
    )


def multiply_by(
    b: torch.Tensor,
    scale: torch.Tensor | None,
    scales: Scales | None,
    how: ProductSchedule,
    context: DispatchContext,
    bias: torch.Tensor | None = None,
) -> Multiply:
    """Return products with a B and, if it has some, its scales. ``bias``: for operands without
    scales, in their dtype, which is also the results': added before these are rounded."""
    if scales is None or scale is None:
        return (
            _with_bias(b, bias) if bias is not None else lambda rows, _, out: mm(rows, b, out=out)
        )
    one = context.one if how.scaled_by == "kernel" else None
    return ScaledFactor(b, scale, scales, one).product


def _with_bias(b: torch.Tensor, bias: torch.Tensor) -> Multiply:
    """Return products to which the library's epilogue adds the bias before it rounds."""

    def multiply(rows: torch.Tensor, _: torch.Tensor | None, out: torch.Tensor) -> None:
        addmm(bias, rows, b, out=out)

    return multiply


class ScaledFactor:
    """A right-hand e4m3 matrix [K, N], column-major, with its scales, for many products."""

    def __init__(
        self,
        b: torch.Tensor,
        scale: torch.Tensor,
        scales: Scales,
        one: torch.Tensor | None = None,
    ) -> None:
        """Prepare the matrix. ``scale``: in the caller's layout. ``one``: 1.0 on the device, if a
        kernel scales products."""
        self._b, self._scales, self._one = aligned(b), scales, one
        if scales.mode == "block":
            self._scale = padded_blocks(scale)
        else:
            self._scale = aligned(_shaped(scale, (1, scale.numel())))

    def product(self, a: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compute out = a @ b. ``scale``: [rows, ..] of these rows; for one scale per tensor also
        [W, 1], one for each W-th of the rows. There may be no rows."""
        assert scale is not None
        if not len(a):
            return
        if self._scales.mode == "block":
            block_product(a, self._b, scale, self._scale, out)
            return
        of_b = self._scale
        if self._scales.mode == "tensor" and scale.numel() > 1:
            scale = scale.repeat_interleave(len(a) // len(scale), 0)
            of_b = of_b.expand(1, out.shape[1]).contiguous()
        of_a = aligned(_shaped(scale, (scale.numel(), 1)))
        fast = self._scales.use_fast_accum
        if self._one is None:
            scaled_mm(a, self._b, of_a, of_b, out, fast)
            return
        unscaled = out.new_empty(out.shape, dtype=torch.float32)
        scaled_mm(a, self._b, self._one, self._one, unscaled, fast)
        if self._scales.mode == "tensor":
            of_a = of_a.expand(len(a), 1).contiguous()
            of_b = of_b.expand(1, out.shape[1]).contiguous()
        scale_results(unscaled, of_a, of_b, out)


def _shaped(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return packed scales in a shape; themselves where they have it. torch checks strides of single
    columns too."""
    packed = scale.shape == shape and scale.stride() == (shape[1], 1)
    return scale if packed else scale.reshape(shape).contiguous()


def scale_results(
    unscaled: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute out = float32 products times scales [rows, 1] and [1, N], rounded once; all tensors
    are packed."""
    device = out.get_device()
    native().scale_results(
        device,
        unscaled.data_ptr(),
        of_rows.data_ptr(),
        of_columns.data_ptr(),
        out.data_ptr(),
        *out.shape,
        out.dtype == torch.float16,
        torch._C._cuda_getCurrentRawStream(device),
    )


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    of_a: torch.Tensor,
    of_b: torch.Tensor,
    out: torch.Tensor,
    fast: bool,
) -> None:
    """Compute out = a @ b, with scales [rows, 1] and [1, N], or one each."""
    torch._scaled_mm(
        a, b, scale_a=of_a, scale_b=of_b, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )
