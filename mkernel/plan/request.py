"""The planner's request to a backend, and the answer: the backend's own part of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mkernel.errors import Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import CommonPart, PathChoice, Prediction, Schedule
from mkernel.plan.pipeline import Exchange, Pipeline, Returns
from mkernel.topology.cost import MachineConstants
from mkernel.topology.routes import SharedLinks


@dataclass(slots=True)
class Alternative:
    """An option that a plan could have taken. ``predicted_us`` is the call's time with it, if
    everything else stays as decided; None if the model has no time for it."""

    decision: str
    option: str
    predicted_us: float | None
    chosen: bool
    why: str = ""


class TooLarge(Unsupported):
    """A call is larger than the backend's path for it can take. The planner takes the op's other
    path, if there is one."""


@dataclass(slots=True)
class ScheduleRequest:
    """The inputs of a backend's schedule: it may depend on nothing else, and change none of them. They
    are the same on every rank, and no device is needed.

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
