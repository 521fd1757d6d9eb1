"""The streams of one call: messages between ranks on one, matrix work on the other.

Messages are point-to-point ones of torch.distributed, posted in the same order on every rank, so
each wait is for one known peer; or they are puts into windows that peers map (``window.py``). If
the device has streams, the communication stream is separate, and events order the streams; the host
waits for nothing between chunks. On a CPU the messages travel in torch.distributed's own threads,
and a wait blocks the caller's worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
from torch import distributed

from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.accelerators.streams.schedule import GatherSchedule, StreamsSchedule, landings
from mkernel.backends.accelerators.streams.window import Window, Words
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.transport import _transport


class AbortWord:
    """A thread-safe view of the abort word, for the threads that run calls. ``pad``: address of the
    rank's signal pad.

    On a CPU a thread that is blocked in a message to a dead peer outlives its world, but the word lies
    in the world's memory. So nobody may read or write the word once the world has released that memory.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad
        self._lock = threading.Lock()
        self._gone = False

    def is_set(self) -> bool:
        """Return whether the world has ended its calls."""
        with self._lock:
            return self._gone or _transport.pad_aborted(self._pad)

    def set(self, code: _transport.AbortCode, who: _transport.Diagnosis) -> None:
        """Record a failure, unless there is one already or the world has ended."""
        with self._lock:
            if not self._gone:
                _transport.pad_abort(self._pad, code, who)

    def let_go(self) -> None:
        """Stop all use of the pad, which may be unmapped when this returns."""
        with self._lock:
            self._gone = True


