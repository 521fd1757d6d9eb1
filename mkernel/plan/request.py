"""The planner's request to a backend, the answer (the backend's own part of a plan), and the rule by
which both decide: the default, or what is predicted to beat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pydantic import Field

from mkernel.errors import Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import CommonPart, PathChoice, Prediction, Schedule
from mkernel.plan.pipeline import Exchange, Pipeline, Returns
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Model
from mkernel.topology.shared_links import SharedLinks

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


class TooLarge(Unsupported):
    """A call is larger than the backend's path for it can take. The planner takes the op's other
    path, if there is one."""


@dataclass(frozen=True)
class ScheduleRequest:
    """The inputs of a backend's schedule: it may depend on nothing else. They are the same on every
    rank, and no device is needed.

    Attributes:
        plan: the part that all backends share; its ``prediction`` is None.
        links: what messages occupy on the plan's routes.
        capabilities: capabilities of the backend.
        constants: constants of the machine; None: there are none, and every decision is the
            default.
        path: path that the caller requests; the plan has the one that it is made for.
        chunk: tiles, or rows, of a chunk that the caller wishes; None: no wish.
        compute_blocks, comm_blocks: cores that the caller gives each kernel, at most what the
            capabilities claim; None: no wish.
        returns: how the caller wishes results of experts to come home; None: no wish.
        exchanges: exchanges between nodes to choose from, the default first. What the backend does
            not claim (``hierarchical_ops``) is for the prediction only.
        measured: times of the plan's path by measured constants, which decide instead of the
            model's.
    """

    plan: CommonPart
    links: SharedLinks
    capabilities: AcceleratorCapabilities
    constants: MachineConstants | None
    path: PathChoice = "auto"
    chunk: int | None = None
    compute_blocks: int | None = None
    comm_blocks: int | None = None
    returns: Returns | None = None
    exchanges: tuple[Exchange, ...] = ("direct",)
    measured: Prediction | None = None


class Scheduled(NamedTuple):
    """A backend's part of a plan.

    Attributes:
        schedule: what its launches do.
        pipeline: the same as the cost model sees it.
        prediction: its times; None where there are no constants.
        alternatives: every option that was considered for one of its decisions.
    """

    schedule: Schedule
    pipeline: Pipeline
    prediction: Prediction | None
    alternatives: tuple[Alternative, ...] = ()


Scheduler = Callable[[ScheduleRequest], Scheduled]
"""A backend's ``schedule``, which is a pure function. It raises TooLarge if the plan's path cannot
take such a call; launches take whatever is scheduled, as far as there is memory."""
