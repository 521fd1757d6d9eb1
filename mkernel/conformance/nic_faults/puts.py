"""Faults of puts: their bytes, their signals, their order."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time

from mkernel.backends.contracts.nic import NO_SIGNAL, NicSession
from mkernel.backends.runtime import _runtime
from mkernel.conformance.nic_faults.base import Changed, Fault, Put, Relayed, Session
from mkernel.errors import MkernelError
from mkernel.harness.nic_ranks import Memory


class DataLater(Session):
    """What :meth:`split` holds back of a put travels with the next put on that signal, or a flush.

    A sender makes that put when its receiver has seen the signal and said so. Until then the data is
    not there, however long the receiver takes to look: nothing here is a race.
    """

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.held: dict[tuple[int, int], Put] = {}

    def split(self, put: Put) -> tuple[Put, Put | None]:
        """What goes at once, and what is held back."""
        return put, None

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        before = self.held.pop((peer, signal), None)
        if before is not None:
            self.inner.put(*before)
        put = (peer, region, local, remote, nbytes, signal, value)
        if nbytes and signal != NO_SIGNAL:
            put, later = self.split(put)
            if later is not None:
                self.held[peer, signal] = later
        self.inner.put(*put)

    def flush(self, timeout_s: float) -> bool:
        while self.held:
            self.inner.put(*self.held.popitem()[1])
        return self.inner.flush(timeout_s)


def _signal_first(put: Put) -> tuple[Put, Put]:
    peer, region, local, remote, nbytes, signal, value = put
    return (
        (peer, region, 0, 0, 0, signal, value),
        (peer, region, local, remote, nbytes, NO_SIGNAL, 0),
    )


class SignalFirst(Fault):
    """The signal goes out before the data."""

    class Broken(DataLater):
        def split(self, put: Put) -> tuple[Put, Put | None]:
            return _signal_first(put)

    session = Broken


class SignalFirstAtTimes(Fault):
    """As above, once in 100 puts that carry data."""

    class Broken(DataLater):
        def split(self, put: Put) -> tuple[Put, Put | None]:
            return _signal_first(put) if next(self.number) % 100 == 0 else (put, None)

    session = Broken


class SignalBeforeTail(Fault):
    """The last 16 bytes travel after the signal."""

    class Broken(DataLater):
        def split(self, put: Put) -> tuple[Put, Put | None]:
            peer, region, local, remote, nbytes, signal, value = put
            head = nbytes - 16
            if head <= 0:
                return put, None
            return (
                (peer, region, local, remote, head, signal, value),
                (peer, region, local + head, remote + head, 16, NO_SIGNAL, 0),
            )

    session = Broken


class CutsOddSizes(Fault):
    """The last byte of an odd size does not travel."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:4], put[4] & ~1, *put[5:])]

    session = Broken


class FirstMegabyteOnly(Fault):
    """What is beyond 1 MiB of a put does not travel."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:4], min(put[4], 1 << 20), *put[5:])]

    session = Broken


class EmptyPutsLost(Fault):
    """A put of no bytes does nothing, its signal included."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [put] if put[4] else []

    session = Broken


class OneByteMore(Fault):
    """A put writes the byte behind it too."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:4], put[4] + 1, *put[5:])] if put[4] else [put]

    session = Broken


class RemoteAligned(Fault):
    """Remote offsets are rounded down to a multiple of 4."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:3], put[3] & ~3, *put[4:])]

    session = Broken


class LocalAligned(Fault):
    """Local offsets are rounded down to a multiple of 8."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:2], put[2] & ~7, *put[3:])]

    session = Broken


class PeersOfTwoBits(Fault):
    """Ranks above 3 are taken for those below."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(put[0] & 3, *put[1:])]

    session = Broken


class LosesPuts(Fault):
    """Every 1000th put is lost."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [] if next(self.number) % 1000 == 0 else [put]

    session = Broken


class LosesData(Fault):
    """Every 1000th put is its signal alone."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:4], 0, *put[5:])] if next(self.number) % 1000 == 0 else [put]

    session = Broken