class Scratch:
    """One worker thread's buffers, reused from one call to the next. Calls run one after another, so
    each name has one user at a time.

    On a CPU every fresh page costs a fault: 12 MB fresh took 5.8 ms to fill on the machine of
    ``bench/results/streams.json``, and 0.2 ms when reused. Devices with streams use torch's caching
    allocator, which also knows what other streams still use.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, where: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised, contiguous buffer, valid until the call ends. It must not reach
        users."""
        if where.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=where)
        nbytes = prod(shape) * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._kept[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(dtype).view(tuple(shape))

    def drop(self) -> None:
        """Release all buffers, because messages of a call that failed may still write to them."""
        self._kept.clear()


Parcel = tuple[int, torch.Tensor]
"""(peer, contiguous tensor): the tensor that receives the peer's data."""


class Sent(NamedTuple):
    """A contiguous tensor for a peer, and its destination there: the place that ``landing`` has in
    this rank's own memory. The destination counts only for tensors from ``CallStreams.landing``;
    None: it lies elsewhere."""

    peer: int
    tensor: torch.Tensor
    landing: torch.Tensor | None


NO_CHUNK = 0xFFFFFFFF
_POLL_S = 0.0005


class Broken(Exception):
    """The error that torch.distributed gave up on a message. ``timed_out`` False: the connection
    was lost."""

    def __init__(self, peer: int, chunk: int, *, timed_out: bool) -> None:
        self.peer = peer
        self.chunk = chunk
        self.timed_out = timed_out
        super().__init__(peer, chunk)


class Stopped(Exception):
    """The error that the call's abort word is set; the reason is recorded with the word."""


@dataclass
class Message:
    """Tensors that were posted together. ``peer``: the first one that sends some, or the first
    receiver if none sends; ``target``: the first one that receives some. ``works``: (peer, is it a
    receive, handle)."""

    peer: int
    target: int
    chunk: int
    works: list[tuple[int, bool, Any]] = field(default_factory=list)
    arrived: Any = None  # event
    sent: Any = None  # event, where it is another one
    tensors: list[torch.Tensor] = field(default_factory=list)

    def waits_for(self) -> int | None:
        """Return the peer that the message still waits for, on a device with streams; None: it is
        complete."""
        for event, peer in ((self.arrived, self.peer), (self.sent, self.target)):
            if event is not None and not event.query():
                return peer
        return None


class CallStreams:
    """The streams of one call on one rank. Everything that a message touches lives as long as this
    object.

    Attributes:
        in_flight: number of independent products that run side by side.
        one_sided: messages are puts.
        communicates: False if the view is compute-only: other ranks' data counts as present.
            sequential: True if the streams must take turns.
    """

    def __init__(
        self,
        call: Call,
        device: Device,
        where: torch.device,
        scratch: Scratch,
        abort: AbortWord,
        *,
        words: Words | None = None,
    ) -> None:
        """Set up the streams. ``words``: those of a workspace that is a window; None if it is not."""
        self.rank = call.rank
        self.communicates = call.view != "compute_only"
        self.sequential = call.view == "sequential"
        self.overlaps = device.has_streams and not self.sequential
        self._call = call
        self._abort = abort
        self._device = device
        self._where = where
        self._scratch = scratch
        self._deadline = time.monotonic() + call.timeout_s
        # Timing events on a queue delay the work after them.
        self._timed = call.timed or not device.queues
        self._most = timedelta(seconds=call.timeout_s)  # for one message; the group may have more
        self._messages: list[Message] = []
        self._spans: list[tuple[Any, Any]] = []  # of compute: clock readings or events
        self._first: Any = None
        self._ends: list[Any] = []  # of messages: clock readings or events
        self._compute = device.current(where) if device.has_streams else None
        self._comm = device.stream(where) if device.has_streams else None
        how = call.plan.part(StreamsSchedule)
        self._comm_share = how.comm_share
        side_by_side = how.products_in_flight if isinstance(how, GatherSchedule) else 1
        self.in_flight = 1 if self.sequential else side_by_side
        self._window: Window | None = None
        self._arrivals: Any = None
        if words is not None and self.communicates:
            self._window = Window(call, words)
            self._arrivals = device.stream(where)  # a wait for a peer must not hold up puts
            self._window.open(self._arrivals)
        self.one_sided = self._window is not None
        self._beside: list[Any] = []  # streams for products beside the compute stream
        self._turn = 0

    def shared_cores(self) -> AbstractContextManager[None]:
        """Return a context in which neither stream's kernels keep the other's from running. All
        work that was put on the streams must have ended when the context is left."""
        if not (self.overlaps and self.communicates):
            return nullcontext()
        return self._device.shared(self._where, self._compute, self._comm, self._comm_share)

    # ---- communication -----------------------------------------------------------------------

    def landing(self, name: str) -> torch.Tensor:
        """Return an uninitialised buffer of this call that peers send to, [source, rows, columns].
        ``landing.landings`` lists the names."""
        if self._window is not None:
            return self._window.landing(name)
        _, shape, dtype = landings(self._call.plan)[name]
        return self.scratch(name, shape, getattr(torch, dtype))

    def post(self, sends: Sequence[Sent], receives: Sequence[Parcel], chunk: int = 0) -> Message:
        """Start messages, after all compute that was put on its stream before, and return at once.

        Empty tensors are left out, so both ends must agree on which are empty. Raises Stopped.
        """
        self._stop_where_aborted()
        sends = [sent for sent in sends if sent.tensor.numel()]
        receives = [parcel for parcel in receives if parcel[1].numel()]
        told = [(peer, True, tensor) for peer, tensor in receives]
        told += [(peer, False, tensor) for peer, tensor, _ in sends]
        if not told:
            return Message(self.rank, self.rank, chunk)
        target = sends[0].peer if sends else told[0][0]
        message = Message(told[0][0], target, chunk, tensors=[tensor for *_, tensor in told])
        self._messages.append(message)
        if self._comm is None:
            self._first = self._first or time.perf_counter()
            message.works = [
                (peer, is_receive, self._single(peer, is_receive, tensor, chunk))
                for peer, is_receive, tensor in told
            ]
            return message
        self._comm.wait_stream(self._compute)
        with self._device.on(self._comm):
            if self._timed and self._first is None:
                self._first = self._mark(self._comm)
            if self._window is None:
                self._batch(told, chunk)
                message.arrived = self._mark(self._comm)
            else:
                self._put(message, self._window, sends, receives)
        self._ends += [end for end in (message.arrived, message.sent) if end is not None]
        return message

    def _put(
        self, message: Message, window: Window, sends: Sequence[Sent], receives: Sequence[Parcel]
    ) -> None:
        for peer, tensor, landing in sends:
            assert landing is not None  # otherwise one end puts while the other waits for a message
            window.put(peer, tensor, landing, self._comm)
        message.sent = self._mark(self._comm)
        for peer, _ in receives:
            window.arrive(peer, self._arrivals)
        message.arrived = self._mark(self._arrivals)

    def hold(self, cycles: int) -> None:
        """Hold compute back for ``cycles`` clock cycles, so that the posted messages start first: a
        block of a product, once started, is not preempted."""
        if cycles and self.overlaps and self._messages:
            self._device.hold(self._compute, cycles)

    def wait(self, message: Message) -> None:
        """Make the message's data visible to compute that is put on its stream from now on. Raises
        Broken."""
        if self._compute is not None and message.arrived is not None:
            self._compute.wait_event(message.arrived)
        self._finish(message, receives=True)

    def finish(self) -> None:
        """Wait until everything posted has arrived and has been sent. Raises Broken."""
        if self._compute is not None:
            for stream in self._beside:
                self._compute.wait_stream(stream)
        for message in self._messages:
            self.wait(message)
            if self._compute is not None and message.sent is not None:
                self._compute.wait_event(message.sent)
            self._finish(message, receives=False)

    def host_waits(self) -> None:
        """Block the host until the work on the compute stream is done. Raises Stopped; Broken past
        the deadline."""
        if self._compute is None:
            return
        done, start = self._mark(self._compute), time.monotonic()
        while not done.query():
            self._stop_where_aborted()
            now = time.monotonic()
            if now > self._deadline:
                late = ((one.waits_for(), one.chunk) for one in self._messages)
                missing = ((peer, chunk) for peer, chunk in late if peer is not None)
                raise Broken(*next(missing, (self.rank, NO_CHUNK)), timed_out=True)
            time.sleep(min(_POLL_S, (now - start) / 50))  # a short wait must not become longer

    def abandon(self) -> bool:
        """End waits on the device for silent peers, after the call has failed. Returns True once
        the call's window may be freed. Messages of torch.distributed are ended by
        ``Device.release``."""
        if self._window is None:
            return True
        return self._window.abandon((self._comm, self._arrivals, self._compute, *self._beside))

    def _stop_where_aborted(self) -> None:
        if self._abort.is_set():
            raise Stopped

    def _single(self, peer: int, is_receive: bool, tensor: torch.Tensor, chunk: int) -> Any:
        group = self._call.group
        try:
            if is_receive:
                return distributed.irecv(tensor, group=group, group_src=peer)
            return distributed.isend(tensor, group=group, group_dst=peer)
        except RuntimeError as error:
            raise Broken(peer, chunk, timed_out=_timed_out(error)) from error

    def _batch(self, told: Sequence[tuple[int, bool, torch.Tensor]], chunk: int) -> None:
        """Post messages together, as libraries require that run messages as kernels: one alone
        would wait for ever. The communication stream waits for them, not the host."""
        operations = [
            distributed.P2POp(
                distributed.irecv if is_receive else distributed.isend,
                tensor,
                group=self._call.group,
                group_peer=peer,
            )
            for peer, is_receive, tensor in told
        ]
        try:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            raise Broken(told[0][0], chunk, timed_out=_timed_out(error)) from error

    def _finish(self, message: Message, *, receives: bool) -> None:
        for peer, is_receive, work in message.works:
            if is_receive != receives:
                continue
            try:
                work.wait(self._most)
            except RuntimeError as error:
                raise Broken(peer, message.chunk, timed_out=_timed_out(error)) from error
            self._ends.append(time.perf_counter())
        message.works = [entry for entry in message.works if entry[1] != receives]

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer of this call, on its device; one per name."""
        return self._scratch.take(name, shape, dtype, self._where)

    # ---- compute -----------------------------------------------------------------------------

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Count the work inside as compute in ``seconds``."""
        with self._span(self._compute):
            yield

    @contextmanager
    def product(self, message: Message | None = None) -> Iterator[None]:
        """Run a product that needs only data present before the first product, and the data of
        ``message``. Products run side by side if the device has room for more than one. Raises
        Broken."""
        if self.in_flight == 1:
            if message is not None:
                self.wait(message)
            with self.compute():
                yield
            return
        if not self._beside:
            self._beside = [self._device.stream(self._where) for _ in range(self.in_flight - 1)]
            for stream in self._beside:
                stream.wait_stream(self._compute)
        stream = (self._compute, *self._beside)[self._turn % self.in_flight]
        self._turn += 1
        if message is not None and message.arrived is not None:
            stream.wait_event(message.arrived)
        with self._device.on(stream), self._span(stream):
            yield

    @contextmanager
    def _span(self, stream: Any) -> Iterator[None]:
        if not self._timed:
            yield
            return
        start = self._now(stream)
        yield
        self._spans.append((start, self._now(stream)))

    def _now(self, stream: Any) -> Any:
        """Return a clock reading, or an event on the stream if there is one."""
        return time.perf_counter() if stream is None else self._mark(stream)

    def _mark(self, stream: Any) -> Any:
        event = self._device.event(timed=self._timed)
        event.record(stream)
        return event

    def seconds(self) -> dict[str, float]:
        """Return the seconds of ``compute``, in which compute ran, and of ``comm``, from the first
        message posted to the last one complete. The two overlap in a pipelined view. Valid only
        after the call has ended; empty if it was not timed."""
        if not self._timed:
            return {}
        messages = [(self._first, end) for end in self._ends]
        return {"comm": self._covered(messages), "compute": self._covered(self._spans)}

    def _covered(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Return the seconds that lie in any of the spans, which follow one another or overlap."""
        if not spans:
            return 0.0
        first = spans[0][0]
        if self._compute is None:
            inside = [(start - first, end - first) for start, end in spans]
        else:
            inside = [
                (first.elapsed_time(start) * 1e-3, first.elapsed_time(end) * 1e-3)
                for start, end in spans
            ]
        covered, until = 0.0, float("-inf")
        for start, end in sorted(inside):
            covered += max(0.0, end - max(start, until))
            until = max(until, end)
        return covered


def _timed_out(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower()
