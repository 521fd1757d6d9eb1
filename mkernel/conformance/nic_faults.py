"""Planted faults of the NIC checks: ``cx7`` with one promise broken each.

Every class here is a NIC backend, named ``mkernel.conformance.nic_faults:Class`` where a backend's
name is asked for. :data:`FAULTS` says which checks must fail on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import threading
import time
from dataclasses import replace
from typing import ClassVar

from mkernel.backends.base import (
    NO_SIGNAL,
    NicBackend,
    NicCapabilities,
    NicSession,
    NicStatistics,
    Status,
)
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.runtime import _runtime
from mkernel.conformance.nic_ranks import Memory
from mkernel.errors import MkernelError, NicError
from mkernel.settings import NicSettings
from mkernel.topology.model import Nic

_Put = tuple[int, int, int, int, int, int, int]


class Session(NicSession):
    """An honest session around another; faults override what they break."""

    def __init__(self, inner: NicSession) -> None:
        self.inner = inner
        self.number = itertools.count(1)

    def capabilities(self) -> NicCapabilities:
        return self.inner.capabilities()

    def address(self, peer: int) -> str:
        return self.inner.address(peer)

    def connect(self, peer: int, address: str) -> None:
        self.inner.connect(peer, address)

    def register(self, region: int, address: int, nbytes: int) -> str:
        return self.inner.register(region, address, nbytes)

    def bind(self, region: int, peer: int, key: str) -> None:
        self.inner.bind(region, peer, key)

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        self.inner.start(pad, cpus)

    @property
    def fifo(self) -> int:
        return self.inner.fifo

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        self.inner.put(peer, region, local, remote, nbytes, signal, value)

    def flush(self, timeout_s: float) -> bool:
        return self.inner.flush(timeout_s)

    def statistics(self) -> NicStatistics:
        return self.inner.statistics()

    def failure(self) -> NicError | None:
        return self.inner.failure()

    def close(self) -> None:
        self.inner.close()


class Fault(NicBackend):
    """``cx7`` whose sessions are of another class."""

    name: ClassVar[str] = "cx7"
    providers: ClassVar[tuple[str, ...]] = Cx7Nic.providers
    session: ClassVar[type[Session]] = Session

    def status(self, verbs: str) -> Status:
        return Cx7Nic().status(verbs)

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        return Cx7Nic().probe(verbs)

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        return self.session(Cx7Nic().open(device, verbs, rank, settings))


class _Changed(Session):
    """Each put becomes what ``change`` makes of it."""

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        for put in self.change((peer, region, local, remote, nbytes, signal, value)):
            self.inner.put(*put)

    def change(self, put: _Put) -> list[_Put]:
        """None, one or several puts in place of one."""
        return [put]


class _Later(Session):
    """Puts run on a thread, a little later."""

    delay_s = 0.005

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.queue: queue.SimpleQueue[tuple[float, _Put] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        due = time.monotonic() + self.delay_s
        self.queue.put((due, (peer, region, local, remote, nbytes, signal, value)))

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            time.sleep(max(0.0, item[0] - time.monotonic()))
            with contextlib.suppress(MkernelError):
                self.inner.put(*item[1])

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()
        self.inner.close()


class _Relayed(Session):
    """Signals are raised in a pad of our own; a thread carries them over to the rank's."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        capacity = ctypes.c_uint32.from_address(pad + 8).value
        self.shadow = Memory(_runtime.pad_bytes(capacity))
        _runtime.pad_format(self.shadow.address, capacity)
        self.inner.start(self.shadow.address, cpus)
        self.thread = threading.Thread(target=self._run, args=(pad, capacity), daemon=True)
        self.thread.start()

    def _run(self, pad: int, capacity: int) -> None:
        seen = [0] * capacity
        while not self.stop.wait(0.0005):
            for index in range(capacity):
                count = _runtime.pad_load(self.shadow.address, index)
                if count != seen[index]:
                    self.carry(pad, index, count - seen[index])
                    seen[index] = count

    def carry(self, pad: int, index: int, value: int) -> None:
        """Add to the rank's own counter what came in."""
        _runtime.pad_add(pad, index, value)

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        self.inner.close()


# ---- bytes and signals ----------------------------------------------------------------------------


def _signal_first(put: _Put) -> list[_Put]:
    peer, region, local, remote, nbytes, signal, value = put
    if nbytes == 0 or signal == NO_SIGNAL:
        return [put]
    return [
        (peer, region, 0, 0, 0, signal, value),
        (peer, region, local, remote, nbytes, NO_SIGNAL, 0),
    ]


class SignalFirst(Fault):
    """The signal goes out before the data."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return _signal_first(put)

    session = Broken


class SignalFirstAtTimes(Fault):
    """As above, once in 100 puts that carry data."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return _signal_first(put) if put[4] and next(self.number) % 100 == 0 else [put]

    session = Broken


