"""The storage of matrices: packed, with a pitch, or neither; and which of them an op copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from mkernel.errors import ArgumentError
from mkernel.plan.model import Copied

_COPIED: tuple[Copied, ...] = get_args(Copied)

Layout = Literal["row", "column"]
Strides = Literal["packed", "pitched", "scattered"]
"""The gaps of a matrix, seen in its major order. ``packed``: none. ``pitched``: one behind every
row, after which the next row is aligned again. ``scattered``: neither."""
_STRIDES: tuple[Strides, ...] = get_args(Strides)


class Stored(NamedTuple):
    """The major order of a matrix, and its strides in that order."""

    layout: Layout
    strides: Strides


def rows_of(sizes: Sequence[int], strides: Sequence[int], step: int) -> Strides:
    """Classify how [..., width] lies in memory as a matrix of rows, whose last dimension is the
    width.

    Args:
        sizes, strides: those of a tensor with at least one element, as torch counts them.
        step: elements by which aligned rows begin.
    """
    width = sizes[-1]
    if width > 1 and strides[-1] != 1:
        return "scattered"
    outer = [
        (size, stride)
        for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True)
        if size > 1
    ]
    if not outer:
        return "packed"
    pitch = expected = outer[0][1]
    for size, stride in outer:
        if stride != expected:
            return "scattered"
        expected = size * stride
    if pitch == width:
        return "packed"
    return "pitched" if pitch > width and pitch % step == 0 else "scattered"


def stored(sizes: Sequence[int], strides: Sequence[int], step: int) -> Stored:
    """Classify how a matrix lies in memory: by rows, or by columns if it does not lie so by
    rows."""
    by_rows = rows_of(sizes, strides, step)
    by_columns = rows_of(sizes[::-1], strides[::-1], step)
    if by_rows == "packed" or (by_rows == "pitched" and by_columns != "packed"):
        return Stored("row", by_rows)
    if by_columns != "scattered" or strides[0] < strides[1]:  # a copy reads it as it lies
        return Stored("column", by_columns)
    return Stored("row", by_rows)


def copied(strides: Mapping[str, Strides], pitched: Collection[str]) -> tuple[Copied, ...]:
    """Return the tensors of a call that the op copies before or after the launch. Raises
    ArgumentError.

    Args:
        strides: strides by name; a missing tensor is packed.
        pitched: operands that the backend takes with a pitch.
    """
    for name, found in strides.items():
        if name not in _COPIED or found not in _STRIDES:
            legal = f"{' or '.join(_STRIDES)}, of {', '.join(_COPIED)}"
            raise ArgumentError("strides", f"{name}: {found}", legal)
    taken = {"packed": _COPIED, "pitched": pitched, "scattered": ()}
    return tuple(name for name in _COPIED if name not in taken[strides.get(name, "packed")])
