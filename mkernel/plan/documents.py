"""Documents that are packed into one sequence, and the positions at which they begin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mkernel.errors import ArgumentError


def checked_boundaries(values: Sequence[int], sequence: int) -> Sequence[int]:
    """Check and return the boundaries [N + 1] of N documents in a sequence: document i is positions
    values[i] to values[i + 1] - 1; it may be empty.

    Raises ArgumentError if they do not begin with 0, or end with the sequence's length, or one is
    smaller than the one before.
    """
    ordered = all(first <= second for first, second in pairwise(values))
    if len(values) < 2 or values[0] != 0 or values[-1] != sequence or not ordered:
        shown = [*values] if len(values) <= 8 else [*values[:4], "...", *values[-3:]]
        raise ArgumentError(
            "cu_seqlens",
            shown,
            f"where each document begins: from 0 to {sequence}, the length of the whole sequence, "
            "none smaller than the one before",
        )
    return values
