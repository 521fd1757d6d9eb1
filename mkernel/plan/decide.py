"""One decision of a plan: the default, and what is predicted to beat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import Field

from mkernel.topology.model import Model

GAIN = 0.03
"""How much faster than the default something must be predicted to be: less is within the model's
error, and plans should not change with the last digit of a constant."""

_Option = TypeVar("_Option")


class Alternative(Model):
    """A way that a plan could have gone. ``predicted_us``: the call's time that way, everything else
    as decided; None where the model has no time for it."""

    decision: str
    option: str
    predicted_us: float | None = Field(None, ge=0)
    chosen: bool
    why: str = ""


def choose(
    decision: str,
    options: Sequence[_Option],
    cost: Callable[[_Option], float],
    name: Callable[[_Option], str] = str,
    by: str = "",
) -> tuple[_Option, tuple[Alternative, ...]]:
    """Return the first option, the default, or the fastest one where that gains enough; and all of
    them. ``by``: how the costs were found, where not by the closed forms."""
    if len(options) == 1:
        return options[0], ()
    times = [cost(option) for option in options]
    best = min(range(len(options)), key=times.__getitem__)
    chosen = best if times[best] < (1 - GAIN) * times[0] else 0
    return options[chosen], tuple(
        Alternative(
            decision=decision,
            option=name(option),
            predicted_us=time,
            chosen=number == chosen,
            why=", ".join(filter(None, ("default" * (number == 0), by))),
        )
        for number, (option, time) in enumerate(zip(options, times, strict=True))
    )
