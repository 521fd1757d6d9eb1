"""A NIC session that is written in Python: threads of the host carry puts out, and take them in.

What every such session needs is here: the command FIFO and the thread that drains it, regions and their
bounds, counters, the first failure, closing. A subclass brings the network.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
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
"""How long its threads sleep at most before they look whether the session is closed."""
_POLL_S = 0.0005


class HostSession(NicSession):
    """One rank's session over a network that keeps order, reached by calls of Python.

    A subclass defines :meth:`address`, which says :meth:`expect`; :meth:`connect`; :meth:`send`;
    :meth:`disconnect`; and extends :meth:`start`, which spawns a thread for each peer that takes what
    comes from it: the bytes into :meth:`landing`, and only then :meth:`arrived`.

    Args:
        port: id of the port that it uses. settings: ``fifo_slots`` is read.
    """

    limits: ClassVar[NicCapabilities] = NicCapabilities(
        ordered=True,
        max_message_bytes=1 << 40,
        max_inline_bytes=0,
        immediate_data=True,
        max_sge=1,
        atomics=False,
        dmabuf=False,
    )
    """What :meth:`capabilities` says."""

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
        """Send a put; return when ``data`` may be overwritten. One call at a time, which may not wait
        for this rank's receiving threads. OSError: the peer is gone, or it took too long."""

    @abstractmethod
    def disconnect(self) -> None:
        """End every connection, so that no thread waits in one any more. Files are closed behind it, in
        ``close``, when no thread uses them."""

    # ---- what a subclass calls -----------------------------------------------------------------

    def expect(self, peer: int) -> None:
        """Puts will go to this peer; called by ``address``."""
        self._lanes[peer] = [0, 0]

    def spawn(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run a thread until the session is closed; what it raises is the session's failure."""

        def guarded() -> None:
            try:
                work(*arguments)
            except Exception as error:
                self.fail(-1, error)

        thread = Thread(guarded, name=f"mkernel-{type(self).__name__}")
        thread.start()
        self._threads.append(thread)

    def landing(self, region: int, offset: int, nbytes: int) -> memoryview:
        """Where an arriving put goes. ArgumentError: not into a region of this rank."""
        address, size = self._regions.get(region, (0, -1))
        if offset + nbytes > size:
            raise ArgumentError("put", f"{nbytes} bytes to {offset}", f"within region {region}")
        return memoryview((ctypes.c_char * nbytes).from_address(address + offset)).cast("B")

    def arrived(self, signal: int, value: int) -> None:
        """A put's bytes are all in memory: raise its signal, if it has one."""
        if signal != NO_SIGNAL:
            with self._counting:
                self._count["signals_raised"] += 1
            _transport.pad_add(self._pad, signal, value)

    def fail(self, peer: int, error: Exception) -> NicError:
        """Keep the first error, and end the waits of kernels. Any thread."""
        with self._counting:
            if self._failure is None and not self._closed:
                self._failure = NicError(f"rank {peer}: {error}", status="HOST", peer=peer)
                _transport.pad_abort(self._pad, _transport.AbortCode.nic_error)
            return self._failure or NicError("the session is closed", status="CLOSED", peer=peer)

    # ---- the contract --------------------------------------------------------------------------

    def capabilities(self) -> NicCapabilities:
        """:attr:`limits`."""
        return self.limits

    def register(self, region: int, address: int, nbytes: int) -> str:
        """Puts may come into these bytes, and leave from them."""
        self._regions[region] = address, nbytes
        return json.dumps(nbytes)

    def bind(self, region: int, peer: int, key: str) -> None:
        """Keep the size of the peer's part."""
        self._bound[region, peer] = int(json.loads(key))

    def deregister(self, region: int, timeout_s: float) -> None:
        """Refuse puts of the region from now on; return when those before are sent."""
        for peer in self._lanes:
            self._bound.pop((region, peer), None)
        if not self.flush(timeout_s):
            raise self._failure or Timeout(f"puts were still under way after {timeout_s:g} s")
        with self._sending:
            self._regions.pop(region, None)

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Drain the FIFO from now on."""
        self._pad = pad
        self.spawn(self._drain)

    @property
    def fifo(self) -> int:
        """Of kernels that push puts themselves."""
        return self._fifo.handle

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Send it at once, beside those that the FIFO has."""
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
        """True once the FIFO is empty and its last put is sent."""
        late = time.monotonic() + timeout_s
        while self._failure is None and self._fifo.depth:
            if time.monotonic() > late:
                return False
            time.sleep(_POLL_S)
        return self._failure is None

    def statistics(self) -> NicStatistics:
        """Counters so far."""
        lanes = (LaneStatistics(to, self._port, *sent) for to, sent in self._lanes.items())
        return NicStatistics(
            **self._count,
            queue_depth=self._fifo.depth,
            stalls=0,
            host_regions=len(self._regions),
            lanes=tuple(lanes),
        )

    def failure(self) -> NicError | None:
        """The first error."""
        return self._failure

    def close(self) -> None:
        """Disconnect, and join every thread. Timeout: one goes on."""
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
        """Carry out what kernels push. After an abort nothing more is put."""
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
        """The bytes of a put. ArgumentError: it would leave what is bound."""
        address, size = self._regions.get(region, (0, -1))
        there = self._bound.get((region, peer), -1)
        if min(local, remote, nbytes) < 0 or local + nbytes > size or remote + nbytes > there:
            asked = f"{nbytes} bytes from {local} to {remote} of rank {peer}"
            legal = f"within region {region}: {size} bytes here, {there} there"
            raise ArgumentError("put", asked, legal)
        return memoryview((ctypes.c_char * nbytes).from_address(address + local)).cast("B")
