"""One instant for ranks of one host: their devices' clocks beside CLOCK_MONOTONIC, and its agreement.

Processes of a host share CLOCK_MONOTONIC; a device has a clock of its own, which starts elsewhere and
drifts by tens of microseconds a second. A device that is asked for its clock answers at some time
between two readings of the host's: the fastest answer says best what lies between the two clocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from mkernel.world.sealing import Seal

Sample = tuple[int, int, int]
"""Nanoseconds: the host's clock before, the device's, the host's after."""


@dataclass(frozen=True)
class Calibration:
    """The offset between a device's clock and CLOCK_MONOTONIC, in nanoseconds.

    Attributes:
        offset_ns: the device's clock minus the host's. error_ns: it is at most so far from the truth.
    """

    offset_ns: int
    error_ns: int

    def on_device(self, monotonic_ns: int) -> int:
        """Convert an instant of the host's clock to the device's."""
        return monotonic_ns + self.offset_ns

    def on_host(self, device_ns: int) -> int:
        """Convert an instant of the device's clock to the host's."""
        return device_ns - self.offset_ns


def calibrated(samples: Sequence[Sample]) -> Calibration:
    """Return the calibration that the fastest of at least one answer gives."""
    before, device, after = min(samples, key=lambda sample: sample[2] - sample[0])
    return Calibration(device - (before + after) // 2, (after - before + 1) // 2)


class Meeting:
    """Agrees on instants of CLOCK_MONOTONIC. Collective: all ranks agree equally often.

    Args:
        store: of these ranks alone, or with a prefix of their own.
        seal: closes what they propose; by default whoever reaches the store is trusted.
    """

    def __init__(self, store: Store, rank: int, size: int, seal: Seal | None = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._seal = seal or Seal(b"")
        self._count = 0

    def agree(self, lead_s: float) -> int:
        """Return the latest of what the ranks propose, which is ``lead_s`` from now; nanoseconds."""
        mine = time.monotonic_ns() + round(lead_s * 1e9)
        if self._size == 1:
            return mine
        self._count += 1
        own = self._key(self._count, self._rank)
        sealed: Any = self._seal.close(own, str(mine).encode())  # torch takes bytes, too
        self._store.set(own, sealed)
        keys = [self._key(self._count, rank) for rank in range(self._size)]
        latest = max(int(self._seal.open(key, self._store.get(key))) for key in keys)
        # Whoever proposes has read everything of the time before.
        self._store.delete_key(self._key(self._count - 1, self._rank))
        return latest

    @staticmethod
    def _key(count: int, rank: int) -> str:
        return f"{count}/{rank}"


def wait_until(instant_ns: int) -> int:
    """Keep the host busy until an instant of CLOCK_MONOTONIC; return when it really ended, in
    nanoseconds."""
    now = time.monotonic_ns()
    while now < instant_ns:
        now = time.monotonic_ns()
    return now


def skew_us(starts_ns: Sequence[int]) -> float:
    """Return how far apart the first and the last rank started, in microseconds."""
    return (max(starts_ns) - min(starts_ns)) / 1e3
