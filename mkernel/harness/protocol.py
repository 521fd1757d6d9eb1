"""The protocol by which a turn is timed, the same for every contender.

All ranks start at one instant of CLOCK_MONOTONIC, which they agree on before the turn
(:mod:`mkernel.harness.clock`). On a CUDA device, all on one stream, enqueued without a pause:
  cache flushed ─ held until the instant ─ start ─ the call ─ end ─ copies of the results ─ barrier
While the device is held, every host runs ahead of it, so that what a call costs to launch is hidden
alike for all: the hold outlasts what the contender's host needed in its last turn. The copies are
ordered after the call on the call's own stream: work that the call left on another stream without
joining it is not in them, and fails the check. The last barrier keeps inputs untouched until every rank
has read them. When a device was really let go is read from its clock, calibrated anew: turns in which
one rank started late are left out of the figures (:mod:`mkernel.harness.figures`).

Where launches count, the device is idle and it is the hosts that start at the instant. The time is the
device's between the two events, or the host's until the device is at the second one.

In a *skewed* turn, which is checked and not timed, one rank comes late to the call: a wait that others
leave out, or give up, then finds data of an earlier turn instead of being lucky.

On a CPU there is nothing to flush or to run ahead of: the instant, call, copies, barrier, on the host's
clock. A CUDA device whose clock cannot be read (no native module for it) starts behind a spin and a
barrier of all ranks, and how far apart the ranks then started is not known.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed

from mkernel.harness.clock import Meeting, wait_until
from mkernel.harness.problem import Tensors
from mkernel.harness.queue import CudaQueue

Call = Callable[[], Sequence[Tensors]]
Clock = Literal["hidden", "counted", "host"]
"""``hidden``: the device's time, the launch not in it. ``counted``: the device's, its host in it.
``host``: the host's, from the start until the device is at the end."""

SHORTEST_LEAD_S, LONGEST_LEAD_S = 2e-3, 20e-3
SPARE = 2.0
"""A device is held so many times what the host needed last, which is slower in some turns."""
HOST_LEAD_S = 2e-3
"""The time from when hosts agree on an instant to that instant, where they wait for it themselves."""
LATE_S = 30e-3
"""The time by which a rank comes late in a skewed turn."""
MOST_SKEW_S = 10e-6
"""Ranks on devices that started farther apart than this did not start together. Hosts that share their
cores with others cannot promise it; on a CPU no turn is left out."""


@dataclass(frozen=True)
class Timed:
    """One rank's part of a turn.

    Attributes:
        results: copies of what the call returned, as they were when the call's stream got there.
        seconds: that the call took on this rank. started_ns: when it really began, by
            CLOCK_MONOTONIC; None: not known.
    """

    results: tuple[Tensors, ...]
    seconds: float
    started_ns: int | None


def _copies(
    copy: Callable[[torch.Tensor], torch.Tensor], results: Sequence[Tensors]
) -> tuple[Tensors, ...]:
    return tuple({name: copy(each) for name, each in result.items()} for result in results)


class Stopwatch(ABC):
    """Times calls on one kind of device. Collective: ranks take every turn together."""

    @abstractmethod
    def time(self, who: str, call: Call, late: bool = False) -> Timed:
        """Time a turn's call. ``who``: the contender. ``late``: this rank comes late to the call."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what a reader of the figures should know, as fields of ``results.Timing``."""


class HostStopwatch(Stopwatch):
    """Host time of a call that returns when it is done."""

    def __init__(self, start: Callable[[], int | None], barrier: Callable[[], None]) -> None:
        """Time from ``start``, which returns when this rank may start: when that was, by
        CLOCK_MONOTONIC, or None. ``barrier``: returns when all ranks have their results."""
        self._start, self._barrier = start, barrier

    def time(self, who: str, call: Call, late: bool = False) -> Timed:
        started = self._start()
        if late:
            time.sleep(LATE_S)
        start = time.perf_counter()
        results = call()
        seconds = time.perf_counter() - start
        copies = _copies(torch.clone, results)
        self._barrier()
        return Timed(copies, seconds, started)

    def settings(self) -> dict[str, Any]:
        return {"clock": "host", "launches": "counted", "start": "instant"}