class SignalBeforeTail(Fault):
    """The last 16 bytes travel after the signal."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            peer, region, local, remote, nbytes, signal, value = put
            head = nbytes - 16
            if head <= 0 or signal == NO_SIGNAL:
                return [put]
            return [
                (peer, region, local, remote, head, signal, value),
                (peer, region, local + head, remote + head, 16, NO_SIGNAL, 0),
            ]

    session = Broken


class CutsOddSizes(Fault):
    """The last byte of an odd size does not travel."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:4], put[4] & ~1, *put[5:])]

    session = Broken


class FirstMegabyteOnly(Fault):
    """What is beyond 1 MiB of a put does not travel."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:4], min(put[4], 1 << 20), *put[5:])]

    session = Broken


class EmptyPutsLost(Fault):
    """A put of no bytes does nothing, its signal included."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [put] if put[4] else []

    session = Broken


class OneByteMore(Fault):
    """A put writes the byte behind it too."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:4], put[4] + 1, *put[5:])] if put[4] else [put]

    session = Broken


class RemoteAligned(Fault):
    """Remote offsets are rounded down to a multiple of 4."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:3], put[3] & ~3, *put[4:])]

    session = Broken


class LocalAligned(Fault):
    """Local offsets are rounded down to a multiple of 8."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:2], put[2] & ~7, *put[3:])]

    session = Broken


class LosesPuts(Fault):
    """Every 1000th put is lost."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [] if next(self.number) % 1000 == 0 else [put]

    session = Broken


class LosesData(Fault):
    """Every 1000th put is its signal alone."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:4], 0, *put[5:])] if next(self.number) % 1000 == 0 else [put]

    session = Broken


class RepeatsPuts(Fault):
    """Every 1000th put happens twice."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
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

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:6], min(put[6], 1))]

    session = Broken


class SevenBitValues(Fault):
    """Values above 127 are cut to seven bits."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(*put[:6], put[6] & 127)] if put[6] > 127 else [put]

    session = Broken


class SequenceWraps(Fault):
    """A sequence number of 12 bits: every 4096th put on a signal is taken for a repetition."""

    class Broken(_Changed):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.counts: dict[tuple[int, int], int] = {}

        def change(self, put: _Put) -> list[_Put]:
            key = put[0], put[5]
            self.counts[key] = self.counts.get(key, 0) + 1
            return [] if self.counts[key] % 4096 == 0 else [put]

    session = Broken


class CountersOf32Bits(Fault):
    """Signals wrap around at 2^32."""

    class Broken(_Relayed):
        def carry(self, pad: int, index: int, value: int) -> None:
            before = _runtime.pad_load(pad, index)
            if before % (1 << 32) + value >= 1 << 32:
                value += (1 << 64) - (1 << 32)
            _runtime.pad_add(pad, index, value)

    session = Broken


class Reorders(Fault):
    """Each second put is held back until the next one is out."""

    class Broken(Session):
        held: _Put | None = None

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
            held, self.held = self.held, None
            if held is None and (signal == NO_SIGNAL or signal % 2 == 1):
                self.held = put
                return
            self.inner.put(*put)
            if held is not None:
                self.inner.put(*held)

        def flush(self, timeout_s: float) -> bool:
            if self.held is not None:
                self.inner.put(*self.held)
                self.held = None
            return self.inner.flush(timeout_s)

    session = Broken


class FlushAtOnce(Fault):
    """Flush returns True while puts have yet to read their source."""

    class Broken(_Later):
        def flush(self, timeout_s: float) -> bool:
            return True

    session = Broken


class FlushNever(Fault):
    """Flush returns False whatever happened."""

    class Broken(Session):
        def flush(self, timeout_s: float) -> bool:
            self.inner.flush(timeout_s)
            return False

    session = Broken


# ---- regions --------------------------------------------------------------------------------------


class RegionsTooWide(Fault):
    """A registration covers 4 KiB more at its end than was asked for."""

    class Broken(Session):
        def register(self, region: int, address: int, nbytes: int) -> str:
            return self.inner.register(region, address, nbytes + 4096 * (region > 0))

    session = Broken


class DropsSilently(Fault):
    """What lies outside of a region is neither written nor refused."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.sizes: dict[int, int] = {}

        def register(self, region: int, address: int, nbytes: int) -> str:
            self.sizes[region] = nbytes
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
            if max(local, remote) + nbytes <= self.sizes.get(region, 0) and peer < 7:
                self.inner.put(peer, region, local, remote, nbytes, signal, value)

    session = Broken


class RegionsAlias(Fault):
    """Region numbers are kept in five bits."""

    class Broken(_Changed):
        def change(self, put: _Put) -> list[_Put]:
            return [(put[0], put[1] % 32, *put[2:])]

    session = Broken


# ---- failure and life -----------------------------------------------------------------------------


class SwallowsErrors(Fault):
    """Failures are nobody's business: no error, no abort word."""

    class Broken(_Relayed):
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
            with contextlib.suppress(NicError):
                self.inner.put(peer, region, local, remote, nbytes, signal, value)

        def failure(self) -> NicError | None:
            return None

    session = Broken


