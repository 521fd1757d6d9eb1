"""The differences between kinds of torch devices: names, streams and events. No other file may
depend on them.

Planning on a CPU uses this file too, so torch is imported only where it is needed; torch_npu, which
needs Ascend's software and registers itself with torch, only if the device is an NPU.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mkernel.backends.accelerators.cuda import native
from mkernel.backends.accelerators.cuda.chips import ChipMachine
from mkernel.backends.accelerators.streams.settings import StreamsSettings
from mkernel.errors import ArgumentError
from mkernel.plan.model import ScaleMode
from mkernel.settings import load_as
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Accelerator, KindName, Model

if TYPE_CHECKING:
    import torch


DeviceName = Literal["cpu", "cuda", "npu"]
"""torch's name of a kind of device."""
FILE = Path(__file__).with_name("machine.json")


class Traits(Sourced):
    """The best way to make launches on one kind of device."""

    row_chunks: int = Field(ge=1, description="of a rank's rows by default")
    overlaps: bool = Field(True, description="messages and products run at the same time")
    products_in_flight: int = Field(1, ge=1, description="that run side by side")
    peers_together: bool = Field(False, description="rows of all peers come in one message")
    head_start_cycles: int = Field(0, ge=0, description="of messages ahead of the first product")
    tile_elements: int = Field(1, ge=1, description="results that one block computes, at least")
    comm_share: int = Field(0, ge=0, description="one in so many vector cores is for messages")


class TorchDevice(ChipMachine):
    """One kind of device. Without constants, no times are predicted for it."""

    source: str = ""
    traits: Traits


class _File(Model):
    cpu: TorchDevice
    cuda: TorchDevice
    npu: TorchDevice


@cache
def torch_device(name: str) -> TorchDevice:
    """Return the data of the device type of that name. They do not depend on the device present
    here, because ranks on unlike devices must plan alike."""
    found: TorchDevice = getattr(_file(), name)
    return found


@cache
def scaled_mm(name: str) -> tuple[ScaleMode, ...]:
    """Return the scales that ``torch._scaled_mm`` takes on such a device. For CPUs they were tried
    with torch 2.13, the first release known to take both; on other devices nothing was tried."""
    return ("tensor", "row") if name == "cpu" and torch_release() >= (2, 13) else ()


@cache
def torch_release() -> tuple[int, int]:
    """Return the release of the installed torch without importing it; 5 ms."""
    major, minor, *_ = metadata.version("torch").split(".")
    return int(major), int(minor)


@cache
def _file() -> _File:
    return _File.from_file(FILE, "constants of streams")


