"""A CUDA device's stream as a stopwatch uses it, in the order in which its methods are called.

The device's clock is read, and waited for, by kernels of ``backends/accelerators/cuda``. Where
these are not built, or not for this device, ranks start behind a spin and a barrier instead.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed

from mkernel.backends.accelerators.cuda.native import device_clock
from mkernel.harness.clock import Calibration, calibrated

_cuda: Any = torch.cuda  # partly untyped

CLOCK_SAMPLES = 16
HOLD_SPARE_S = 1.0
"""A device that is held gives up so long after the instant."""
_SPIN_HZ = 1.98e9
"""The highest clock of the device that spins; on a slower one the spin is longer."""


class Cache:
    """Replaces all that a device's cache holds, and leaves nothing there that must be written back.

    A writing pass alone leaves dirty lines, whose write-back the next kernel pays for.
    """

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.nbytes = 2 * cache_bytes + (16 << 20)
        self._written = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._read = torch.zeros(self.nbytes // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def flush(self) -> None:
        """Make a writing pass over more than the cache, then a reading one elsewhere."""
        self._written.zero_()
        torch.sum(self._read, 0, out=self._sum)


class CudaQueue:
    """The current stream of the current device, as a stopwatch uses it. Only ``wait_for_end``,
    ``synchronize``, ``calibrate`` and ``held_until`` wait for the device."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._cache = Cache(device, torch.cuda.get_device_properties(device).L2_cache_size)
        self._one = torch.zeros(1, device=device)
        self._start = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)
        self._timeout_s = timeout_s
        self._clock = device_clock(device.index)
        self._calibration: Calibration | None = None
        self._errors_ns: list[int] = []

    def flush(self) -> None:
        """Flush the cache of the turn before, and leave nothing there that waits to be written back."""
        self._cache.flush()

    def calibrate(self) -> bool:
        """Compare the device's clock with the host's, when all before is done; False: it has none."""
        if self._clock is None:
            return False
        samples = self._clock.read(CLOCK_SAMPLES, self._timeout_s, stream=_stream())
        self._calibration = calibrated(samples)
        self._errors_ns.append(self._calibration.error_ns)
        return True

    def hold(self, instant_ns: int) -> None:
        """Hold the stream until an instant of CLOCK_MONOTONIC. After :meth:`calibrate`."""
        assert self._clock is not None
        assert self._calibration is not None
        left_s = max(0, instant_ns - time.monotonic_ns()) / 1e9
        self._clock.hold(
            self._calibration.on_device(instant_ns), left_s + HOLD_SPARE_S, stream=_stream()
        )

    def spin(self, seconds: float) -> None:
        """Delay what follows by so much."""
        _cuda._sleep(int(seconds * _SPIN_HZ))

    def barrier(self) -> None:
        """Hold what follows until all ranks are here."""
        distributed.all_reduce(self._one)

    def start(self) -> None:
        """Begin the time."""
        self._start.record()

    def end(self) -> None:
        """End the time."""
        self._end.record()

    def wait_for_end(self) -> None:
        """Wait until the stream is at :meth:`end`."""
        self._end.synchronize()

    def copy(self, result: torch.Tensor) -> torch.Tensor:
        """Copy the result as it is when all before is done."""
        return result.clone()

    def synchronize(self) -> None:
        """Wait until all is done."""
        torch.cuda.synchronize()

    def seconds(self) -> float:
        """Return the time from the start to the end. After :meth:`synchronize`."""
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1e3

    def held_until(self) -> int:
        """Return when the last hold really ended, in nanoseconds of CLOCK_MONOTONIC, by a calibration
        of its own: what it was held by may have drifted or been off. After :meth:`synchronize`."""
        assert self._clock is not None
        passed = self._clock.passed
        self.calibrate()
        assert self._calibration is not None
        return self._calibration.on_host(passed)

    def settings(self) -> dict[str, Any]:
        """Return the bytes of the flush, and how well the clock is known."""
        found: dict[str, Any] = {
            "flush_bytes": self._cache.nbytes,
            "read_bytes": self._cache.nbytes,
        }
        if self._errors_ns:
            middle = sorted(self._errors_ns)[len(self._errors_ns) // 2]
            found["clock_error_us"] = middle / 1e3
        return found


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream
