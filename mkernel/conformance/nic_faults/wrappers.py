"""NIC sessions around an honest one, and the backend that opens them."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mkernel.backends.contracts.nic import NO_SIGNAL, NicBackend, NicSession
from mkernel.backends.contracts.status import Status
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.provider import SOFT, library_of
from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.backends.transport import _transport
from mkernel.conformance.faults.rows import forwards
from mkernel.errors import BackendUnavailable
from mkernel.harness.nic_ranks import Memory
from mkernel.settings import NicSettings
from mkernel.topology.lanes import NicUse, RankLanes
from mkernel.topology.model import Nic


class Put(NamedTuple):
    """The arguments of a session's ``put``."""

    peer: int
    region: int
    local: int
    remote: int
    nbytes: int
    signal: int
    value: int

    def alone(self) -> Put:
        """Return the put's signal without its data."""
        return self._replace(local=0, remote=0, nbytes=0)

    def part(self, start: int, nbytes: int) -> Put:
        """Return some bytes of the put, without its signal."""
        return self._replace(
            local=self.local + start,
            remote=self.remote + start,
            nbytes=nbytes,
            signal=NO_SIGNAL,
            value=0,
        )


@forwards(NicSession)
class Session(NicSession):
    """A session that passes everything on to another. ``regions`` maps registered regions to
    address and size. ``lanes`` are those that it was opened with."""

    lanes: RankLanes

    def __init__(self, inner: NicSession) -> None:
        self.inner = inner
        self.number = itertools.count(1)
        self.regions: dict[int, tuple[int, int]] = {}

    def register(self, region: int, address: int, nbytes: int) -> str:
        self.regions[region] = address, nbytes
        return self.inner.register(region, address, nbytes)

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        for put in self.change(Put(peer, region, local, remote, nbytes, signal, value)):
            self.inner.put(*put)

    def change(self, put: Put) -> Iterable[Put]:
        """Return none, one or several puts in place of one."""
        return [put]


class Opener(NicBackend):
    """Opens sessions of another backend, and a session of its own around each.

    Attributes:
        around: that backend. session: class of the sessions around its sessions.
        environment, settings, schedule: changed before a device is opened. mistake: made at the
            verbs, by a library between the backend and the software device
            (``tests/native/nics/planted_verbs.cpp``), which only a built repository has.
    """

    name: ClassVar[str] = "a planted fault"
    around: ClassVar[type[VerbsBackend]] = Cx7Nic
    providers: ClassVar[tuple[str, ...]] = Cx7Nic.providers
    max_queue_pairs: ClassVar[int] = Cx7Nic.max_queue_pairs
    session: ClassVar[type[Any]] = Session
    environment: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    schedule: ClassVar[Mapping[str, Any]] = {}
    mistake: ClassVar[str] = ""

    def status(self, verbs: str) -> Status:
        """Return the status of the honest backend. Raises BackendUnavailable if the fault cannot be
        planted here."""
        library = self._mistaken()
        if library is not None and not library.is_file():
            raise BackendUnavailable(
                f"the verbs library that makes mistakes is not here ({library}): wheels leave it out; "
                "run the command in a repository that `make` has built"
            )
        return self.around().status(verbs)

    def _mistaken(self, settings: NicSettings | None = None) -> Path | None:
        """Return the path of the library that makes the mistake; None: no mistake is made at the
        verbs."""
        if not self.mistake:
            return None
        return Path(library_of(SOFT, settings)).with_name("libmkernel_planted_verbs.so")

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        return self.around().probe(verbs)

    def use(self, settings: NicSettings) -> NicUse:
        return self.around().use(settings)

    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        os.environ.update(self.environment)
        if (library := self._mistaken(settings)) is not None:
            os.environ["MKERNEL_PLANTED_MISTAKE"] = self.mistake
            verbs = str(library)
        settings = settings.model_copy(update=dict(self.settings))
        schedule = lanes.schedule.model_copy(update=dict(self.schedule))
        lanes = replace(lanes, schedule=schedule)
        session: Session = self.session(self.around().open(verbs, lanes, settings))
        session.lanes = lanes
        return session


class DataLater(Session):
    """A session in which what :meth:`split` holds back of a put travels with the next put on that
    signal, or a flush.

    A sender makes that put when its receiver has seen the signal and said so. Until then the data
    is not there, however long the receiver takes to look: nothing here is a race.
    """

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.held: dict[tuple[int, int], Put] = {}

    def split(self, put: Put) -> tuple[Put, Put | None]:
        """Split a put into what goes at once and what is held back."""
        return put.alone(), put.part(0, put.nbytes)

    def change(self, put: Put) -> Iterable[Put]:
        before, later = self.held.pop((put.peer, put.signal), None), None
        if before is not None:
            yield before
        if put.nbytes and put.signal != NO_SIGNAL:
            key = put.peer, put.signal
            put, later = self.split(put)
            if later is not None:
                self.held[key] = later
        yield put

    def flush(self, timeout_s: float) -> bool:
        while self.held:
            self.inner.put(*self.held.popitem()[1])
        return self.inner.flush(timeout_s)


class Relayed(Session):
    """A session whose signals are raised in a pad of its own; a thread carries them over to the
    rank's pad. Nothing carries the abort word over."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        capacity = ctypes.c_uint32.from_address(pad + 8).value
        self.shadow = Memory(_transport.pad_bytes(capacity))
        _transport.pad_format(self.shadow.address, capacity)
        self.inner.start(self.shadow.address, cpus)
        self.thread = threading.Thread(target=self._run, args=(pad, capacity), daemon=True)
        self.thread.start()

    def _run(self, pad: int, capacity: int) -> None:
        seen = [0] * capacity
        while not self.stop.wait(0.0005):
            for index in range(capacity):
                count = _transport.pad_load(self.shadow.address, index)
                if count != seen[index]:
                    self.carry(pad, index, count - seen[index])
                    seen[index] = count

    def carry(self, pad: int, index: int, value: int) -> None:
        """Add what came in to the rank's own counter."""
        _transport.pad_add(pad, index, value)

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        self.inner.close()
