"""The hopper backend: persistent kernels on GPUs of compute capability 9.0, over NVLink."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mkernel.backends.accelerators.hopper import launches
from mkernel.backends.accelerators.hopper.launches import Lane
from mkernel.backends.accelerators.hopper.memory import DeviceMemory
from mkernel.backends.accelerators.hopper.native import missing, native
from mkernel.backends.base import (
    AcceleratorBackend,
    AcceleratorCapabilities,
    Call,
    Launch,
    LaunchTimes,
    Status,
    SymmetricMemory,
    Workspace,
)
from mkernel.backends.runtime import _runtime
from mkernel.errors import ArgumentError, BackendUnavailable
from mkernel.plan.model import LaunchPlan
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper

ARCHITECTURE = (9, 0)
_PLAIN_PROCESSORS = 132
"""Of an H100 or H200, where no device is here to ask."""
_FIRST_EPOCH = 1
_EPOCH_OFFSETS = (0, *range(128, 256, 8))  # of Control's epoch and epochs (device/region.cuh)
_LONGEST_PAUSE_S = 0.001


@dataclass
class _Open:
    """What a world has of its device."""

    device: int
    current: torch.cuda.device
    """Entered around each call to make the device torch's current one; made once."""
    control: _hopper.ControlBlock
    order: _hopper.CallOrder
    worlds: dict[str, _hopper.World] = field(default_factory=dict)  # as in Lane
    collectives: dict[str, _hopper.Collective] = field(default_factory=dict)
    used: bool = field(default=False)


class HopperLaunch(Launch):
    """A call that is queued on a stream."""

    def __init__(
        self,
        order: _hopper.CallOrder,
        number: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None,
    ) -> None:
        """``number``: what ``order`` calls it. ``events``: around it, where it is timed."""
        self._order = order
        self._number = number
        self._events = events

    def wait(self, timeout_s: float) -> bool:
        """True once the device is past the call. RuntimeError where the device has failed."""
        start = time.monotonic()
        while not self._order.finished(self._number):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                return False
            time.sleep(min(_LONGEST_PAUSE_S, waited / 50))  # short waits must not get longer
        return True

    def times(self) -> LaunchTimes:
        """``compute``: of the whole call on the device; communication runs inside it."""
        if self._events is None:
            return LaunchTimes()
        start, end = self._events
        return LaunchTimes({"comm": 0.0, "compute": start.elapsed_time(end) * 1e-3})

    def trace(self) -> None:
        """None: no instructions are recorded."""


