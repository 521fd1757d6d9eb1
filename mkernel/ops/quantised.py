"""Rows in e4m3 with a scale each, as the next product of e4m3 operands takes them.

scale = max|row| / 448        quantised = row / scale, in float32, rounded to nearest
"""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.errors import ArgumentError
from mkernel.ops.around import refuse_gradients

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3, and return them with their scales.

    Args:
        rows: [.., N], in a floating-point dtype.

    Returns:
        [.., N] in ``torch.float8_e4m3fn``, and [.., 1] in float32, 1 where a row is all zeros,
        or would have a scale of 0. An infinity or NaN is NaN in the result, so that it is not lost.
    """
    wide = rows.float()
    most = wide.abs().amax(-1, keepdim=True)
    # On a GPU torch does not divide by a number, but multiplies by its reciprocal: other bits.
    scale = most / torch.full_like(most, LARGEST)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # A subnormal scale is rounded so far that a quotient may be beyond the largest.
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def check_quantise(op: str, quantise: object, norm_weight: Tensor | None, **given: object) -> None:
    """Check ``quantise``. ArgumentError: it is neither None nor ``row``; without a norm; beside
    ``out``, ``out_dtype`` or a tensor whose gradient would be lost.

    Args:
        given: tensors of the call by their names, ``out`` and ``out_dtype`` among them.
    """
    if quantise is None:
        return
    if quantise != "row":
        raise ArgumentError("quantise", repr(quantise), "None or 'row'")
    if norm_weight is None:
        raise ArgumentError("quantise", repr(quantise), "None, without norm_weight")
    for name in ("out", "out_dtype"):
        if given.get(name) is not None:
            raise ArgumentError(name, "given", "None, beside quantise: e4m3 rows are allocated")
    refuse_gradients(op, "where it quantises", norm_weight=norm_weight, **given)


def results_of(
    normed: Tensor, new: Tensor, residual: Tensor | None, quantise: str | None
) -> Tensor | tuple[Tensor, ...]:
    """Assemble what an op returns of normalised rows: in e4m3 with their scales where it quantises,
    and beside a residual the new one."""
    rows = (normed,) if quantise is None else quantised_rows(normed)
    found = rows if residual is None else (*rows, new)
    return found if len(found) > 1 else normed
