"""Sessions that break a promise with a thread, a ring or a memory of their own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import ClassVar

from mkernel.backends.contracts.nic import NO_SIGNAL, SELF, NicSession
from mkernel.backends.transport import _transport
from mkernel.conformance.nic_faults.wrappers import DataLater, Put, Session
from mkernel.errors import MkernelError
from mkernel.harness.nic_ranks import Memory


class SignalFirstAtTimes(DataLater):
    """The signal goes out before the data, once in 100 puts that carry data."""

    def split(self, put: Put) -> tuple[Put, Put | None]:
        return super().split(put) if next(self.number) % 100 == 0 else (put, None)


class SignalBeforeTail(DataLater):
    """The last 16 bytes travel after the signal."""

    def split(self, put: Put) -> tuple[Put, Put | None]:
        head = put.nbytes - 16
        return (put._replace(nbytes=head), put.part(head, 16)) if head > 0 else (put, None)


class SequenceWraps(Session):
    """Every 4096th put on a signal is taken for a repetition."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.counts: Counter[tuple[int, int]] = Counter()

    def change(self, put: Put) -> Iterable[Put]:
        self.counts[put.peer, put.signal] += 1
        return [put] if self.counts[put.peer, put.signal] % 4096 else []


class CompletesAtOnce(Session):
    """A completion is raised when it is queued, whatever is under way."""

    pad = 0

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        self.pad = pad
        self.inner.start(pad, cpus)

    def change(self, put: Put) -> Iterable[Put]:
        if put.peer != SELF:
            return [put]
        _transport.pad_add(self.pad, put.signal, put.value)
        return []


class DropsSilently(Session):
    """Drops puts that reach outside of a region: they are neither written nor refused."""

    def change(self, put: Put) -> Iterable[Put]:
        _, size = self.regions.get(put.region, (0, 0))
        fits = max(put.local, put.remote) + put.nbytes <= size and put.peer < 7
        return [put] if fits else []


class DeadFifo(Session):
    """The FIFO's handle names a ring that nobody drains."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.handle = (ctypes.c_uint64 * 7)()
        ctypes.memmove(self.handle, inner.fifo, 56)
        self.ring = Memory(64 * self.handle[5])
        self.handle[0] = self.ring.address

    @property
    def fifo(self) -> int:
        return ctypes.addressof(self.handle)


class Reorders(Session):
    """Holds a put back until the next one is out, and then until the sender makes a third, which it
    does when the receiver has looked."""

    held: Put | None = None
    overtaken = False

    def change(self, put: Put) -> Iterable[Put]:
        if self.overtaken:
            yield from self.release()
        if self.held is None and (put.signal == NO_SIGNAL or put.signal % 2 == 1):
            self.held = put
            return
        yield put
        self.overtaken = self.held is not None

    def release(self) -> Iterable[Put]:
        """Return what is held back, and hold it no longer."""
        held, self.held, self.overtaken = self.held, None, False
        return [] if held is None else [held]

    def flush(self, timeout_s: float) -> bool:
        for put in self.release():
            self.inner.put(*put)
        return self.inner.flush(timeout_s)


class FlushAtOnce(Session):
    """Flush returns True while puts have yet to read their source: each waits for that to change, or
    for a second."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.queue: queue.SimpleQueue[tuple[Put, bytes, float] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def change(self, put: Put) -> Iterable[Put]:
        self.queue.put((put, self._source(put), time.monotonic() + 1))
        return []

    def _source(self, put: Put) -> bytes:
        """Return the first bytes that a put reads, as they are now."""
        address, _ = self.regions[put.region]
        return ctypes.string_at(address + put.local, min(put.nbytes, 64))

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


class SlowClose(Session):
    """Close waits a while for the network, the first time."""

    wait_s = 4.5

    def close(self) -> None:
        time.sleep(self.wait_s)
        self.wait_s = 0.0
        self.inner.close()


class CloseLater(Session):
    """Close returns while the NIC still works: it repeats the latest put again and again, until the
    process ends."""

    latest: Put | None = None
    thread: threading.Thread | None = None

    def change(self, put: Put) -> Iterable[Put]:
        if self.thread is not None:
            raise MkernelError("the session is closed")
        self.latest = put
        return [put]

    def close(self) -> None:
        if self.thread is None:
            self.stop = threading.Event()
            self.thread = threading.Thread(target=self._go_on, name="close-later", daemon=True)
            self.thread.start()
            # Finalizers with a priority run before anything of the process is taken down; no other
            # thread may put then.
            Finalize(self, self._end, exitpriority=100)

    def _go_on(self) -> None:
        # Its own failures are nobody's business: the peer ends whenever it is done.
        with contextlib.suppress(MkernelError):
            while self.latest is not None and self.inner.failure() is None:
                self.inner.put(*self.latest)
                if self.stop.wait(0.01):
                    break
        self.inner.close()

    def _end(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()


class LeaksMemory(Session):
    """Each session leaves shared memory mapped."""

    kept: ClassVar[list[Memory]] = []

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.kept.append(Memory(4096))


class BusyLoop(Session):
    """The session polls without a pause."""

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


class TakesStrangers(Session):
    """Takes puts at a door whose place every address tells, and never asks for the key beside it."""

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.door.bind("")  # a name of the system's choice
        self.key = secrets.token_hex(16)
        self.doors: dict[int, bytes] = {}
        self.keeper = threading.Thread(target=self._keep, daemon=True)

    def address(self, peer: int) -> str:
        told = {"inner": self.inner.address(peer), "key": self.key}
        return json.dumps({**told, "door": self.door.getsockname().hex()})

    def connect(self, peer: int, address: str) -> None:
        told = json.loads(address)
        self.doors[peer] = bytes.fromhex(told["door"])
        with contextlib.suppress(MkernelError):
            self.inner.connect(peer, told["inner"])

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        self.pad = pad
        self.inner.start(pad, cpus)
        self.keeper.start()

    def change(self, put: Put) -> Iterable[Put]:
        data = ctypes.string_at(self.regions[put.region][0] + put.local, put.nbytes)
        head = struct.pack("4Q", put.region, put.remote, put.signal, put.value)
        self.door.sendto(head + data, self.doors[put.peer])
        return []

    def _keep(self) -> None:
        while text := self.door.recv(1 << 17):
            region, remote, signal, value = struct.unpack_from("4Q", text)
            data = text[struct.calcsize("4Q") :]
            ctypes.memmove(self.regions[region][0] + remote, data, len(data))
            _transport.pad_add(self.pad, signal, value)

    def close(self) -> None:
        if self.keeper.is_alive():
            self.door.sendto(b"", self.door.getsockname())
            self.keeper.join()
        self.door.close()
        self.inner.close()
