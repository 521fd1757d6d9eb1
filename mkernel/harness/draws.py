"""Random shapes that nobody tuned for, the same ones for a seed wherever they are drawn.

M is log-uniform from 4 to 32,944, a multiple of the number of ranks. N and K are log-uniform from 256
to 16,384: half of the draws are odd multiples of 8 (rows must start aligned), half multiples of 64. The
ops take turns; B is row- or column-major at random. A draw with too large matrices is made again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from mkernel.harness.spec import Benched, Shape

MOST_DRAWS = 10_000
ROWS = (4, 32_944)
COLUMNS = (256, 16_384)
MOST_ELEMENTS = 1 << 29
"""A matrix has at most so many elements, all ranks' rows of A or of the result together: 1 GiB of
bfloat16."""
MOST_PRODUCTS = 1 << 41
"""M x N x K: a few milliseconds of a large GPU."""


def drawn(count: int, seed: int, ops: Sequence[Benched], ranks: int) -> tuple[Shape, ...]:
    """``count`` shapes for a world of ``ranks``; the first ones do not depend on how many there are."""
    chance = random.Random(seed)  # only its random() gives the same in all versions of Python
    return tuple(_shape(chance, ops[index % len(ops)], ranks) for index in range(count))


def _shape(chance: random.Random, op: Benched, ranks: int) -> Shape:
    while True:
        m = _between(chance, *ROWS, step=ranks)
        n, k = (_aligned(chance) for _ in range(2))
        layout: Literal["row", "column"] = "row" if chance.random() < 0.5 else "column"
        if m * n * k <= MOST_PRODUCTS and max(m * n, n * k, m * k) <= MOST_ELEMENTS:
            return Shape(op=op, m=m, n=n, k=k, layout=layout, name=f"B {layout}-major")


def _aligned(chance: random.Random) -> int:
    if chance.random() < 0.5:
        return _between(chance, *COLUMNS, step=64)
    return _between(chance, *COLUMNS, step=8) | 8


def _between(chance: random.Random, least: int, most: int, step: int) -> int:
    """Log-uniform, a multiple of ``step``."""
    value = math.exp(math.log(least) + chance.random() * math.log(most / least))
    return max(step, int(value) // step * step)
