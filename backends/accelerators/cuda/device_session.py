"""One rank's session on its device: the world's memory, and its calls on torch's current stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.dispatch import Executor
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.output_pool import OutputPool
from mkernel.backends.accelerators.cuda.pinned import PinnedMemory
from mkernel.backends.accelerators.cuda.prefetch import prefetched_bytes
from mkernel.backends.accelerators.cuda.settings import CudaSettings
from mkernel.backends.accelerators.cuda.starters import STARTED, SUMMED
from mkernel.backends.contracts.accelerator import Again, Call, Launch
from mkernel.backends.contracts.instrumented import InstrumentedLaunch, LaunchTimes
from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.runtime.threads import Thread
from mkernel.errors import ArgumentError, BackendUnavailable, CapacityExceeded
from mkernel.plan.model import LaunchPlan
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.settings import load_as
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

_FIRST_EPOCH = 1
_LONGEST_PAUSE_S = 0.001
_ALREADY = nullcontext()


class DeviceLaunch(Launch, InstrumentedLaunch):
    """A call that is queued on a stream."""

    def __init__(
        self,
        order: _kernels.CallOrder,
        number: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        again: Callable[[], Again | None] = lambda: None,
        results: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a queued call. ``number``: its number in ``order``. ``events``: those before and
        after it, if it is timed. ``again``: the implementation of :meth:`again`. ``results``:
        outputs whose sizes only the call determined."""
        self._order = order
        self._number = number
        self._events = events
        self._again = again
        self._results = results or {}

    def wait(self, timeout_s: float) -> bool:
        """Return True once the device is past the call. RuntimeError if the device has failed."""
        return _await(self._order, self._number, timeout_s)

    def results(self) -> Mapping[str, Any]:
        """Return the outputs whose sizes only the call determined."""
        return self._results

    def again(self) -> Again | None:
        """Return the executor's starter."""
        return self._again()

    def times(self) -> LaunchTimes:
        """Return ``compute``, the time of the whole call on the device; communication runs inside
        it."""
        if self._events is None:
            return LaunchTimes()
        start, end = self._events
        return LaunchTimes({"comm": 0.0, "compute": start.elapsed_time(end) * 1e-3})


class StartedCalls(Launch):
    """All calls of a world that starters have queued, and those between them."""

    def __init__(self, order: Any) -> None:
        """Start with no calls. ``order``: the world's CallOrder."""
        self._order = order
        self._over = 0

    def wait(self, timeout_s: float) -> bool:
        """Return True once the device is past the last call. RuntimeError if the device has failed."""
        latest = self._order.latest
        if _await(self._order, latest, timeout_s):
            self._over = latest
            return True
        while self._over < latest and self._order.finished(self._over + 1):
            self._over += 1
        return False

    def calls_over(self) -> int:
        """Return the number of the last call that is known to have ended."""
        return self._over


def _await(order: _kernels.CallOrder, number: int, timeout_s: float) -> bool:
    """Return whether a call has ended, at the latest after ``timeout_s``."""
    if order.finished(number):
        return True
    if timeout_s <= 0:
        return False
    start = time.monotonic()
    while not order.finished(number):
        waited = time.monotonic() - start
        if waited >= timeout_s:
            return False
        time.sleep(min(_LONGEST_PAUSE_S, waited / 50))  # a short wait must not become longer
    return True


class Backend(Protocol):
    """The backend of a session's calls (:class:`.backend.CudaAccelerator`)."""

    devices: ClassVar[str]
    settings: ClassVar[type[CudaSettings]]

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        """Return whether its kernels run on devices of that compute capability."""

    @staticmethod
    def executor_of(plan: LaunchPlan) -> type[Executor]:
        """Return the executor of the plan's calls. Unsupported."""


