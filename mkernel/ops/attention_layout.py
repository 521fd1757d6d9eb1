"""The layouts of attention's tensors [B, H, S/W, D]: packed, heads or positions outermost."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mkernel.errors import LayoutError
from mkernel.ops import validate
from mkernel.plan.model import AttentionLayout


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


def lying(tensor: Tensor, layout: AttentionLayout) -> Tensor:
    """Return the tensor where it has that layout, else a copy that has."""
    if _lies(tensor, layout):
        return tensor
    if layout == "heads":
        return tensor.contiguous()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _lies(tensor: Tensor, layout: AttentionLayout) -> bool:
    return (tensor if layout == "heads" else tensor.transpose(1, 2)).is_contiguous()
