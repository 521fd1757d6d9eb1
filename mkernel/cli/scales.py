"""The options ``--scales`` and ``--fast-accum`` of commands, beside ``--dtype float8_e4m3``."""

from __future__ import annotations

from typing import Literal, get_args

from mkernel.errors import ArgumentError
from mkernel.plan.model import E4M3, OpName, ScaleMode
from mkernel.plan.shapes import GEMMS

NAMES = ("float8_e4m3", E4M3)
"""The names of the dtype."""
_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)


FAST_ACCUM = (
    "Add products of float8_e4m3 inputs with fewer bits than float32, where the device can."
)
"""The help of ``--fast-accum``."""


def scales_of(
    dtype: str | None, scales: str | None, *ops: OpName, fast: bool = False
) -> ScaleMode | None:
    """Return the mode of e4m3 inputs, by default by rows; None: the inputs have another dtype.
    ArgumentError.

    ``fast``: ``--fast-accum`` was given, which other inputs do not support.
    """
    if dtype not in NAMES:
        for option, given in (("--scales", scales), ("--fast-accum", fast or None)):
            if given is not None:
                raise ArgumentError(option, given, f"nothing, or --dtype {NAMES[0]} beside it")
        return None
    for op in ops:
        if op not in GEMMS:
            raise ArgumentError("--dtype", dtype, f"another one: {op} takes no e4m3 inputs")
    found = scales or "row"
    if found not in _MODES:
        raise ArgumentError("--scales", repr(scales), f"one of: {', '.join(_MODES)}")
    return found


def layout_of(layout: str | None, scales: ScaleMode | None) -> Literal["row", "column"]:
    """Return the layout of B in memory: the requested one, by default row; for e4m3 column.
    ArgumentError."""
    if scales is not None and layout == "row":
        raise ArgumentError("--layout", layout, "column, as e4m3 matrices lie")
    return "column" if scales is not None or layout == "column" else "row"
