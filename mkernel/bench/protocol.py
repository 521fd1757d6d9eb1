"""How one turn is timed, the same for every contender.

On a CUDA device, all on one stream, enqueued without a pause:
  L2 flushed ─ spin ─ barrier of all ranks ─ start ─ the call ─ end ─ copy of the output ─ barrier
The spin lets every host run ahead of its device, so that what a call costs to launch is hidden alike
for all: it outlasts what the contender's host needed in its last turn. Without it (``launches``) each
host starts when its device is past the barrier, and what the host does counts. The barrier comes right
before the start event; it waits for the rank whose spin is the longest too. The copy is ordered after
the call on the call's own stream: work that the call left on another stream without joining it is not
in the copy, and fails the check. The last barrier keeps inputs untouched until every rank has read
them.

In a *skewed* turn, which is checked and not timed, one rank comes late to the call: a wait that others
leave out, or give up, then finds data of an earlier turn instead of being lucky.

On a CPU there is nothing to flush or to run ahead of: barrier, call, copy, barrier, on the host's
clock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

_cuda: Any = torch.cuda  # partly untyped

SHORTEST_SPIN_S, LONGEST_SPIN_S = 2e-3, 20e-3
SPARE = 2.0
"""A spin is so many times what the host needed last: it is slower in some turns than in others."""
LATE_S = 30e-3
"""How late a rank comes in a skewed turn."""
_CLOCK_HZ = 1.98e9
"""The highest clock of the device that spins; on a slower one the spin is longer."""


class Stopwatch(ABC):
    """Times calls on one kind of device. Collective: ranks take every turn together."""

    @abstractmethod
    def time(
        self, who: str, call: Callable[[], torch.Tensor], late: bool = False
    ) -> tuple[torch.Tensor, float]:
        """A copy of what ``call`` returned, as it was when the call's stream got there, and the
        seconds that the call took on this rank. ``who``: the contender. ``late``: this rank comes late
        to the call."""

    def settings(self) -> dict[str, Any]:
        """What a reader of the figures should know about the clock."""
        return {}


class CpuStopwatch(Stopwatch):
    """Host time of a call that returns when it is done."""

    def time(
        self, who: str, call: Callable[[], torch.Tensor], late: bool = False
    ) -> tuple[torch.Tensor, float]:
        distributed.barrier()
        if late:
            time.sleep(LATE_S)
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        copy = result.clone()
        distributed.barrier()
        return copy, seconds

    def settings(self) -> dict[str, Any]:
        return {"clock": "host"}


class Spins:
    """How long the device spins before a turn of each contender, in seconds."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def before(self, who: str) -> float:
        """Of the contender's next turn."""
        return self._next.get(who, SHORTEST_SPIN_S)

    def queued(self, who: str, seconds: float) -> None:
        """The host needed so long to queue the turn's spin, its barrier and the call. Only the last
        turn counts: the first ones load libraries. A call that waits for the device waits for the spin
        too, and gets the longest."""
        self._next[who] = min(max(SPARE * seconds, SHORTEST_SPIN_S), LONGEST_SPIN_S)


class CudaStopwatch(Stopwatch):
    """Device time between two events around the call."""

    def __init__(self, device: torch.device, launches: bool = False) -> None:
        self._spins = None if launches else Spins()
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache + (16 << 20), dtype=torch.uint8, device=device)
        self._one = torch.zeros(1, device=device)
        self._start = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)

    def time(
        self, who: str, call: Callable[[], torch.Tensor], late: bool = False
    ) -> tuple[torch.Tensor, float]:
        self._flush.zero_()
        began = time.perf_counter()
        if self._spins is not None:
            self._spin(self._spins.before(who))
        distributed.all_reduce(self._one)
        if self._spins is None:
            torch.cuda.synchronize()
        if late:
            self._spin(LATE_S)
        self._start.record()
        result = call()
        self._end.record()
        if self._spins is not None:
            self._spins.queued(who, time.perf_counter() - began)
        copy = result.clone()
        distributed.all_reduce(self._one)
        torch.cuda.synchronize()
        return copy, self._start.elapsed_time(self._end) / 1e3

    def _spin(self, seconds: float) -> None:
        _cuda._sleep(int(seconds * _CLOCK_HZ))

    def settings(self) -> dict[str, Any]:
        spins = None if self._spins is None else [SHORTEST_SPIN_S, LONGEST_SPIN_S]
        return {"clock": "events", "flush_bytes": self._flush.numel(), "spin_s": spins}


def stopwatch(device: torch.device, launches: bool = False) -> Stopwatch:
    """The one for a device. ``launches``: the host's part of a call counts, as it does on a CPU."""
    return CudaStopwatch(device, launches) if device.type == "cuda" else CpuStopwatch()
