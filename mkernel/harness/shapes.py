"""The shapes of a run: a list that ships with mkernel, a file, or sizes on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mkernel.errors import ArgumentError, InputFileError
from mkernel.harness.spec import Shape
from mkernel.plan.model import OpName
from mkernel.plan.shapes import MAX_DIMENSION, check_integer
from mkernel.topology.model import Many, first_error
from mkernel.user_files import parse_json, read_file

TARGETS, LAYERS, SMALL = "targets", "layers", "small"
SHIPPED = (TARGETS, LAYERS, SMALL)
"""``targets``: sizes with the ratio to the product alone that is aimed at. ``layers``: tensor-parallel
layers of known models over sequence lengths. ``small``: sizes that a CPU computes in milliseconds."""

_SIZE = re.compile(r"\s*(\d{1,10})\s*x\s*(\d{1,10})\s*x\s*(\d{1,10})\s*")
_SHAPES: TypeAdapter[tuple[Shape, ...]] = TypeAdapter(Many[Shape])
_MOST_FILE_BYTES = 1 << 20


def shapes(text: str, ops: Sequence[OpName], ranks: int) -> tuple[Shape, ...]:
    """Those of the ops, in order; rows for another number of ranks are left out.

    Args:
        text: a shipped list's name, a JSON file ``{"shapes": [{"op", "m", "n", "k", ...}]}``, or
            ``M x N x K`` separated by commas, which every op then takes.

    Raises:
        ArgumentError, InputFileError: naming what is wrong; also where nothing is left.
    """
    sizes = [_SIZE.fullmatch(part) for part in text.split(",")]
    if all(sizes):
        numbers = [[int(size) for size in match.groups()] for match in sizes if match]
        for size in (size for each in numbers for size in each):
            check_integer(ArgumentError, "--shapes", size, MAX_DIMENSION)
        return _checked(
            tuple(Shape(op=op, m=m, n=n, k=k) for op in ops for m, n, k in numbers), ranks
        )
    listed = _read(text)
    chosen = tuple(
        each for op in ops for each in listed if each.op == op and each.ranks in (None, ranks)
    )
    if not chosen:
        raise ArgumentError(
            "--shapes", text, f"a list with rows of {', '.join(ops)} for {ranks} ranks"
        )
    return _checked(chosen, ranks)


def _checked(chosen: tuple[Shape, ...], ranks: int) -> tuple[Shape, ...]:
    for each in chosen:
        if each.m % ranks:
            raise ArgumentError(
                "--shapes", each.size, f"M that is a multiple of {ranks}, the number of ranks"
            )
    return chosen


def _read(text: str) -> tuple[Shape, ...]:
    if text in SHIPPED:
        content = files(__package__).joinpath("data", f"{text}.json").read_bytes()
    elif not os.path.lexists(text):
        raise ArgumentError(
            "--shapes", repr(text), f"{', '.join(SHIPPED)}, a JSON file, or M x N x K"
        )
    else:
        content = read_file(Path(text), "--shapes", _MOST_FILE_BYTES)
    try:
        return _SHAPES.validate_python(parse_json(content)["shapes"])
    except ValidationError as error:
        raise InputFileError(f"--shapes {text}: {first_error(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputFileError(f"--shapes {text}: {error}") from error
