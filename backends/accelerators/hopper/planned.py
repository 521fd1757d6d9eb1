"""What follows from a plan alone is worked out at its first call, not at each."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from mkernel.plan.model import LaunchPlan

T = TypeVar("T")


def of_plan(function: Callable[[LaunchPlan], T]) -> Callable[[LaunchPlan], T]:
    """Remembers what a pure function of a plan returned, which is not None."""
    known: dict[str, T] = {}

    @wraps(function)
    def remembered(plan: LaunchPlan) -> T:
        digest = plan.digest()
        found = known.get(digest)
        if found is None:
            found = known[digest] = function(plan)
        return found

    return remembered
