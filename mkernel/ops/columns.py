"""The columns of one product as results of several layers, whose gradients are joined again.

Inductor computes torch's own cat of two gradients by a kernel that evaluates both of them for each
element of the result and reads their inputs twice. Here each gradient is written to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from mkernel.ops import inductor
from mkernel.ops.registration import register


def parts_of_columns(y: Tensor, columns: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of ``y`` [..., sum of columns] that have so many columns each."""
    if torch.compiler.is_compiling() and y.requires_grad:
        found: tuple[Tensor, ...] = _Parts.apply(y, tuple(columns))  # type: ignore[no-untyped-call]
        return found
    return torch.split(y, list(columns), dim=-1)


class _Parts(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, columns: tuple[int, ...]) -> tuple[Tensor, ...]:
        return torch.split(y, list(columns), dim=-1)

    @staticmethod
    def backward(ctx: Any, *of_parts: Tensor) -> Any:
        with torch.enable_grad():  # else compilers that leave it to autograd lose its derivative
            return torch.ops.mkernel.joined_columns(list(of_parts)), None


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=-1)


def _fake(parts: list[Tensor]) -> Tensor:
    inductor.teach()
    return torch.cat(parts, dim=-1)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.columns = [each.shape[-1] for each in inputs[0]]


def _backward(ctx: Any, of_whole: Tensor) -> Any:
    return [*torch.split(of_whole, ctx.columns, dim=-1)]


def _lowered(parts: list[Any]) -> Any:
    from torch._inductor.ir import ConcatKernel, TensorBox

    return TensorBox(ConcatKernel.create(parts, len(parts[0].get_size()) - 1))


register(
    "joined_columns(Tensor[] parts) -> Tensor",
    _joined,
    _fake,
    _save,
    _backward,
    communicates=False,
)
inductor.lower(torch.ops.mkernel.joined_columns.default, _lowered)
