"""Attention whose bits of a row depend on that row and on the keys that it sees alone.

  k, v of all ranks ──ring──▶ the whole sequence, in the order of positions
  each document ──blocks of as many keys, from its first one on──▶ merged in this order into
  tiles of as many rows (positions and heads of queries that share keys) ──▶ out, log-sum-exp

How ranks hold the sequence, chunks and where a document lies in it so change nothing: every tile is
computed by calls of one size, with rows and keys that are filled up, in float32. What remains is that a
row's bits do not depend on its place in a tile, nor on its neighbours. That is measured, once for each
device and width of heads, and refused where it does not hold.

The running maximum, sum and weighted values are those of :mod:`.explicit_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mkernel.backends.contracts.invariant_product import adversarial, block_of, other_bits
from mkernel.errors import Unsupported

Tile = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _filled(keys: Tensor) -> Tensor:
    """Return keys or values [C, D] with zeros up to whole blocks."""
    count = block_of(keys.device)[1]
    return torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % count))


def attend(q: Tensor, last: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out [R, D] and the log-sum-exp [R] of any rows on the keys of a document, in tiles. The
    arguments are those of :func:`tile`, with any numbers of rows and keys; there is a row."""
    k, v = _filled(k), _filled(v)
    rows = block_of(q.device)[0]
    made = []
    for first in range(0, len(q), rows):
        some = q[first : first + rows]
        queries, at = q.new_zeros((rows, q.shape[1])), last.new_full((rows,), -1)
        queries[: len(some)], at[: len(some)] = some, last[first : first + rows]
        made.append([each[: len(some)] for each in tile(queries, at, k, v)])
    out, lse = (torch.cat(each) for each in zip(*made, strict=True))
    return out, lse


def tile(q: Tensor, last: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention of the rows of a tile.

    Args:
        q: [rows, D] times the scale. last: the last key that each row sees [rows]; -1: it sees none.
        k, v: [C, D], C a multiple of a block.

    Returns:
        out [rows, D] and the log-sum-exp [rows], in float32.
    """
    count = block_of(q.device)[1]
    top, summed = q.new_full((len(q), 1), float("-inf")), q.new_zeros((len(q), 1))
    total, number = torch.zeros_like(q), torch.arange(count, device=q.device)
    for first in range(0, int(last.max()) + 1, count):
        seen = number + first <= last[:, None]
        scores = (q @ k[first : first + count].t()).masked_fill_(~seen, float("-inf"))
        higher = torch.maximum(top, scores.amax(1, keepdim=True))
        # If all scores are -inf there is no maximum to subtract: -inf - -inf is NaN.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        keep, weights = (top - base).exp_(), scores.sub_(base).exp_()
        # Rows that see nothing of a block keep all bits, also if its values are not finite.
        some, top = seen[:, :1], higher
        total = torch.where(some, total * keep + weights @ v[first : first + count], total)
        summed = torch.where(some, summed * keep + weights.sum(1, keepdim=True), summed)
    out = total / summed.masked_fill(summed == 0, 1.0)
    return out, (top + summed.log())[:, 0]


def check(device: torch.device, width: int) -> None:
    """Raise Unsupported unless tiles of heads of that width were measured to give a row the same bits
    in every place and beside any neighbours. The first call of a kind measures."""
    how = (torch.get_float32_matmul_precision(), torch.get_num_threads())
    found = _measured(device, width, *how)
    if found is not None:
        rows, keys = block_of(device)
        raise Unsupported(
            f"torch's attention of {rows} rows on {keys} keys of width {width} in float32 on {device} "
            f"gives a row other bits {found} (precision {how[0]!r}, {how[1]} threads), so it has no "
            "invariant results; pass invariant=False"
        )


@lru_cache(maxsize=64)
def _measured(device: torch.device, width: int, precision: str, threads: int) -> str | None:
    return first_difference(tile, device, width)


def first_difference(attend: Tile, device: torch.device, width: int) -> str | None:
    """Return where the bits of a tile's row depend on more than it and its keys, in words; None: they
    do not. Scores cancel and mix magnitudes; those of half of the rows are so small that every key
    counts."""
    rows, count = block_of(device)
    random = torch.Generator().manual_seed(width)
    q = adversarial(rows, width, random, negated=True)
    q[::2] *= 2.0**-12
    q, k, v = (
        each.to(device)
        for each in (
            q,
            adversarial(2 * count, width, random, negated=False),
            torch.randn((2 * count, width), generator=random),
        )
    )
    v[-1] = torch.nan
    last = torch.randint(2 * count, (rows,), generator=random).to(device)

    def differs(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
        return any(map(other_bits, found, wanted))

    whole = attend(q, last, k, v)
    for turned in (1, rows // 2 - 1, rows - 3):
        found = attend(q.roll(turned, 0), last.roll(turned), k, v)
        if differs(found, (whole[0].roll(turned, 0), whole[1].roll(turned))):
            return "in another place"
    near = last < count  # which see nothing of a block that some of their neighbours see
    for number, end in ((0.0, -1), (torch.inf, 2 * count - 1), (torch.nan, 2 * count - 1)):
        others = torch.where(near[:, None], q, number)
        found = attend(others, torch.where(near, last, end), k, v)
        if differs((found[0][near], found[1][near]), (whole[0][near], whole[1][near])):
            return f"beside rows of {number}"
    return None