class HopperAccelerator(AcceleratorBackend):
    """GPUs of compute capability 9.0 that reach each other's memory.

    A rank uses one device: torch's current one when the world is made, or, where the process has not
    used CUDA by then, the one that the topology places it on. Calls run on torch's current stream and
    one after another; with CUDA graphs, replays and other calls are ordered by their streams alone.
    """

    name: ClassVar[str] = "hopper"
    device = "cuda"

    def __init__(self) -> None:
        """Starts nothing."""
        self._open: _Open | None = None
        self._left: list[_Open] = []  # of worlds whose kernels did not end
        self._capabilities: AcceleratorCapabilities | None = None

    def status(self) -> Status:
        """Usable where the kernels were built, and a device, its driver and torch are fit for them."""
        lacking = missing()
        if lacking is not None:
            return lacking
        found = _devices()
        if not found:
            return Status(
                False, "no device of compute capability 9.0", "use accelerator streams, or an H100"
            )
        if not torch.cuda.is_available():
            return Status(
                False,
                f"torch {torch.__version__} sees no CUDA device",
                "install a torch that is built for the driver's CUDA",
            )
        driver = native().versions()[0]
        return Status(
            True,
            f"{len(found)} x {found[0].name} ({found[0].multiprocessors} SMs), driver for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}; NVLink multicast is not used",
        )

    def probe(self) -> tuple[Accelerator, ...]:
        """The devices of compute capability 9.0 of this process."""
        if not self.status().usable:
            return ()
        return tuple(
            Accelerator(
                id=f"cuda{device.index}",
                kind="cuda",
                name=device.name,
                index=device.index,
                pci=device.pci.lower(),
            )
            for device in _devices()
        )

    def capabilities(self) -> AcceleratorCapabilities:
        """The GEMM ops in half precision, for what this build has kernels of."""
        if self._capabilities is None:
            found = [] if missing() is not None else _devices()
            processors = found[0].multiprocessors if found else _PLAIN_PROCESSORS
            self._capabilities = AcceleratorCapabilities(
                ops=launches.ops(),
                dtypes=("bfloat16", "float16"),
                out_dtypes=("bfloat16", "float16"),
                mixed_dtypes=False,
                rounded_partials=True,
                b_layouts=("row", "column"),
                alignment_bytes=16,
                transfer_paths=("p2p",),
                peer_access=True,
                multicast=False,
                compute_cores=processors,
                comm_cores=processors,
                chunk_unit="rows",
                row_chunks=1,
                stream_ordered=True,
                library_ops=launches.library_ops(),
            )
        return self._capabilities

    # ---- a world's life --------------------------------------------------------------------------

    def open(self, device: Accelerator) -> None:
        """Choose the rank's device and make what its calls need there."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The topology counts the host's devices; a rank may be shown fewer, often just its own.
            torch.cuda.set_device(device.index % torch.cuda.device_count())
        index = torch.cuda.current_device()
        if torch.cuda.get_device_capability(index) != ARCHITECTURE:
            raise BackendUnavailable(
                f"device {index} ({torch.cuda.get_device_name(index)}) is not of compute capability "
                "9.0; choose another with torch.cuda.set_device before making the world"
            )
        torch.empty(1, device="cuda")  # torch's context first
        made = native()
        self._open = _Open(
            index, torch.cuda.device(index), made.ControlBlock(), made.CallOrder(index)
        )

    def close(self, timeout_s: float) -> bool:
        """Wait for the device, and let go of it."""
        opened, self._open = self._open, None
        if opened is None or not opened.used:
            return True
        # No call of CUDA's waits with a deadline; a thread that is left behind waits for good.
        waiting = threading.Thread(
            target=_synchronize, args=(opened.device,), name="mkernel-drain", daemon=True
        )
        waiting.start()
        waiting.join(timeout_s)
        if waiting.is_alive():
            self._left.append(opened)
            return False
        return True

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """The rank's device. ArgumentError for tensors on another one."""
        opened = self._opened()
        for name, tensor in tensors.items():
            if tensor.device.index != opened.device:
                raise ArgumentError(
                    f"{name}.device",
                    tensor.device,
                    f"cuda:{opened.device}, the device that this rank had when it made the world",
                )
        return opened.current

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed memory of the rank's device."""
        return DeviceMemory.create(nbytes, self._opened().device)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory for the rank's device. OSError where it is gone."""
        return DeviceMemory.attach(descriptor, self._opened().device)

    def format(self, memory: SymmetricMemory) -> None:
        """Write the number of the first call, where kernels look for it."""
        assert isinstance(memory, DeviceMemory)
        for offset in _EPOCH_OFFSETS:
            memory.write_word(offset, _FIRST_EPOCH)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """A region, shared by all plans of a world; its flags are its own, so no signals."""
        return Workspace(nbytes=launches.region_bytes(plan), signals=0, shared=True)

    # ---- calls -----------------------------------------------------------------------------------

    def launch(self, call: Call) -> HopperLaunch:
        """Queue the call on torch's current stream, after the world's previous one."""
        opened = self._opened()
        opened.used = True
        stream = _current_stream(opened.device)
        order = opened.order
        events = None
        if call.timed and not torch.cuda.is_current_stream_capturing():
            events = (_timer(), _timer())
        order.begin(stream)
        if events is not None:
            events[0].record()
        try:
            launches.start(
                call,
                Lane(
                    opened.device,
                    stream,
                    order,
                    opened.control.address,
                    opened.worlds,
                    opened.collectives,
                ),
            )
        finally:
            if events is not None:
                events[1].record()
            number = order.end(stream)
        return HopperLaunch(order, number, events)

    def abort(self, code: _runtime.AbortCode) -> None:
        """Set the word that waiting kernels look at."""
        opened = self._open
        if opened is not None:
            opened.control.abort(code)

    def failure(self) -> tuple[_runtime.AbortCode, _runtime.Diagnosis] | None:
        """The first time-out that a kernel of this world recorded."""
        opened = self._open
        if opened is None or not opened.control.failed:
            return None
        return opened.control.outcome()

    def _opened(self) -> _Open:
        if self._open is None:
            raise BackendUnavailable(
                "accelerator 'hopper' is in no world; call mkernel.init() first"
            )
        return self._open


def _devices() -> list[_hopper.DeviceInfo]:
    return [device for device in native().devices() if (device.major, device.minor) == ARCHITECTURE]


def _current_stream(device: int) -> int:
    """Handle of torch's current stream."""
    # As torch's own compiler asks: torch.cuda.current_stream makes an object for it, in 4 us.
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _synchronize(device: int) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # the device has failed: nothing runs there any more
        return
