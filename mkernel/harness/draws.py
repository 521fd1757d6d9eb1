"""Random shapes, the same ones for a seed wherever they are drawn, and the seeds that are spent.

A draw is held out only while its seed is not in :data:`SPENT`. A seed is spent once a constant was
fitted to its shapes or a choice was made by them; a seed that was measured before the last fit counts
as spent, because whoever fitted could have looked at it.

M is log-uniform from 4 to 32,944, or to fewer, a multiple of the number of ranks. N and K are
log-uniform from 256 to 16,384: half of the draws are odd multiples of 8 (rows must start aligned), half
multiples of 64. The ops take turns; B is row- or column-major at random. A draw with too large matrices
is made again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal

from mkernel.harness.spec import Benched, Shape

MOST_DRAWS = 10_000
ROWS = (4, 32_944)
FEW_ROWS = 1024
"""The most rows of draws that are compared by themselves: calls of a server."""
COLUMNS = (256, 16_384)
MOST_ELEMENTS = 1 << 29
"""A matrix has at most so many elements, all ranks' rows of A or of the result together: 1 GiB of
bfloat16."""
MOST_PRODUCTS = 1 << 41
"""M x N x K: a few milliseconds of a large GPU."""
SPENT: Mapping[int, str] = MappingProxyType(
    {
        0: "the default of `mkernel bench`, which everybody draws who names no seed",
        1: "measured before the constants were fitted anew",
        7: "`library.streamed` was fitted to it, and ways and last waves were chosen by it",
        11: "`few_rows.wave_us` was fitted to it",
        13: "measured before the constants were fitted anew",
        17: "`library.mail` was fitted to it",
        31: "`fused` and `library.streamed` were fitted to it",
        32: "`fused` and `library.streamed` were fitted to it",
        41: "`fused` was fitted to it",
        20261130: "of few rows; a warp of its own counts blocks since, by what was seen of it",
        20261202: "of few rows; what rows of a box beyond its matrix cost was found by it",
        43: "of few rows; measured beside the ways of plans",
        44: "measured beside the ways of plans",
        20261128: "measured before ways of plans were taken away, with the constants of that time",
    }
)
"""Seeds that a planner's constants were fitted to or choices were made by, and how. A seed that was
measured belongs here as soon as constants or ways change by what was seen of it."""
MOST_SPENT = 200
"""The largest number of shapes that was drawn of a spent seed."""


def drawn(
    count: int, seed: int, ops: Sequence[Benched], ranks: int, most_rows: int = ROWS[1]
) -> tuple[Shape, ...]:
    """Draw ``count`` shapes of at most ``most_rows`` for a world of ``ranks``; the first ones do not
    depend on how many there are."""
    chance = random.Random(seed)  # only its random() gives the same in all versions of Python
    return tuple(_shape(chance, ops[index % len(ops)], ranks, most_rows) for index in range(count))


@cache
def spent_sizes(ranks: int) -> Mapping[str, int]:
    """Return the M x N x K that spent seeds draw for ``ranks``, each with its seed."""
    ops: tuple[Benched, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
    return {
        shape.size: seed
        for seed in SPENT
        for most in (ROWS[1], FEW_ROWS)
        for shape in drawn(MOST_SPENT, seed, ops, ranks, most)
    }


def are_few_rows(shapes: Sequence[Shape]) -> bool:
    """Return whether drawn shapes are of few rows only."""
    return all(shape.m is not None and shape.m <= FEW_ROWS for shape in shapes)


def _shape(chance: random.Random, op: Benched, ranks: int, most_rows: int) -> Shape:
    while True:
        m = _between(chance, ROWS[0], most_rows, step=ranks)
        n, k = (_aligned(chance) for _ in range(2))
        layout: Literal["row", "column"] = "row" if chance.random() < 0.5 else "column"
        if m * n * k <= MOST_PRODUCTS and max(m * n, n * k, m * k) <= MOST_ELEMENTS:
            return Shape(op=op, m=m, n=n, k=k, layout=layout, name=f"B {layout}-major")


def _aligned(chance: random.Random) -> int:
    if chance.random() < 0.5:
        return _between(chance, *COLUMNS, step=64)
    return _between(chance, *COLUMNS, step=8) | 8


def _between(chance: random.Random, least: int, most: int, step: int) -> int:
    """Draw log-uniformly a multiple of ``step``."""
    value = math.exp(math.log(least) + chance.random() * math.log(most / least))
    return max(step, int(value) // step * step)
