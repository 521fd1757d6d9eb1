"""The optional part of an accelerator backend that benches and simulators use.

A backend that also derives from :class:`Instrumented` runs a call in every :data:`View`, and its
launches are :class:`InstrumentedLaunch`. Others run calls as the product does, ``pipelined``. The
functions at the end accept any backend and any launch, and return a default for those that are not
instrumented.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from mkernel.plan.model import LaunchPlan

View = Literal["pipelined", "sequential", "compute_only"]
"""The ways to run a call. ``pipelined``: both kernels at once, the product. ``sequential``: the
communication kernel first, compute after it on every rank. ``compute_only``: no communication at
all; chunks of other ranks count as present, so results are meaningless and only the time counts.
Every view uses up an epoch, so views may follow one another in any order."""


@dataclass
class LaunchTimes:
    """Host wall time of a finished launch, in seconds, by kernel (``comm``, ``compute``)."""

    seconds: dict[str, float] = field(default_factory=dict)


class Span(NamedTuple):
    """One piece of work on a track of a modelled timeline. Times are in microseconds from the
    launch. ``peer``: the rank that is written to, notified or waited for."""

    name: str
    start_us: float
    duration_us: float
    chunk: int | None = None
    peer: int | None = None


class Track(NamedTuple):
    """The work of one core, or of one pipe of it. ``kernel`` is ``comm`` or ``compute``."""

    rank: int
    name: str
    kernel: str
    spans: list[Span]


@dataclass(frozen=True)
class KernelSpan:
    """The time span of one rank's kernel (``comm`` or ``compute``)."""

    rank: int
    kernel: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ModelledRun:
    """A call on the modelled machine: *predicted* times, never measured ones.

    ``total_us``: launch to the end of the last kernel of any rank. ``tracks``: one a core; ``pipes``:
    the same in detail, one a pipe of a core that did something. ``links``: one a link that carried
    something.
    """

    machine: str
    view: View
    total_us: float
    kernels: tuple[KernelSpan, ...]
    tracks: tuple[Track, ...]
    pipes: tuple[Track, ...] = ()
    links: tuple[Track, ...] = ()


class InstrumentedLaunch(ABC):
    """A launch of an instrumented backend, which reports its times once it has ended."""

    @abstractmethod
    def times(self) -> LaunchTimes:
        """Return the wall times; only valid after ``wait`` returned True."""

    def trace(self) -> bytes | None:
        """Return this rank's instruction record for the timed model, or None if none was requested
        or the backend keeps none."""
        return None


class Instrumented(ABC):  # noqa: B024 - what it promises is about calls; nothing more must be written
    """An accelerator backend whose calls run in every view and whose launches report their times."""

    def model(self, plan: LaunchPlan, traces: Sequence[bytes], view: View) -> ModelledRun | None:
        """Replay the traces of all ranks of one call of ``plan`` on a model of the machine, with
        the NICs of the plan's routes.

        Returns None if the backend keeps no modelled time (it runs on a real device).
        """
        return None


def times(launch: object) -> LaunchTimes:
    """Return a finished launch's times; empty if it reports none."""
    return launch.times() if isinstance(launch, InstrumentedLaunch) else LaunchTimes()


def trace(launch: object) -> bytes | None:
    """Return a finished launch's instruction record if one was requested and is kept."""
    return launch.trace() if isinstance(launch, InstrumentedLaunch) else None


def model(
    backend: object, plan: LaunchPlan, traces: Sequence[bytes], view: View
) -> ModelledRun | None:
    """Return a call on the modelled machine if the backend has a model."""
    return backend.model(plan, traces, view) if isinstance(backend, Instrumented) else None
