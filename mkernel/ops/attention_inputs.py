"""Checks of attention's tensors: their layouts, and documents that are packed into one sequence.

Tensors are [B, H, S/W, D], packed with heads or positions outermost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mkernel.errors import DtypeError, LayoutError, ShapeError, Unsupported
from mkernel.ops import validate
from mkernel.ops.steps import Steps
from mkernel.plan.model import AttentionLayout
from mkernel.plan.shapes import checked_boundaries
from mkernel.world.engine import Engine


def common_layout(given: Mapping[str, Tensor]) -> AttentionLayout:
    """Return the layout that all of them have. LayoutError: they are neither packed, nor packed with
    the positions outside of the heads; or not alike."""
    for layout in ("heads", "positions"):
        if all(_lies(each, layout) for each in given.values()):
            return layout
    name, tensor = next(one for one in given.items() if not one[1].is_contiguous())
    raise LayoutError(
        name,
        validate.describe(tensor),
        "contiguous as [B, H, S/W, D], or q, k and v all as [B, S/W, H, D]",
        why="call .contiguous()",
    )


def lying(steps: Steps, tensor: Tensor, layout: AttentionLayout) -> Tensor:
    """Return the tensor where it has that layout, else a copy that has."""
    made: Tensor = tensor
    if _lies(tensor, layout):
        return made
    if layout == "heads":
        made = steps.do(Tensor.contiguous, tensor)
    else:
        made = steps.do(Tensor.contiguous, steps.do(Tensor.transpose, tensor, 1, 2))
        made = steps.do(Tensor.transpose, made, 1, 2)
    return made


def _lies(tensor: Tensor, layout: AttentionLayout) -> bool:
    return (tensor if layout == "heads" else tensor.transpose(1, 2)).is_contiguous()


def checked_documents(cu_seqlens: object, sequence: int, device: str) -> Tensor:
    """Check the boundaries of a call's documents, and return them contiguous. Values that lie on a
    device are not looked at, since the host would have to wait for it.

    Raises:
        ShapeError, DtypeError, ArgumentError: what is wrong with ``cu_seqlens``.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise DtypeError("cu_seqlens", validate.describe(cu_seqlens), "a torch.Tensor of int32")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ShapeError("cu_seqlens", validate.describe(cu_seqlens), "[N + 1], for N documents")
    if cu_seqlens.dtype != torch.int32:
        raise DtypeError("cu_seqlens.dtype", cu_seqlens.dtype, "torch.int32")
    if cu_seqlens.device.type == "cpu":
        checked_boundaries(cu_seqlens.tolist(), sequence)
    else:
        validate.on_device("cu_seqlens", cu_seqlens, device)
    return cu_seqlens.contiguous()


def require_documents(engine: Engine, op: str) -> None:
    """Raise Unsupported where what runs the op takes no packed documents."""
    if op not in engine.claims.documents:
        raise Unsupported(
            f"accelerator {engine.backends.accelerator!r} takes no packed documents (cu_seqlens) in "
            f"{op}; name one beside it whose capabilities have documents, or call attention for each "
            "document"
        )