class RepeatsPuts(Fault):
    """Every 1000th put happens twice."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [put, put] if next(self.number) % 1000 == 0 else [put]

    session = Broken


class DeadFifo(Fault):
    """The FIFO's handle names a ring that nobody drains."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.handle = (ctypes.c_uint64 * 7)()
            ctypes.memmove(self.handle, inner.fifo, 56)
            self.ring = Memory(64 * self.handle[5])
            self.handle[0] = self.ring.address

        @property
        def fifo(self) -> int:
            return ctypes.addressof(self.handle)

    session = Broken


class AddsOne(Fault):
    """Whatever the value, 1 is added."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:6], min(put[6], 1))]

    session = Broken


class SevenBitValues(Fault):
    """Values above 127 are cut to seven bits."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(*put[:6], put[6] & 127)] if put[6] > 127 else [put]

    session = Broken


class SequenceWraps(Fault):
    """A sequence number of 12 bits: every 4096th put on a signal is taken for a repetition."""

    class Broken(Changed):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.counts: dict[tuple[int, int], int] = {}

        def change(self, put: Put) -> list[Put]:
            key = put[0], put[5]
            self.counts[key] = self.counts.get(key, 0) + 1
            return [] if self.counts[key] % 4096 == 0 else [put]

    session = Broken


class CountersOf32Bits(Fault):
    """Signals wrap around at 2^32."""

    class Broken(Relayed):
        def carry(self, pad: int, index: int, value: int) -> None:
            before = _runtime.pad_load(pad, index)
            if before % (1 << 32) + value >= 1 << 32:
                value += (1 << 64) - (1 << 32)
            _runtime.pad_add(pad, index, value)

    session = Broken


class Reorders(Fault):
    """A put is held back until the next one is out, and then until the sender makes a third, which it
    does when the receiver has looked."""

    class Broken(Session):
        held: Put | None = None
        overtaken = False

        def put(
            self,
            peer: int,
            region: int,
            local: int,
            remote: int,
            nbytes: int,
            signal: int,
            value: int,
        ) -> None:
            if self.overtaken:
                self.release()
            put = (peer, region, local, remote, nbytes, signal, value)
            if self.held is None and (signal == NO_SIGNAL or signal % 2 == 1):
                self.held = put
                return
            self.inner.put(*put)
            self.overtaken = self.held is not None

        def release(self) -> None:
            """Let go what is held back."""
            held, self.held, self.overtaken = self.held, None, False
            if held is not None:
                self.inner.put(*held)

        def flush(self, timeout_s: float) -> bool:
            self.release()
            return self.inner.flush(timeout_s)

    session = Broken


class FlushAtOnce(Fault):
    """Flush returns True while puts have yet to read their source: each waits for that to change, or
    for a second."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.regions: dict[int, int] = {}
            self.queue: queue.SimpleQueue[tuple[Put, bytes, float] | None] = queue.SimpleQueue()
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()

        def register(self, region: int, address: int, nbytes: int) -> str:
            self.regions[region] = address
            return self.inner.register(region, address, nbytes)

        def put(
            self,
            peer: int,
            region: int,
            local: int,
            remote: int,
            nbytes: int,
            signal: int,
            value: int,
        ) -> None:
            put = (peer, region, local, remote, nbytes, signal, value)
            self.queue.put((put, self._source(put), time.monotonic() + 1))

        def _source(self, put: Put) -> bytes:
            """The first bytes that a put reads, as they are now."""
            _, region, local, _, nbytes, _, _ = put
            return ctypes.string_at(self.regions[region] + local, min(nbytes, 64))

        def _run(self) -> None:
            while (item := self.queue.get()) is not None:
                put, before, due = item
                while self._source(put) == before and time.monotonic() < due:
                    time.sleep(0.001)
                with contextlib.suppress(MkernelError):
                    self.inner.put(*put)

        def flush(self, timeout_s: float) -> bool:
            return True

        def close(self) -> None:
            self.queue.put(None)
            self.thread.join()
            self.inner.close()

    session = Broken


class FlushNever(Fault):
    """Flush returns False whatever happened."""

    class Broken(Session):
        def flush(self, timeout_s: float) -> bool:
            self.inner.flush(timeout_s)
            return False

    session = Broken
