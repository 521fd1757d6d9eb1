"""The verdict of a case on outputs that a test made by hand."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mkernel.cases.base import Case, Outcome


def wrong(
    case: Case, outputs: Mapping[str, Tensor], rank: int, world: int, iteration: int
) -> set[str]:
    """Return which outputs of a rank's call are wrong; the case passes them where none is."""
    outcome = Outcome(outputs, None, None)  # type: ignore[arg-type]
    found = case.judge(outcome, rank, world, iteration)
    limits = case.tolerances()
    names = {name for name, one in found.items() if not one.error <= limits.get(name, 0.0)}
    assert case.passed(found) == (not names)
    return names