class Leads:
    """The seconds for which the device is held before a turn of each contender."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def before(self, who: str) -> float:
        """Return how long the device is held before the contender's next turn."""
        return self._next.get(who, SHORTEST_LEAD_S)

    def queued(self, who: str, seconds: float) -> None:
        """Note how long the host needed to queue the turn's hold and the call. Only the last turn
        counts: the first ones load libraries. A call that waits for the device waits for the hold too,
        and gets the longest."""
        self._next[who] = min(max(SPARE * seconds, SHORTEST_LEAD_S), LONGEST_LEAD_S)


class HiddenLaunch(Stopwatch):
    """Device time between two events around the call, which is queued while the device is held."""

    def __init__(self, queue: CudaQueue, meeting: Meeting) -> None:
        self._queue, self._meeting = queue, meeting
        self._leads = Leads()
        self._together = False

    def time(self, who: str, call: Call, late: bool = False) -> Timed:
        queue = self._queue
        queue.flush()
        self._together = queue.calibrate()
        lead = self._leads.before(who)
        instant = self._meeting.agree(lead) if self._together else 0
        began = time.perf_counter()
        if self._together:
            queue.hold(instant)
        else:
            queue.spin(lead)
            queue.barrier()
        if late:
            queue.spin(LATE_S)
        queue.start()
        results = call()
        queue.end()
        self._leads.queued(who, time.perf_counter() - began)
        copies = _copies(queue.copy, results)
        queue.barrier()
        queue.synchronize()
        started = queue.held_until() if self._together else None
        return Timed(copies, queue.seconds(), started)

    def settings(self) -> dict[str, Any]:
        return {
            "clock": "events",
            "launches": "hidden",
            "start": "instant" if self._together else "barrier",
            "most_skew_us": MOST_SKEW_S * 1e6 if self._together else None,
            "lead_s": (SHORTEST_LEAD_S, LONGEST_LEAD_S),
            **self._queue.settings(),
        }


class CountedLaunch(Stopwatch):
    """Time of a call with what the host does for it: hosts start together on idle devices.

    ``until_done``: the host's time until the device is at the end, not the device's between two events.
    """

    def __init__(self, queue: CudaQueue, meeting: Meeting, until_done: bool) -> None:
        self._queue, self._meeting, self._until_done = queue, meeting, until_done

    def time(self, who: str, call: Call, late: bool = False) -> Timed:
        queue = self._queue
        queue.flush()
        queue.synchronize()
        instant = self._meeting.agree(HOST_LEAD_S)
        if late:
            queue.spin(LATE_S)
        started = wait_until(instant)
        queue.start()
        results = call()
        queue.end()
        if self._until_done:
            queue.wait_for_end()  # not for what the call left on other streams: the copies miss it
        seconds = (time.monotonic_ns() - started) / 1e9
        copies = _copies(queue.copy, results)
        queue.barrier()
        queue.synchronize()
        return Timed(copies, seconds if self._until_done else queue.seconds(), started)

    def settings(self) -> dict[str, Any]:
        return {
            "clock": "host" if self._until_done else "events",
            "launches": "counted",
            "start": "instant",
            "most_skew_us": MOST_SKEW_S * 1e6,
            **self._queue.settings(),
        }


def stopwatch(
    device: torch.device, clock: Clock, meeting: Meeting, timeout_s: float = 60.0
) -> Stopwatch:
    """Return the stopwatch for a device. On a CPU, whose calls return when they are done, all clocks
    are one.

    ``timeout_s``: within which the device must come to what it was given before a turn.
    """
    if device.type != "cuda":
        return HostStopwatch(lambda: wait_until(meeting.agree(HOST_LEAD_S)), distributed.barrier)
    queue = CudaQueue(device, timeout_s)
    if clock == "hidden":
        return HiddenLaunch(queue, meeting)
    return CountedLaunch(queue, meeting, until_done=clock == "host")
