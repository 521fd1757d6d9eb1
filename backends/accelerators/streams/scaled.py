"""Products of e4m3 operands with scales (``mkernel/plan/arguments.py``), and rows with optional
scales.

They use ``torch._scaled_mm`` if the plan chooses it; otherwise the reference: operands are
dequantised in float32, multiplied with float32 sums, and results rounded once. Where torch's
product accumulates in float32, as on CPUs, the two differ only by float32 roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.schedule import ScaledSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.invariant_product import InvariantFactor
from mkernel.backends.contracts.scaled import dequantised, quantised_blocks
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import Scales


class Rows(NamedTuple):
    """Rows [R, K] of A. ``scale``: the scales of e4m3 rows, one for all of them or some for each."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    def part(self, start: int, end: int) -> Rows:
        """Return the rows from ``start`` to ``end``."""
        scale = self.scale
        if scale is not None and len(scale) == len(self.values):
            scale = scale[start:end]
        return Rows(self.values[start:end], scale)


def own_rows(call: Call) -> Rows:
    """Return this rank's A."""
    return Rows(call.tensors["a"], call.tensors.get("a_scale"))


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that carriers take: not all know e4m3."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def products(call: Call, out_dtype: torch.dtype) -> Callable[[Rows, torch.Tensor], None]:
    """Return a function that fills ``out`` with rows @ the call's B, for results in ``out_dtype``."""
    b, scales = call.tensors["b"], call.plan.scales
    if call.plan.invariant is not None:
        return _invariant_products(call, call.plan.invariant)
    if scales is None:
        factor = Factor(b, out_dtype)
        return lambda rows, out: factor.product(rows.values, out)
    direct = call.plan.part(ScaledSchedule).scaled_products == "scaled_mm"
    return ScaledFactor(b, call.tensors["b_scale"], scales, direct=direct).product


def _invariant_products(call: Call, invariant: Invariant) -> Callable[[Rows, torch.Tensor], None]:
    """Return the function of :func:`products` for this rank's leaves of an invariant sum."""
    b, summed = call.tensors["b"], call.plan.op != "all_gather_gemm"
    if call.plan.scales is not None:
        b = dequantised(b, call.tensors["b_scale"])
    own = invariant.segments // call.plan.world_size if summed else 1
    return _of_rows(InvariantFactor(b, own, invariant.partial_dtype or "float32"))


def _of_rows(factor: InvariantFactor) -> Callable[[Rows, torch.Tensor], None]:
    """Return the function that multiplies rows, times their scales, by a matrix."""
    return lambda rows, out: factor.product(
        rows.values if rows.scale is None else dequantised(rows.values, rows.scale), out
    )


def rows_of_experts(call: Call, name: str, count: int | None = None) -> Rows:
    """Return the rows of a MoE op: the call's of that name, or the first ``count``; quantised, where
    the plan says so."""
    rows, scales = call.tensors[name][:count], call.plan.scales
    if scales is None or scales.quantises is None:
        scale = call.tensors.get(f"{name}_scale")
        return Rows(rows, None if scale is None else scale[:count])
    return Rows(*quantised_blocks(rows))


def joined(rows: Rows) -> torch.Tensor:
    """Return rows as they travel: e4m3 ones as bytes, each with its scales behind it."""
    if rows.scale is None:
        return rows.values
    scale = rows.scale.contiguous().view(torch.uint8)
    return torch.cat((as_bytes(rows.values), scale), 1)


def parted(travelled: torch.Tensor, width: int) -> Rows:
    """Return rows of so many elements that travelled as :func:`joined` gives them."""
    if travelled.shape[1] == width:
        return Rows(travelled)
    values, scale = travelled[:, :width], travelled[:, width:].contiguous()
    return Rows(values.view(torch.float8_e4m3fn), scale.view(torch.float32))


def expert_factor(
    call: Call, weight: str, expert: int, out_dtype: torch.dtype
) -> Callable[[Rows, torch.Tensor], None]:
    """Return a function that fills ``out`` with rows @ an expert's weight, the tensor of that name."""
    w, scales = call.tensors[weight][expert], call.plan.scales
    if call.plan.invariant is not None:
        if scales is not None:
            w = dequantised(w, call.tensors[f"{weight}_scale"][expert])
        return _of_rows(InvariantFactor(w))
    if scales is None:
        factor = Factor(w, out_dtype)
        return lambda rows, out: factor.product(rows.values, out)
    return ScaledFactor(w, call.tensors[f"{weight}_scale"][expert], scales, direct=False).product


class ScaledFactor:
    """A right-hand e4m3 matrix [K, N], column-major, with its scales, for many products."""

    def __init__(
        self, b: torch.Tensor, scale: torch.Tensor, scales: Scales, *, direct: bool
    ) -> None:
        """Prepare the matrix. ``direct``: use ``torch._scaled_mm``."""
        self._scales, self._direct = scales, direct
        self._scale = scale.flatten().unsqueeze(0) if direct else scale
        self._b = b if direct else dequantised(b, scale)

    def product(self, rows: Rows, out: torch.Tensor) -> None:
        """Compute out = rows @ b; sums are rounded once, to out's dtype. There may be no rows."""
        a, scale = rows
        if not len(a):
            return
        assert scale is not None
        if not self._direct:
            out.copy_(torch.mm(dequantised(a, scale), self._b))
            return
        torch._scaled_mm(
            a,
            self._b,
            scale_a=scale.flatten().unsqueeze(1),  # torch checks strides of single columns too
            scale_b=self._scale,
            out_dtype=out.dtype,
            use_fast_accum=self._scales.use_fast_accum,
            out=out,
        )
