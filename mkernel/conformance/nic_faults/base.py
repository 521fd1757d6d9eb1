"""Honest wrappers around a NIC backend and its sessions; faults override what they break."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import ClassVar

from mkernel.backends.contracts.nic import NicBackend, NicCapabilities, NicSession, NicStatistics
from mkernel.backends.contracts.status import Status
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.backends.runtime import _runtime
from mkernel.errors import NicError
from mkernel.harness.nic_ranks import Memory
from mkernel.settings import NicSettings
from mkernel.topology.model import Nic

Put = tuple[int, int, int, int, int, int, int]


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

    def deregister(self, region: int, timeout_s: float) -> None:
        self.inner.deregister(region, timeout_s)

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
    """A backend whose sessions are of another class; ``cx7`` where a fault does not say which."""

    around: ClassVar[type[VerbsBackend]] = Cx7Nic
    name: ClassVar[str] = "a planted fault"
    providers: ClassVar[tuple[str, ...]] = Cx7Nic.providers
    session: ClassVar[type[Session]] = Session

    def status(self, verbs: str) -> Status:
        return self.around().status(verbs)

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        return self.around().probe(verbs)

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        return self.session(self.around().open(device, verbs, rank, settings))


class Changed(Session):
    """Each put becomes what ``change`` makes of it."""

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        for put in self.change((peer, region, local, remote, nbytes, signal, value)):
            self.inner.put(*put)

    def change(self, put: Put) -> list[Put]:
        """None, one or several puts in place of one."""
        return [put]


class Relayed(Session):
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
