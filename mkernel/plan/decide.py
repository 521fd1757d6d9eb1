"""Makes one decision of a plan: the default, or what is predicted to beat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import Field

from mkernel.topology.model import Model

GAIN = 0.03
"""An option must be predicted to be faster than the default by this share: less is within the
model's error, and plans should not change with the last digit of a constant."""

_Option = TypeVar("_Option")


class Alternative(Model):
    """An option that a plan could have taken. ``predicted_us`` is the call's time with it, if
    everything else stays as decided; None if the model has no time for it."""

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
    """Choose the fastest option if it gains enough over the first one, the default; else choose the
    default. Returns the choice and all options as alternatives. ``by`` says how the costs were
    found, if not by the closed forms."""
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
