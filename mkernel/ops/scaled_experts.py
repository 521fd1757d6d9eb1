"""The e4m3 operands of MoE ops: rows [R, K] and experts' weights [E/W, K, N], with float32 scales
[R, K / 128] and [E/W, K / 128, N / 128], N / 128 rounded up. The launch quantises rows in 16 bits."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import validate
from mkernel.ops.around import check_scale, refuse_gradients
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import NOTHING, RESULTS, Around, scale_sizes
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import BLOCK, E4M3, DtypeName, Scales

QUANTISED = (torch.float16, torch.bfloat16)


def check_experts(
    op: str, names: tuple[str, str], given: tuple[object, ...], device: str
) -> Around:
    """Check the operands of a MoE op and their scales, and return what a plan is to know of them.

    Args:
        names: of the rows and of the weights.
        given: rows, weights, and the scales of each or None; rows and weights have been found to fit.

    Raises:
        ArgumentError: scales of rows without those of weights, or a gradient that would be lost.
        DtypeError, ShapeError: the operand or the scales, and what is legal.
    """
    rows, w, of_rows, of_w = given
    scale_names = (f"{names[0]}_scale", f"{names[1]}_scale")
    assert isinstance(rows, Tensor)
    assert isinstance(w, Tensor)
    if of_w is None:
        if of_rows is not None:
            raise ArgumentError(scale_names[1], None, f"the scales of {names[1]}")
        if w.dtype == torch.float8_e4m3fn:
            legal = f"another dtype, without {scale_names[1]}"
            raise DtypeError(f"{names[1]}.dtype", w.dtype, legal, why="e4m3 operands have scales")
        return NOTHING
    refuse_gradients(op, **dict(zip((*names, *scale_names), given, strict=True)))
    if w.dtype != torch.float8_e4m3fn:
        legal = f"torch.float8_e4m3fn, beside {scale_names[1]}"
        raise DtypeError(f"{names[1]}.dtype", w.dtype, legal)
    if of_rows is None and rows.dtype not in QUANTISED:
        legal = "torch.float16 or torch.bfloat16, which are quantised; or e4m3 beside its scales"
        raise DtypeError(f"{names[0]}.dtype", rows.dtype, legal)
    if of_rows is not None and rows.dtype != torch.float8_e4m3fn:
        legal = f"torch.float8_e4m3fn, beside {scale_names[0]}"
        raise DtypeError(f"{names[0]}.dtype", rows.dtype, legal)
    experts, k, n = w.shape
    if k % BLOCK:
        legal = f"[E/W, K, N] with K a multiple of {BLOCK}, with scales by blocks"
        raise ShapeError(names[1], validate.describe(w), legal)
    a, b = scale_sizes("block", len(rows), n, k)
    wanted = zip(scale_names, (of_rows, of_w), (a, (experts, *b)), strict=True)
    for name, scale, sizes in wanted:
        if scale is None:
            continue
        check_scale(name, scale, device)
        assert isinstance(scale, Tensor)
        if scale.shape != sizes:
            raise ShapeError(name, validate.describe(scale), f"{[*sizes]}, by blocks of {BLOCK}")
    quantises = None if of_rows is not None else _name(names[0], rows.dtype)
    return Around(scales=Scales(mode="block", quantises=quantises))


def dtypes(
    names: tuple[str, str],
    rows: Tensor,
    w: Tensor,
    out_dtype: torch.dtype,
    around: Around,
    claims: AcceleratorCapabilities,
) -> tuple[DtypeName, DtypeName]:
    """Check and return the dtypes of operands and of results, as plans name them. DtypeError."""
    if around.scales is not None:  # the plan checks them
        return E4M3, _name("out", out_dtype)
    dtype = validate.dtype_name(f"{names[0]}.dtype", rows.dtype, claims.dtypes)
    validate.same_dtype(f"{names[1]}.dtype", w, names[0], rows)
    return dtype, validate.dtype_name("out_dtype", out_dtype, claims.out_dtypes)


def _name(of: str, dtype: torch.dtype) -> DtypeName:
    return validate.dtype_name(f"{of}.dtype", dtype, get_args(DtypeName))


def default_results(rows: Tensor) -> torch.dtype:
    """Return the dtype of results where the caller names none: that of rows, of e4m3 ones bfloat16."""
    return validate.DTYPES[RESULTS[0]] if rows.dtype == torch.float8_e4m3fn else rows.dtype


def packed(
    steps: Steps, names: tuple[str, str], of_rows: Tensor | None, of_w: Tensor | None
) -> dict[str, Tensor]:
    """Return the scales as launches take them, by rows, and by columns as weights; copied where they
    lie otherwise."""
    found = {}
    if of_rows is not None:
        whole = of_rows.is_contiguous()
        found[f"{names[0]}_scale"] = of_rows if whole else steps.do(Tensor.contiguous, of_rows)
    if of_w is not None:
        if not of_w.transpose(1, 2).is_contiguous():
            turned = steps.do(Tensor.transpose, of_w, 1, 2)
            of_w = steps.do(Tensor.transpose, steps.do(Tensor.contiguous, turned), 1, 2)
        found[f"{names[1]}_scale"] = of_w
    return found
