"""The worker thread that runs calls, so that the world can wait in slices and notice aborts.

A message to a dead or absent peer blocks inside torch.distributed until that gives up. The world
learns of the failure first, through the abort word. A thread that is still stuck then is abandoned
(it ends at torch.distributed's deadline), and the next call gets a new one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mkernel import log
from mkernel.backends.accelerators.streams.call_streams import (
    AbortWord,
    Broken,
    CallStreams,
    Scratch,
    Stopped,
)
from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.accelerators.streams.window import Words
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.backends.contracts.instrumented import InstrumentedLaunch, LaunchTimes
from mkernel.backends.runtime.threads import Thread
from mkernel.backends.transport import _transport
from mkernel.errors import CapacityExceeded, MkernelError, ShapeError

Op = Callable[[Call, CallStreams], Mapping[str, Any]]
"""A function that runs one op on its streams and returns outputs whose sizes only the call
determined."""

_WORD_S = 3.0
"""Seconds to wait for news of a failure elsewhere, of which a lost connection is usually the
consequence."""
_LOOK_S = 0.02
_JOIN_S = 10.0
"""Seconds to wait for the thread to end; when it is joined it only has its own memory to free."""


class StreamsLaunch(Launch, InstrumentedLaunch):
    """A call on the worker's thread."""

    def __init__(
        self, call: Call, op: Op, device: Device, words: Words | None, abort: AbortWord
    ) -> None:
        self._words = words
        self._abort = abort
        self._call = call
        self._op = op
        self._device = device
        self._where = next(iter(call.tensors.values())).device
        # The worker's thread adopts these settings of the caller's thread.
        self._threads = torch.get_num_threads()
        self.inference = torch.is_inference_mode_enabled()
        self._stream = device.current(self._where) if device.has_streams else None
        self._queued = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._refused: MkernelError | None = None
        self._results: Mapping[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._lasts = False  # still runs on the device although the call has failed
        self.stuck = False

    def run(self, scratch: Scratch) -> None:
        """Run the whole call on the worker's thread. Never raises."""
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            context: Any = contextlib.nullcontext()
            if self._stream is not None:
                context = self._device.on(self._stream)
            with torch.inference_mode(self.inference), torch.no_grad(), context:
                streams = CallStreams(
                    self._call,
                    self._device,
                    self._where,
                    scratch,
                    self._abort,
                    words=self._words,
                )
                try:
                    with streams.shared_cores():
                        self._results = self._op(self._call, streams)
                        streams.finish()
                        self._queued.set()
                        streams.host_waits()
                except (CapacityExceeded, ShapeError):
                    raise
                except BaseException:
                    self._queued.set()
                    self._lasts = not streams.abandon()
                    raise
                self._seconds = streams.seconds()
        except Stopped:
            scratch.drop()
            self._device.release(self._call.group)
        except Broken as broken:
            scratch.drop()
            self._tell(broken)
            self._device.release(self._call.group)
        except (CapacityExceeded, ShapeError) as error:
            scratch.drop()
            self._refused = error
        except BaseException as error:
            scratch.drop()
            self._error = error
        finally:
            self._queued.set()
            self._ended.set()

    def _tell(self, broken: Broken) -> None:
        code = _transport.AbortCode.timeout
        if not broken.timed_out:
            code = _transport.AbortCode.peer_failure
            deadline = time.monotonic() + _WORD_S
            while time.monotonic() < deadline:
                if self._abort.is_set():
                    return
                time.sleep(_LOOK_S)
            # The world's error is the same on every rank; the library's message goes beside it.
            log.warn(__name__, f"torch.distributed: {broken.__cause__}")
        who = _transport.Diagnosis()
        who.waiter = _transport.Waiter.comm_kernel
        who.op = self._call.number & 0xFFFFFFFF
        who.chunk = broken.chunk
        who.peer = broken.peer
        who.seen, who.wanted = self._call.epoch - 1, self._call.epoch
        self._abort.set(code, who)

    # ---- the world's side --------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Return True once the call has ended or was aborted. Raises what the op's own work raised."""
        if self._ended.wait(timeout_s):
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # or it and this frame would hold each other
            return True
        self.stuck = self._abort.is_set()
        return self.stuck

    def until_queued(self) -> None:
        """Return once the whole call is on the device's streams, so that work the caller puts on
        its stream comes after it; at once if the call has failed."""
        deadline = time.monotonic() + self._call.timeout_s
        while not self._queued.wait(_LOOK_S) and time.monotonic() < deadline:
            if self._abort.is_set():
                return

    def ended(self, timeout_s: float) -> bool:
        """Return whether worker and device have finished the call, successfully or not."""
        return self._ended.wait(timeout_s) and not self._lasts

    def times(self) -> LaunchTimes:
        """Return the seconds of ``comm`` (first message posted to last one complete) and
        ``compute``."""
        return LaunchTimes({"comm": 0.0, "compute": 0.0, **self._seconds})

    def results(self) -> Mapping[str, Any]:
        """Return what the op returned. CapacityExceeded, ShapeError: the op found that the routing
        has another size."""
        refused, self._refused = self._refused, None
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # or it and this frame would hold each other
        return self._results


class Worker:
    """One thread that runs launches in order; it is replaced if a launch is stuck."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[StreamsLaunch | None] | None = None
        self._thread: Thread | None = None
        self._latest: StreamsLaunch | None = None

    def start(
        self, call: Call, op: Op, device: Device, words: Words | None, abort: AbortWord
    ) -> StreamsLaunch:
        """Run a call after those before it, but not after one that is stuck. ``words``: those of a
        call whose workspace is a window."""
        launch = StreamsLaunch(call, op, device, words, abort)
        if self._queue is None or (self._latest is not None and self._latest.stuck):
            launches: queue.SimpleQueue[StreamsLaunch | None] = queue.SimpleQueue()
            thread = Thread(_serve, launches, name="mkernel-streams")
            try:
                thread.start()  # RuntimeError: the process can have no more threads
                self._queue, self._thread = launches, thread
            except BaseException:  # an interrupt too, when it may run already: there is none here
                launches.put(None)
                self._queue = self._thread = None
                raise
        self._latest = launch
        self._queue.put(launch)
        return launch

    def idle(self, timeout_s: float) -> bool:
        """Return whether nothing runs on the thread; False at the deadline."""
        return self._latest is None or self._latest.ended(timeout_s)

    def stop(self) -> None:
        """End the thread after the launches that it has. ``start`` makes another one.

        Waits for the thread if nothing runs on it: a thread that frees tensors while the
        interpreter ends crashes the process.
        """
        if self._queue is None or self._thread is None:
            return
        self._queue.put(None)
        if self.idle(0):
            self._thread.join(_JOIN_S)
            self._latest = None  # which has the tensors of its call
        self._queue = self._thread = None


def _serve(launches: queue.SimpleQueue[StreamsLaunch | None]) -> None:
    # Inference tensors must not be written outside of inference mode, so each mode has its own.
    scratch = {mode: Scratch() for mode in (False, True)}
    while (launch := launches.get()) is not None:
        launch.run(scratch[launch.inference])