_COLLECTIVES: dict[DeviceName, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_KINDS: dict[str, KindName] = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
DEVICES: dict[KindName, DeviceName] = {
    "cuda": "cuda",
    "rocm": "cuda",
    "ascend": "npu",
    "cpu": "cpu",
}
"""torch's name of each kind of device that the backend runs on."""

_used: dict[str, bool] = {}
"""A flag for each type of device: True if the process had used one before the devices were probed."""


class Device:
    """One kind of torch device: ``cpu``, ``cuda`` or ``npu``. Constructing it starts nothing."""

    def __init__(self, name: str | None) -> None:
        """Choose the device. ``name`` None: ``npu`` if torch_npu is installed and sees one,
        ``cuda`` if torch sees one, otherwise ``cpu``."""
        wanted = name or _found()
        known = next((one for one in _COLLECTIVES if one == wanted), None)
        if known is None:
            raise ArgumentError(
                "MKERNEL_STREAMS_DEVICE", repr(wanted), f"one of: {', '.join(_COLLECTIVES)}"
            )
        self.name: DeviceName = known
        self.collectives = _COLLECTIVES[self.name]
        described = torch_device(self.name)
        self.constants, self.cores = described.constants, described.cores
        self.cards = described.of_others
        self.has_streams = self.name != "cpu"
        # An NPU's streams have limits while a call runs; work queued after it must not have them.
        self.queues = self.name == "cuda"

    def missing(self) -> str | None:
        """Return what prevents use of the device here, in words; None if nothing does."""
        try:
            import torch
        except ImportError as error:
            return f"torch does not import: {error}"
        if not torch.distributed.is_available():
            return "this torch is built without torch.distributed"
        if self.name == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if self.name != "npu":
            return None
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        return _npu_lacks(self._module())

    def probe(self) -> tuple[Accelerator, ...]:
        """Return the devices of this machine; for ``cpu`` one prototype, which is copied per rank."""
        if not self.has_streams:
            return (
                Accelerator(
                    id="cpu0", kind="cpu", name="CPU cores of this host", index=0, emulated=True
                ),
            )
        if self.missing() is not None:
            return ()
        module = self._module()
        _used.setdefault(self.name, module.is_initialized())  # querying a name uses the device
        return tuple(
            Accelerator(
                id=f"{self.name}{index}",
                kind=_KINDS[self.name],
                name=module.get_device_name(index),
                index=index,
                architecture=self._architecture(index),
                **self._figures(index),
            )
            for index in range(module.device_count())
        )

    def _architecture(self, index: int) -> str | None:
        """Return the architecture (``sm_90``); None if the device is no NVIDIA GPU."""
        import torch

        if self.name != "cuda" or torch.version.cuda is None:
            return None
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"

    def _figures(self, index: int) -> dict[str, Any]:
        """Return cores, clock and rate of memory of a GPU, as far as this torch knows them."""
        if self.name != "cuda":
            return {}
        import torch

        known = torch.cuda.get_device_properties(index)
        clock_khz, memory_khz, bits = (
            getattr(known, name, 0)
            for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
        )
        return {
            "cores": known.multi_processor_count,
            "clock_mhz": clock_khz / 1e3 or None,
            "memory_gbs": 2e-6 * memory_khz * bits / 8 or None,  # two transfers a clock cycle
        }

    def group_options(self, timeout: timedelta) -> Any:
        """Return torch.distributed's options for the process group of the calls; None: its
        defaults."""
        if self.name != "cuda":
            return None
        from torch.distributed import ProcessGroupNCCL

        # NCCL's watchdog must neither end the process nor let the stream continue without data.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # Otherwise a thread of the group polls the store, which is Python code, until the process
        # ends, and may run after the interpreter has ended.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        # Otherwise blocks of a product that wait for a multiprocessor run before those of a
        # message.
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # torch warns if it differs from the group's
        return options

    def choose(self, index: int) -> None:
        """Make device ``index`` the process's current one, unless the process has chosen one; using
        any device counts as a choice. If the process sees fewer devices than the host has,
        ``index`` is taken modulo their number."""
        if not self.has_streams:
            return
        module = self._module()
        if not _used.get(self.name, module.is_initialized()):
            module.set_device(index % module.device_count())
        _used[self.name] = True

    def index(self) -> int:
        """Return the current device's index."""
        return int(self._module().current_device())

    def at(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which ``device`` is the current one."""
        entered: AbstractContextManager[None] = self._module().device(device)
        return entered

    def release(self, group: torch.distributed.ProcessGroup | None) -> None:
        """End messages that will never complete, so that they do not block the device's streams for
        good. A CPU has no way to do that; there they end at torch.distributed's deadline."""
        if group is None or not self.has_streams:
            return
        import torch

        with suppress(RuntimeError):  # a broken group can only end by itself
            backend = group._get_backend(torch.device(self.name))
            abort = getattr(backend, "abort", None)
            if abort is not None:
                abort()

    # ---- streams; only where has_streams ---------------------------------------------------------

    def current(self, device: torch.device) -> Any:
        """Return the calling thread's current stream on ``device``."""
        return self._module().current_stream(device)

    def stream(self, device: torch.device) -> Any:
        """Return a new stream on ``device``."""
        return self._module().Stream(device=device)

    def on(self, stream: Any) -> Any:
        """Return a context in which work is put on ``stream`` and on its device."""
        return self._module().stream(stream)

    def event(self, *, timed: bool) -> Any:
        """Return a new event. ``timed``: it can measure time, which makes it slower for a device to
        pass."""
        return self._module().Event(enable_timing=timed)

    @cached_property
    def copies(self) -> bool:
        """True if messages inside a node may be puts by copy engines, into memory that peers map."""
        return self._wants_copies and native.missing() is None

    @property
    def copies_with_a_driver(self) -> bool:
        """The value of :attr:`copies` on another machine with these settings, given that its driver
        and its build of mkernel work."""
        return self._wants_copies

    @property
    def _wants_copies(self) -> bool:
        return self.name == "cuda" and load_as(StreamsSettings).copies

    def hold(self, stream: Any, cycles: int) -> None:
        """Hold ``stream`` back for ``cycles`` clock cycles. Only on ``cuda``."""
        with self.on(stream):
            self._module()._sleep(cycles)

    def shared(
        self, device: torch.device, compute: Any, comm: Any, share: int
    ) -> AbstractContextManager[None]:
        """Return a context in which the two streams' kernels leave each other cores: one vector
        core in ``share`` is for messages. Only on ``npu``; 0: no limits are set."""
        if not share:
            return nullcontext()
        return _shared_cores(self._module(), device, compute, comm, share)

    def _module(self) -> ModuleType | Any:
        if self.name == "npu":
            importlib.import_module("torch_npu")  # registers itself with torch
        return getattr(importlib.import_module("torch"), self.name)


def _found() -> str:
    if importlib.util.find_spec("torch_npu") is not None and Device("npu").missing() is None:
        return "npu"
    if _gpu_driver():
        import torch

        if torch.cuda.is_available():
            return "cuda"
    return "cpu"


def _gpu_driver() -> bool:
    """Return whether a driver of NVIDIA or AMD is present, without which torch sees no ``cuda``."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


_NEEDED = ("set_stream_limit", "reset_stream_limit", "get_device_limit")


def _npu_lacks(module: Any) -> str | None:
    """Return what ``torch.npu`` lacks, in words: a device, or functions that :func:`_shared_cores`
    needs."""
    if not module.is_available():
        return "torch_npu sees no NPU"
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    return f"torch_npu is too old: torch.npu lacks {', '.join(lacking)}" if lacking else None


@contextmanager
def _shared_cores(
    module: Any, device: torch.device, compute: Any, comm: Any, share: int
) -> Iterator[None]:
    """Reserve one in ``share`` vector cores for ``comm`` and the others for ``compute``; afterwards
    both may use all again.

    ``compute`` is the caller's own stream, so it must not stay limited. Everything that was put on
    the streams must have ended when the context is left.

    Never run on an NPU. From torch_npu's public documentation:
    ``torch.npu.set_stream_limit(stream, cube_num, vector_num)`` applies to operators written in Ascend
    C that are put on the stream from then on; ``reset_stream_limit(stream)`` undoes it;
    ``get_device_limit(device)`` returns the number of cores.
    """
    cores = module.get_device_limit(device.index or 0)
    cubes, vectors = cores["cube_core_num"], cores["vector_core_num"]
    moving = max(1, vectors // share)
    try:
        module.set_stream_limit(comm, 1, moving)  # of 1 at least
        module.set_stream_limit(compute, cubes, max(1, vectors - moving))
        yield
    finally:
        module.reset_stream_limit(comm)
        module.reset_stream_limit(compute)
