"""Base of NIC sessions written in Python, in which threads of the host send and receive puts.

It has everything that such sessions share: the command FIFO and the thread that drains it, regions
and their bounds, counters, the first failure, closing. A subclass adds the network.
"""

from __future__ import annotations

import ctypes
import json
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from mkernel.backends.contracts.nic import (
    NO_SIGNAL,
    SELF,
    LaneStatistics,
    NicCapabilities,
    NicSession,
    NicStatistics,
)
from mkernel.backends.runtime import threads
from mkernel.backends.runtime.threads import Thread
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, MkernelError, NicError, Timeout
from mkernel.settings import NicSettings

_SLICE_S = 0.02
"""Longest time in seconds that a thread sleeps before it checks whether the session is closed."""
_POLL_S = 0.0005


class HostSession(NicSession):
    """One rank's session over a network that keeps order and that Python calls can reach.

    A subclass defines :meth:`address`, which calls :meth:`expect`; :meth:`connect`; :meth:`send`;
    and :meth:`disconnect`. It extends :meth:`start` to spawn a thread for each peer, which receives
    that peer's puts: first the bytes into :meth:`landing`, only then :meth:`arrived`.

    Args:
        port: id of the port that the session uses. settings: ``fifo_slots`` is read.
    """

    limits: ClassVar[NicCapabilities] = NicCapabilities(ordered=True, dmabuf=False)
    """The result of :meth:`capabilities`."""

    def __init__(self, port: str, settings: NicSettings) -> None:
        self._port = port
        self._fifo = _transport.Fifo(settings.fifo_slots)
        self._pad = 0
        self._regions: dict[int, tuple[int, int]] = {}
        self._bound: dict[tuple[int, int], int] = {}
        self._lanes: dict[int, list[int]] = {}
        self._count = dict.fromkeys(("puts", "put_bytes", "signals_sent", "signals_raised"), 0)
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._threads: list[Thread] = []
        self._failure: NicError | None = None
        self._closed = False

    # ---- what a subclass brings ----------------------------------------------------------------

    @abstractmethod
    def send(
        self, peer: int, region: int, offset: int, data: memoryview, signal: int, value: int
    ) -> None:
        """Send a put; return when ``data`` may be overwritten. Only one call runs at a time, and it
        may not wait for this rank's receiving threads. OSError: the peer is gone, or sending took
        too long."""

    @abstractmethod
    def disconnect(self) -> None:
        """End every connection, so that no thread waits in one any more. Files are closed later, in
        ``close``, when no thread uses them."""

    # ---- what a subclass calls -----------------------------------------------------------------

    def expect(self, peer: int) -> None:
        """Announce that puts will go to this peer; called by ``address``."""
        self._lanes[peer] = [0, 0]

    def spawn(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run a thread until the session is closed; an exception in it becomes the session's
        failure."""

        def guarded() -> None:
            try:
                work(*arguments)
            except Exception as error:
                self.fail(-1, error)

        thread = Thread(guarded, name=f"mkernel-{type(self).__name__}")
        thread.start()
        self._threads.append(thread)

    def landing(self, region: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory that an arriving put goes to. ArgumentError: it is outside this rank's
        regions."""
        address, size = self._regions.get(region, (0, -1))
        if offset + nbytes > size:
            raise ArgumentError("put", f"{nbytes} bytes to {offset}", f"within region {region}")
        return memoryview((ctypes.c_char * nbytes).from_address(address + offset)).cast("B")

    def arrived(self, signal: int, value: int) -> None:
        """Raise the put's signal, if it has one. To be called once all its bytes are in memory."""
        if signal != NO_SIGNAL:
            with self._counting:
                self._count["signals_raised"] += 1
            _transport.pad_add(self._pad, signal, value)

    def fail(self, peer: int, error: Exception) -> NicError:
        """Keep the first error and end the waits of kernels. May be called from any thread."""
        with self._counting:
            if self._failure is None and not self._closed:
                self._failure = NicError(f"rank {peer}: {error}", status="HOST", peer=peer)
                _transport.pad_abort(self._pad, _transport.AbortCode.nic_error)
            return self._failure or NicError("the session is closed", status="CLOSED", peer=peer)

    # ---- the contract --------------------------------------------------------------------------

    def capabilities(self) -> NicCapabilities:
        """Return :attr:`limits`."""
        return self.limits

    def register(self, region: int, address: int, nbytes: int) -> str:
        """Allow puts to write these bytes and to read from them."""
        self._regions[region] = address, nbytes
        return json.dumps(nbytes)

    def bind(self, region: int, peer: int, key: str) -> None:
        """Keep the size of the peer's part of the region."""
        self._bound[region, peer] = int(json.loads(key))

    def deregister(self, region: int, timeout_s: float) -> None:
        """Refuse puts of the region from now on; return when earlier ones are sent."""
        for peer in self._lanes:
            self._bound.pop((region, peer), None)
        if not self.flush(timeout_s):
            raise self._failure or Timeout(f"puts were still under way after {timeout_s:g} s")
        with self._sending:
            self._regions.pop(region, None)

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Start to drain the FIFO."""
        self._pad = pad
        self.spawn(self._drain)

    @property
    def fifo(self) -> int:
        """The FIFO's handle, for kernels that push puts themselves."""
        return self._fifo.handle

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Send a put at once, independently of those that are in the FIFO."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise MkernelError("this session is closed; open a new one")
        if peer == SELF:  # a completion: what was sent before may be overwritten
            _transport.pad_add(self._pad, signal, value)
            return
        with self._sending:
            data = self._source(peer, region, local, remote, nbytes)
            try:
                self.send(peer, region, remote, data, signal, value)
            except OSError as error:
                raise self.fail(peer, error) from error
            self._lanes[peer][:] = self._lanes[peer][0] + 1, self._lanes[peer][1] + nbytes
            self._count["puts"] += 1
            self._count["put_bytes"] += nbytes
            self._count["signals_sent"] += signal != NO_SIGNAL

    def flush(self, timeout_s: float) -> bool:
        """Return True once the FIFO is empty and its last put is sent."""
        late = time.monotonic() + timeout_s
        while self._failure is None and self._fifo.depth:
            if time.monotonic() > late:
                return False
            time.sleep(_POLL_S)
        return self._failure is None

    def statistics(self) -> NicStatistics:
        """Return the counters so far."""
        lanes = (LaneStatistics(to, self._port, *sent) for to, sent in self._lanes.items())
        return NicStatistics(
            **self._count,
            queue_depth=self._fifo.depth,
            stalls=0,
            host_regions=len(self._regions),
            lanes=tuple(lanes),
        )

    def failure(self) -> NicError | None:
        """Return the first error."""
        return self._failure

    def close(self) -> None:
        """Disconnect, and join every thread. Timeout: a thread does not end."""
        self._closed = True
        self.disconnect()
        kind = type(self).__name__
        threads.end(
            self._threads,
            f"The NIC session on port {self._port!r} keeps its connections, and that thread may write "
            f"to regions {sorted(self._regions)}: end the process. {kind}.disconnect has to end every "
            f"wait of the threads that {kind} spawns",
        )

    def _drain(self) -> None:
        """Carry out the commands that kernels push. Nothing is put after an abort."""
        while not self._closed and not _transport.pad_aborted(self._pad):
            command = self._fifo.pop(_SLICE_S)
            if command is None:
                continue
            try:
                self.put(*command)
            except MkernelError as error:
                self.fail(command[0], error)
                return
            self._fifo.release()

    def _source(self, peer: int, region: int, local: int, remote: int, nbytes: int) -> memoryview:
        """Return the bytes of a put. ArgumentError: the put exceeds the bound regions."""
        address, size = self._regions.get(region, (0, -1))
        there = self._bound.get((region, peer), -1)
        if min(local, remote, nbytes) < 0 or local + nbytes > size or remote + nbytes > there:
            asked = f"{nbytes} bytes from {local} to {remote} of rank {peer}"
            legal = f"within region {region}: {size} bytes here, {there} there"
            raise ArgumentError("put", asked, legal)
        return memoryview((ctypes.c_char * nbytes).from_address(address + local)).cast("B")


def read_into(connection: socket.socket, target: bytearray | memoryview) -> bool:
    """Fill ``target`` from a connection; return False where the peer is gone or has closed."""
    view = memoryview(target).cast("B")
    with suppress(OSError):
        while view:
            got = connection.recv_into(view)
            if not got:
                return False
            view = view[got:]
        return True
    return False
