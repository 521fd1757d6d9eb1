"""How one turn is timed, the same for every contender.

On a CUDA device, all on one stream, enqueued without a pause:
  L2 flushed ─ spin ─ barrier of all ranks ─ start ─ the call ─ end ─ copy of the output ─ barrier
The spin lets every host run ahead of its device, so that what a call costs to launch is hidden alike
for all; without it (``launches``) each host starts when its device is past the barrier, and what the
host does counts. The barrier comes right before the start event. The copy is ordered after the call
on the call's own stream: work that the call left on another stream without joining it is not in the
copy, and fails the check. The last barrier keeps inputs untouched until every rank has read them.

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

SPIN_S = 2e-3
"""Longer than any contender's host needs to enqueue a call."""
LATE_S = 30e-3
"""How late a rank comes in a skewed turn."""
_CLOCK_HZ = 1.98e9
"""The highest clock of the device that spins; on a slower one the spin is longer."""


class Stopwatch(ABC):
    """Times calls on one kind of device. Collective: ranks take every turn together."""

    @abstractmethod
    def time(
        self, call: Callable[[], torch.Tensor], late: bool = False
    ) -> tuple[torch.Tensor, float]:
        """A copy of what ``call`` returned, as it was when the call's stream got there, and the
        seconds that the call took on this rank. ``late``: this rank comes late to the call."""

    def settings(self) -> dict[str, Any]:
        """What a reader of the figures should know about the clock."""
        return {}


class CpuStopwatch(Stopwatch):
    """Host time of a call that returns when it is done."""

    def time(
        self, call: Callable[[], torch.Tensor], late: bool = False
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


class CudaStopwatch(Stopwatch):
    """Device time between two events around the call."""

    def __init__(self, device: torch.device, launches: bool = False) -> None:
        self._spin_s = 0.0 if launches else SPIN_S
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache + (16 << 20), dtype=torch.uint8, device=device)
        self._one = torch.zeros(1, device=device)
        self._start = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)

    def time(
        self, call: Callable[[], torch.Tensor], late: bool = False
    ) -> tuple[torch.Tensor, float]:
        self._flush.zero_()
        self._spin(self._spin_s)
        distributed.all_reduce(self._one)
        if self._spin_s == 0:
            torch.cuda.synchronize()
        if late:
            self._spin(LATE_S)
        self._start.record()
        result = call()
        self._end.record()
        copy = result.clone()
        distributed.all_reduce(self._one)
        torch.cuda.synchronize()
        return copy, self._start.elapsed_time(self._end) / 1e3

    def _spin(self, seconds: float) -> None:
        if seconds > 0:
            _cuda._sleep(int(seconds * _CLOCK_HZ))

    def settings(self) -> dict[str, Any]:
        return {"clock": "events", "flush_bytes": self._flush.numel(), "spin_s": self._spin_s}


def stopwatch(device: torch.device, launches: bool = False) -> Stopwatch:
    """The one for a device. ``launches``: the host's part of a call counts, as it does on a CPU."""
    return CudaStopwatch(device, launches) if device.type == "cuda" else CpuStopwatch()