class NoAbort(Fault):
    """A failure is known to the session, but waiting kernels are not woken."""

    class Broken(_Relayed):
        pass

    session = Broken


class NamesNobody(Fault):
    """Errors do not say which peer."""

    class Broken(Session):
        def failure(self) -> NicError | None:
            found = self.inner.failure()
            return None if found is None else NicError(str(found), status=found.status)

    session = Broken


class SlowClose(Fault):
    """Close waits a while for the network."""

    class Broken(Session):
        def close(self) -> None:
            time.sleep(1.5)
            self.inner.close()

    session = Broken


class CloseLater(Fault):
    """Close returns while the NIC still works."""

    class Broken(Session):
        closed = False

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
            if self.closed:
                raise MkernelError("the session is closed")
            self.inner.put(peer, region, local, remote, nbytes, signal, value)

        def close(self) -> None:
            if not self.closed:
                self.closed = True
                threading.Timer(1.0, self.inner.close).start()

    session = Broken


class LeaksDescriptor(Fault):
    """Each session leaves a file open."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            os.open("/dev/null", os.O_RDONLY)

    session = Broken


class LeaksThread(Fault):
    """Each session leaves a thread."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    session = Broken


class LeaksMemory(Fault):
    """Each session leaves shared memory mapped."""

    kept: ClassVar[list[Memory]] = []

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            LeaksMemory.kept.append(Memory(4096))

    session = Broken


class BusyLoop(Fault):
    """The session polls without a pause."""

    class Broken(Session):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.stop = False
            self.thread = threading.Thread(target=self._spin, daemon=True)
            self.thread.start()

        def _spin(self) -> None:
            while not self.stop:
                self.inner.failure()

        def close(self) -> None:
            self.stop = True
            self.thread.join()
            self.inner.close()

    session = Broken


class CountsTwice(Fault):
    """Bytes of puts are counted twice."""

    class Broken(Session):
        def statistics(self) -> NicStatistics:
            found = self.inner.statistics()
            return replace(found, put_bytes=2 * found.put_bytes)

    session = Broken


class CountsSignalsOnly(Fault):
    """A put without a signal does not count."""

    class Broken(Session):
        def statistics(self) -> NicStatistics:
            found = self.inner.statistics()
            return replace(found, puts=found.signals_sent)

    session = Broken


# ---- what the backend says of itself --------------------------------------------------------------


class StatusRaises(Fault):
    """Status of a provider that is not there raises."""

    def status(self, verbs: str) -> Status:
        found = super().status(verbs)
        if not found.usable:
            raise OSError(found.detail)
        return found


class OpensAnything(Fault):
    """Open takes any device name."""

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        return super().open(self.probe("soft")[0].name, "soft", rank, settings)


class ClaimsNothing(Fault):
    """Capabilities give a message size of 0."""

    class Broken(Session):
        def capabilities(self) -> NicCapabilities:
            return self.inner.capabilities().model_copy(update={"max_message_bytes": 0})

    session = Broken


_BROKEN: dict[type[Fault], tuple[str, ...]] = {
    SignalFirst: ("visibility",),
    SignalFirstAtTimes: ("visibility",),
    SignalBeforeTail: ("visibility",),
    CutsOddSizes: ("sizes",),
    FirstMegabyteOnly: ("sizes",),
    EmptyPutsLost: ("sizes",),
    OneByteMore: ("sizes", "alignment"),
    RemoteAligned: ("alignment",),
    LocalAligned: ("alignment",),
    LosesPuts: ("in-flight",),
    LosesData: ("in-flight",),
    RepeatsPuts: ("in-flight",),
    DeadFifo: ("fifo",),
    AddsOne: ("signal-values",),
    SevenBitValues: ("signal-values",),
    SequenceWraps: ("counter-wrap",),
    CountersOf32Bits: ("counter-wrap",),
    Reorders: ("order",),
    FlushAtOnce: ("flush",),
    FlushNever: ("flush",),
    RegionsTooWide: ("registration",),
    DropsSilently: ("registration",),
    RegionsAlias: ("registration",),
    SwallowsErrors: ("killed-peer", "registration"),
    NoAbort: ("killed-peer",),
    NamesNobody: ("killed-peer",),
    SlowClose: ("close", "killed-peer"),
    CloseLater: ("close",),
    LeaksDescriptor: ("reopen",),
    LeaksThread: ("reopen",),
    LeaksMemory: ("reopen",),
    BusyLoop: ("idle-cpu",),
    CountsTwice: ("statistics",),
    CountsSignalsOnly: ("statistics",),
    StatusRaises: ("capabilities",),
    OpensAnything: ("capabilities",),
    ClaimsNothing: ("capabilities",),
}

FAULTS: dict[str, tuple[str, ...]] = {
    f"{fault.__module__}:{fault.__name__}": checks for fault, checks in _BROKEN.items()
}
"""Backend's name → checks that must fail on it."""
