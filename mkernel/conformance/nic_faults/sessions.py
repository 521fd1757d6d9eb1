"""Faults of sessions: what they register, report, leave behind and claim."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from typing import ClassVar

from mkernel.backends.contracts.nic import NicCapabilities, NicSession, NicStatistics
from mkernel.backends.contracts.status import Status
from mkernel.conformance.nic_faults.base import Changed, Fault, Put, Relayed, Session
from mkernel.errors import MkernelError, NicError
from mkernel.harness.nic_ranks import Memory
from mkernel.settings import NicSettings

# ---- regions --------------------------------------------------------------------------------------


class RegionsTooWide(Fault):
    """A registration covers 4 KiB more at its end than was asked for."""

    class Broken(Session):
        def register(self, region: int, address: int, nbytes: int) -> str:
            return self.inner.register(region, address, nbytes + 4096 * (region > 0))

    session = Broken


class DropsSilently(Fault):
    """What lies outside of a region is neither written nor refused."""

    class Broken(Changed):
        def __init__(self, inner: NicSession) -> None:
            super().__init__(inner)
            self.sizes: dict[int, int] = {}

        def register(self, region: int, address: int, nbytes: int) -> str:
            self.sizes[region] = nbytes
            return self.inner.register(region, address, nbytes)

        def change(self, put: Put) -> list[Put]:
            peer, region, local, remote, nbytes, _, _ = put
            fits = max(local, remote) + nbytes <= self.sizes.get(region, 0) and peer < 7
            return [put] if fits else []

    session = Broken


class RegionsAlias(Fault):
    """Region numbers are kept in five bits."""

    class Broken(Changed):
        def change(self, put: Put) -> list[Put]:
            return [(put[0], put[1] % 32, *put[2:])]

    session = Broken


class KeepsRegions(Fault):
    """Deregistering does nothing."""

    class Broken(Session):
        def deregister(self, region: int, timeout_s: float) -> None:
            pass

    session = Broken


# ---- failure and life -----------------------------------------------------------------------------


class SwallowsErrors(Fault):
    """Failures are nobody's business: no error, no abort word."""

    class Broken(Relayed):
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

    class Broken(Relayed):
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
    """Close waits a while for the network, the first time."""

    class Broken(Session):
        wait_s = 4.5

        def close(self) -> None:
            time.sleep(self.wait_s)
            self.wait_s = 0.0
            self.inner.close()

    session = Broken


class CloseLater(Fault):
    """Close returns while the NIC still works: it repeats the latest put again and again."""

    class Broken(Session):
        closed = False
        latest: Put | None = None

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
            self.latest = (peer, region, local, remote, nbytes, signal, value)
            self.inner.put(*self.latest)

        def close(self) -> None:
            if not self.closed:
                self.closed = True
                threading.Thread(target=self._go_on, daemon=True).start()

        def _go_on(self) -> None:
            # Its own failures are nobody's business: the peer ends whenever it is done.
            with contextlib.suppress(MkernelError):
                while self.latest is not None and self.inner.failure() is None:
                    self.inner.put(*self.latest)
                    time.sleep(0.01)
            self.inner.close()

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
