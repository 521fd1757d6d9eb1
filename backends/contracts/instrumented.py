"""What benches and simulators ask of a backend beyond running calls: views, times and modelled runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

View = Literal["pipelined", "sequential", "compute_only"]
"""How a call is run. ``pipelined``: both kernels at once, the product. ``sequential``: the
communication kernel first, compute after it on every rank. ``compute_only``: no communication at
all; chunks of other ranks count as present, so results are meaningless and only the time counts.
Every view uses up an epoch, so views may follow one another in any order."""


@dataclass
class LaunchTimes:
    """Host wall time of a finished launch, in seconds, by kernel (``comm``, ``compute``)."""

    seconds: dict[str, float] = field(default_factory=dict)


class Span(NamedTuple):
    """One piece of work on a track of a modelled timeline. Microseconds from the launch. ``peer``: the
    rank written to, notified or waited for."""

    name: str
    start_us: float
    duration_us: float
    chunk: int | None = None
    peer: int | None = None


class Track(NamedTuple):
    """What one core, or one pipe of it, did. ``kernel`` is ``comm`` or ``compute``."""

    rank: int
    name: str
    kernel: str
    spans: list[Span]


@dataclass(frozen=True)
class KernelSpan:
    """When a kernel (``comm`` or ``compute``) of a rank ran."""

    rank: int
    kernel: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ModelledRun:
    """A call on the modelled machine: *predicted* times, never measured ones.

    ``total_us``: launch to the end of the last kernel of any rank. ``tracks``: one a core; ``pipes``:
    the same in detail, one a pipe of a core that did something.
    """

    machine: str
    view: View
    total_us: float
    kernels: tuple[KernelSpan, ...]
    tracks: tuple[Track, ...]
    pipes: tuple[Track, ...] = ()

    def kernel_us(self, kernel: str) -> float:
        """Longest duration of that kernel over the ranks; 0 where it did not run."""
        return max((k.end_us - k.start_us for k in self.kernels if k.kernel == kernel), default=0.0)
