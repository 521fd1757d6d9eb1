"""Scales of e4m3 operands as callers give them: which mode they are of, and what a launch gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import validate
from mkernel.plan.arguments import BLOCK, scale_sizes
from mkernel.plan.model import ScaleMode, Scales
from mkernel.plan.strides import Strides


class Scaled(NamedTuple):
    """The scales of a call's operands. ``use_fast_accum``: as :class:`mkernel.plan.model.Scales`."""

    a: Tensor
    b: Tensor
    use_fast_accum: bool


def scaled(a_scale: Tensor | None, b_scale: Tensor | None, use_fast_accum: bool) -> Scaled | None:
    """Pair the scales of a call; None: it has none. ArgumentError: one without the other."""
    if a_scale is None and b_scale is None:
        if use_fast_accum:
            raise ArgumentError("use_fast_accum", True, "False, without a_scale and b_scale")
        return None
    if a_scale is None or b_scale is None:
        missing, given = ("a_scale", "b_scale") if a_scale is None else ("b_scale", "a_scale")
        raise ArgumentError(missing, None, f"the scales of {missing[0]}, beside {given}")
    return Scaled(a_scale, b_scale, bool(use_fast_accum))


def check_scaled(a: Tensor, b: Tensor, given: Scaled, device: str) -> Scales:
    """Check a call's operands and scales, and return its scaling, whose mode follows from the shapes
    of the scales, each [.., its columns] beside a [.., K]. DtypeError, ShapeError, ArgumentError."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != torch.float8_e4m3fn:
            raise DtypeError(f"{name}.dtype", operand.dtype, "torch.float8_e4m3fn, beside scales")
    for name, scale in (("a_scale", given.a), ("b_scale", given.b)):
        if not isinstance(scale, Tensor):
            raise DtypeError(name, validate.describe(scale), "a torch.Tensor")
        if scale.dtype != torch.float32:
            raise DtypeError(f"{name}.dtype", scale.dtype, "torch.float32")
        validate.on_device(name, scale, device)
    return Scales(mode=_mode(a, b, given), use_fast_accum=given.use_fast_accum)


def _mode(a: Tensor, b: Tensor, given: Scaled) -> ScaleMode:
    (k, n), lead = b.shape, a.shape[:-1]
    if given.a.numel() == 1 and given.b.numel() == 1:
        return "tensor"
    modes: tuple[ScaleMode, ...] = ("row", "block")
    shapes = {mode: scale_sizes(mode, 1, n, k) for mode in modes}
    for mode, ((_, columns), of_b) in shapes.items():
        blocks = mode == "row" or k % BLOCK == 0
        if blocks and given.a.shape == (*lead, columns) and given.b.shape == of_b:
            return mode
    rows = ", ".join(map(str, lead))
    legal = "; or ".join(
        f"[{rows}, {columns}] and {list(of_b)} ({mode})"
        for mode, ((_, columns), of_b) in shapes.items()
    )
    found = f"{list(given.a.shape)} and {list(given.b.shape)}"
    raise ShapeError(
        "a_scale, b_scale",
        found,
        f"of a {list(a.shape)} and b {list(b.shape)}: one element each (tensor); or {legal}, "
        f"with K a multiple of {BLOCK}",
    )


def scale_strides(given: Scaled, dim: int) -> dict[str, Strides]:
    """Return whether scales are packed in memory: those of A by rows, ``dim`` outermost, those of B by
    columns, as B."""
    of_a = given.a.numel() == 1 or given.a.movedim(dim, 0).is_contiguous()
    of_b = given.b.numel() == 1 or given.b.t().is_contiguous()
    return {
        "a_scale": "packed" if of_a else "scattered",
        "b_scale": "packed" if of_b else "scattered",
    }


def refuse_gradients(op: str, where: str = "for e4m3 operands", /, **tensors: object) -> None:
    """Raise ArgumentError for a tensor whose gradient would be lost: such calls have no backward.

    Args:
        where: the calls, in words.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ArgumentError(
                name,
                "a tensor that requires grad",
                f"a tensor without gradient: call under torch.no_grad(), or pass {name}.detach()",
                why=f"{op} has no backward {where}",
            )


def check_alike(a: Tensor, b: Sequence[Tensor], given: Sequence[Scaled], device: str) -> None:
    """Raise ArgumentError where products of one A have scales of several kinds."""
    modes = [check_scaled(a, *each, device).mode for each in zip(b, given, strict=True)]
    for at, mode in enumerate(modes):
        if mode != modes[0]:
            raise ArgumentError(
                f"b_scale[{at}]", f"scales by {mode}", f"by {modes[0]}, as b_scale[0]"
            )


def as_matrix(scale: Tensor) -> Tensor:
    """Return the scale in two dimensions, whatever the shape of a single one is."""
    return scale.view(1, 1) if scale.dim() != 2 and scale.numel() == 1 else scale


def scale_of_rows(gathered: Tensor, rows: int) -> Tensor:
    """Return one scale a gathered row, where a rank may have had one for all of its own."""
    return gathered.repeat_interleave(rows // len(gathered), 0)
