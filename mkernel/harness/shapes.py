"""The shapes of a run: a list that ships with mkernel, a file, or sizes on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mkernel.errors import ArgumentError, InputFileError
from mkernel.harness.spec import GEMMS, Benched, Shape, sized_like
from mkernel.plan.shapes import MAX_DIMENSION, check_integer, size_names, sizes_or_defaults
from mkernel.topology.model import Many, first_error
from mkernel.user_files import parse_json, read_file

TARGETS, LAYERS, NODES, SMALL = "targets", "layers", "nodes", "small"
MOE, RING, FP8 = "moe-targets", "ring-targets", "fp8-targets"
SHIPPED = (TARGETS, LAYERS, NODES, SMALL, MOE, RING, FP8)
"""``targets``: sizes with the ratio to the product alone that is aimed at. ``layers``: tensor-parallel
layers of known models over sequence lengths. ``nodes``: for two nodes of one rank, products that take
about as long as their bytes on a rail of 400 Gb/s, and half as long. ``small``: sizes that a CPU
computes in milliseconds. ``moe-targets``: two models' experts over numbers of tokens, with times that
are aimed at on two H200, and whole layers of them. ``ring-targets``: attention over lengths of
sequences, with the ratio to the library's attention on parts that is aimed at. ``fp8-targets``: e4m3
operands, with times that are aimed at on two H200 where scales are by rows."""

_SIZE = re.compile(r"\s*(\d{1,10})\s*x\s*(\d{1,10})\s*x\s*(\d{1,10})\s*")
_NUMBER = re.compile(r"\d+")
_SHAPES: TypeAdapter[tuple[Shape, ...]] = TypeAdapter(Many[Shape])
_MOST_FILE_BYTES = 1 << 20


def shapes(
    text: str | None, ops: Sequence[Benched], ranks: int, usual: str = TARGETS
) -> tuple[Shape, ...]:
    """Return the shapes of the ops, in order; rows of a list for another number of ranks are left out.

    Args:
        text: a shipped list's name; a JSON file ``{"shapes": [{"op", "m", "n", "k", ...}]}``, where ops
            that are no GEMM have ``"sizes": {name: value}``; ``M x N x K`` for the GEMM ops, or
            ``name=value name=value ...``, several separated by commas, for any: every op takes them,
            with ``mkernel run``'s sizes for what is not named.
        usual: the list that the GEMM ops take where ``text`` is None; the others then have
            ``mkernel run``'s sizes.

    Raises:
        ArgumentError, InputFileError: naming what is wrong; also where nothing is left.
    """
    others = tuple(op for op in ops if op not in GEMMS)
    if text is None:
        gemms = tuple(op for op in ops if op in GEMMS)
        found = _from_list(usual, gemms, ranks) if gemms else ()
        return (*found, *_checked(tuple(_shape(op, {}) for op in others), ranks))
    parts = text.split(",")
    if "=" in text and not os.path.lexists(text):
        sizes = [_named(part) for part in parts]
    elif all(_SIZE.fullmatch(part) for part in parts):
        if others:
            names = "; ".join(f"{op}: {', '.join(size_names(sized_like(op)))}" for op in others)
            raise ArgumentError("--shapes", repr(text), f"'name=value name=value' ({names})")
        sizes = [dict(zip("mnk", map(int, _NUMBER.findall(part)), strict=True)) for part in parts]
    else:
        return _from_list(text, ops, ranks)
    return _checked(tuple(_shape(op, each) for op in ops for each in sizes), ranks)


@cache
def listed(name: str) -> tuple[Shape, ...]:
    """Return all rows of a shipped list; none where no list has that name."""
    return _read(name) if name in SHIPPED else ()


def _from_list(text: str, ops: Sequence[Benched], ranks: int) -> tuple[Shape, ...]:
    rows = _read(text)
    chosen = tuple(
        each for op in ops for each in rows if each.op == op and each.ranks in (None, ranks)
    )
    if not chosen:
        raise ArgumentError(
            "--shapes", text, f"a list with rows of {', '.join(ops)} for {ranks} ranks"
        )
    return _checked(chosen, ranks)


def _shape(op: Benched, given: Mapping[str, int]) -> Shape:
    sizes = sizes_or_defaults(sized_like(op), dict(given))
    for size in sizes.values():
        check_integer(ArgumentError, "--shapes", int(size), MAX_DIMENSION)
    return Shape(op=op, **sizes) if op in GEMMS else Shape(op=op, sizes=sizes)


def _named(part: str) -> dict[str, int]:
    sizes = {}
    for pair in part.split():
        name, _, value = pair.partition("=")
        if not value.isdecimal():
            raise ArgumentError("--shapes", repr(pair), "name=value, the value an integer")
        sizes[name] = int(value)
    return sizes


def _checked(chosen: tuple[Shape, ...], ranks: int) -> tuple[Shape, ...]:
    """Check that the ranks can share the shapes. ArgumentError."""
    for each in chosen:
        if each.op in ("all_reduce", "gemm_all_reduce"):  # whose rows need not be cut alike
            continue
        sizes = each.named_sizes
        name = next(name for name in ("m", "experts", "sequence") if name in sizes)
        parts, what = ranks, "the number of ranks"
        if sizes.get("causal"):
            parts, what = 2 * ranks, "twice the number of ranks"
        if sizes[name] % parts:
            shared = "M" if name == "m" else name
            raise ArgumentError(
                "--shapes", each.size, f"{shared} that is a multiple of {parts}, {what}"
            )
    return chosen


def _read(text: str) -> tuple[Shape, ...]:
    if text in SHIPPED:
        content = files(__package__).joinpath("data", f"{text}.json").read_bytes()
    elif not os.path.lexists(text) and not ("/" in text or Path(text).suffix):
        raise ArgumentError(
            "--shapes",
            repr(text),
            f"{', '.join(SHIPPED)}, a JSON file, M x N x K, or name=value name=value",
            why="no such list, and no such file",
        )
    else:
        content = read_file(Path(text), "--shapes", _MOST_FILE_BYTES)
    try:
        found = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"--shapes {text} is not JSON: {error}") from error
    if not isinstance(found, dict) or "shapes" not in found:
        raise InputFileError(f'--shapes {text}: expected an object {{"shapes": [...]}}')
    try:
        return _SHAPES.validate_python(found["shapes"])
    except ValidationError as error:
        raise InputFileError(f"--shapes {text}: {first_error(error)}") from error
