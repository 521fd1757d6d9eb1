"""The verdict on a call's results: the worst output of all ranks against its tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mkernel.cases import Comparison
from mkernel.cases.comparison import badness
from mkernel.topology.model import Model


class OutputError(Model):
    """The worst rank's relative Frobenius error of one output against float64. Tolerance 0: it must be
    equal. None: there is no such error, and ``why`` says why not: a shape, elements that were never
    written, NaN and infinity in other places than in the reference, or nothing that could be compared.
    ``elements``: how many were compared, over all ranks and checked calls."""

    error: float | None
    tolerance: float
    rank: int
    elements: int
    why: str = ""


class Verification(Model):
    """The verdict. ``error``, ``tolerance``, ``output`` and ``rank`` are of what comes closest to its
    tolerance or is furthest beyond it; ``error_by_rank`` is of that output."""

    passed: bool
    error: float | None
    tolerance: float
    error_by_rank: tuple[float | None, ...]
    output: str
    rank: int
    by_output: dict[str, OutputError]


def verify(
    tolerances: Mapping[str, float], checks: Sequence[Mapping[str, Comparison]]
) -> Verification:
    """Judge all ranks' comparisons by output; one without a tolerance must be equal.

    An output of which no rank compared a single element is wrong: nothing is known of it.
    """
    by_output: dict[str, OutputError] = {}
    of_ranks: dict[str, list[Comparison]] = {}
    badness_of: dict[str, tuple[bool, float]] = {}
    for name in checks[0]:
        found = [each[name] for each in checks]
        elements = sum(each.elements for each in found)
        if not elements:
            found = [each if each.why else _NOTHING for each in found]
        tolerance = tolerances.get(name, 0.0)
        shares = [_share(each, tolerance) for each in found]
        rank = max(range(len(found)), key=shares.__getitem__)
        worst = found[rank]
        of_ranks[name] = found
        badness_of[name] = shares[rank]
        by_output[name] = OutputError(
            error=_finite(worst.error),
            tolerance=worst.limit(tolerance),
            rank=rank,
            elements=elements,
            why=worst.why,
        )
    name = max(by_output, key=lambda name: badness_of[name])
    return Verification(
        passed=all(each.within(tolerances.get(n, 0.0)) for n in of_ranks for each in of_ranks[n]),
        error=by_output[name].error,
        tolerance=by_output[name].tolerance,
        error_by_rank=tuple(_finite(each.error) for each in of_ranks[name]),
        output=name,
        rank=by_output[name].rank,
        by_output=by_output,
    )


def _share(found: Comparison, tolerance: float) -> tuple[bool, float]:
    """Return how bad an error is beside the largest that counts as right; by itself where none does."""
    limit = found.limit(tolerance)
    return badness(found.error / limit if limit else found.error)


_NOTHING = Comparison(math.inf, 0, "has no elements on any rank: nothing could be compared")


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