class DeviceSession:
    """One rank's device session; it lives as long as the world."""

    def __init__(self, device: Accelerator, backend: Backend) -> None:
        """Choose the rank's device and make what the backend's calls need there. BackendUnavailable."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The topology counts the host's devices; a rank may see fewer, often just its own.
            torch.cuda.set_device(device.index % torch.cuda.device_count())
        index = torch.cuda.current_device()
        if not backend.runs_on(torch.cuda.get_device_capability(index)):
            raise BackendUnavailable(
                f"device {index} ({torch.cuda.get_device_name(index)}) is not of compute capability "
                f"{backend.devices}; choose another with torch.cuda.set_device before making the world"
            )
        torch.empty(1, device="cuda")  # torch's context first
        made = native()
        self.index = index
        self.control: _kernels.ControlBlock = made.ControlBlock()
        self._current = torch.cuda.device(index)  # entered around calls; made once
        self._order: _kernels.CallOrder = made.CallOrder(index)
        self._context = DispatchContext(
            index,
            self._order,
            self.control.address,
            load_as(backend.settings).multiprocessors,
            one=torch.ones((1, 1), device=f"cuda:{index}"),
        )
        self._calls: TwoGenerationCache[tuple[str, int], Executor] = (
            TwoGenerationCache()
        )  # by plan and workspace
        self._executor_of = backend.executor_of
        self._started = StartedCalls(self._order)
        self._used = False

    def close(self, timeout_s: float) -> bool:
        """Wait for the device. Returns False at the deadline: kernels of the world did not end."""
        if self._used and not self._drained(timeout_s):
            return False
        self._order.announce_to(0)
        if self._context.outputs is not None:
            self._context.outputs.close()
        self._context.network = None  # the NIC session may close
        return True

    @property
    def captured(self) -> bool:
        """Return whether a CUDA graph holds calls of the world. Nothing can be waited for while one
        is captured."""
        return self._order.captured and not torch.cuda.is_current_stream_capturing()

    def capture(self) -> int:
        """Return CUDA's number of the capture of torch's current stream; 0: there is none."""
        found: int = native().capture_of(torch._C._cuda_getCurrentRawStream(self.index))
        return found

    def await_device(self) -> threading.Event:
        """Return an event that is set once the device is past all work queued so far."""
        # No CUDA call waits with a deadline; after the deadline the thread is abandoned and waits
        # on.
        over = threading.Event()
        Thread(_synchronize, self.index, over, name="mkernel-drain").start()
        return over

    def _drained(self, timeout_s: float) -> bool:
        return self.await_device().wait(timeout_s)

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context of the rank's device. ArgumentError for tensors on another one, except
        boundaries of documents, which may lie on the CPU."""
        for name, tensor in tensors.items():
            if tensor.get_device() != self.index and name != "cu_seqlens":
                raise ArgumentError(
                    f"{name}.device",
                    tensor.device,
                    f"cuda:{self.index}, the device that this rank had when it made the world",
                )
        return _ALREADY if torch._C._cuda_getDevice() == self.index else self._current

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory of the device."""
        return DeviceMemory.create(nbytes, self.index)

    def allocate_staging(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed host memory that the device and a NIC can access."""
        with self._current:
            return PinnedMemory.create(nbytes)

    @property
    def outputs(self) -> OutputPool:
        """The pool of outputs that peers may write."""
        if self._context.outputs is None:
            self._context.outputs = OutputPool(self.index)
        return self._context.outputs

    def add_outputs(self, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        """Add a range of memory for outputs that peers may write; return whether further ranges are
        possible."""
        return self.outputs.add(own, everywhere)

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """Return the allocation of an output from the pool."""
        return self.outputs.empty, (shape, dtype)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory for the device. OSError if it is gone."""
        return DeviceMemory.attach(descriptor, self.index)

    def format(self, memory: SymmetricMemory) -> None:
        """Write the number of the first call to the words where kernels read it."""
        assert isinstance(memory, DeviceMemory)
        for offset in native().epoch_offsets():
            memory.write_word(offset, _FIRST_EPOCH)

    def launch(self, call: Call) -> DeviceLaunch:
        """Queue the call on torch's current stream, after the world's previous one."""
        self._used = True
        # torch's own compiler uses this call: torch.cuda.current_stream makes an object, in 4 us.
        stream: int = torch._C._cuda_getCurrentRawStream(self.index)
        key = (call.plan.digest(), call.workspace)
        calls = self._calls[key]
        if calls is None:
            calls = self._calls[key] = self._executor_of(call.plan)(call, self._context)
        events = None
        if call.timed and not torch.cuda.is_current_stream_capturing():
            events = (_timer(), _timer())
        order = self._order
        order.begin(stream)
        if events is not None:
            events[0].record()
        try:
            results = calls.start(call, stream)
        finally:
            if events is not None:
                events[1].record()
            number = order.end(stream)
        strides = {name: tensor.stride() for name, tensor in call.tensors.items()}
        return DeviceLaunch(
            order,
            number,
            events,
            again=partial(self._again, calls, call.symmetric, strides, prefetched_bytes(call)),
            results=results,
        )

    def refused(self) -> CapacityExceeded | None:
        """Return the error of a call that refused its data, since the last query."""
        return self._context.reports.refused()

    def _again(
        self,
        calls: Executor,
        symmetric: Mapping[str, tuple[int, ...]],
        strides: Mapping[str, tuple[int, ...]],
        prefetched: int,
    ) -> Again | None:
        starter = calls.starter(symmetric, strides)
        if starter is not None and prefetched:
            native().prefetch_in(starter, prefetched)
        names = SUMMED if "x" in strides else STARTED
        return None if starter is None else Again(starter, names, self._started)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _synchronize(device: int, over: threading.Event) -> None:
    with suppress(RuntimeError):  # the device has failed: nothing runs there any more
        torch.cuda.synchronize(device)
    over.set()
