"""The hopper backend: persistent kernels on GPUs of compute capability 9.0, over NVLink.

What it claims needs no torch; what a world does with it (``opened.py``) does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.backends.accelerators.hopper.claims import library_ops, ops
from mkernel.backends.accelerators.hopper.native import ARCHITECTURE, missing, native
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call
from mkernel.backends.contracts.instrumented import Instrumented
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.errors import BackendUnavailable
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.hopper import _hopper
    from mkernel.backends.accelerators.hopper.opened import HopperLaunch, OpenDevice
    from mkernel.backends.runtime import _runtime

_PLAIN_PROCESSORS = 132
"""Of an H100 or H200, where no device is here to ask."""


class HopperAccelerator(AcceleratorBackend, Instrumented):
    """GPUs of compute capability 9.0 that reach each other's memory.

    A rank uses one device: torch's current one when the world is made, or, where the process has not
    used CUDA by then, the one that the topology places it on. Calls run on torch's current stream and
    one after another; with CUDA graphs, replays and other calls are ordered by their streams alone.
    """

    name: ClassVar[str] = "hopper"
    preference: ClassVar[int] = 20
    device = "cuda"

    def __init__(self) -> None:
        """Starts nothing."""
        self._open: OpenDevice | None = None
        self._left: list[OpenDevice] = []  # of worlds whose kernels did not end
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
        import torch

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
                architecture=f"sm_{device.major}{device.minor}",
            )
            for device in _devices()
        )

    def capabilities(self) -> AcceleratorCapabilities:
        """The GEMM ops in half precision, for what this build has kernels of."""
        if self._capabilities is None:
            found = [] if missing() is not None else _devices()
            processors = found[0].multiprocessors if found else _PLAIN_PROCESSORS
            self._capabilities = AcceleratorCapabilities(
                ops=ops(),
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
                library_ops=library_ops(),
                kinds=("cuda",),
                architectures=(f"sm_{ARCHITECTURE[0]}{ARCHITECTURE[1]}",),
            )
        return self._capabilities

    # ---- a world's life, and its calls -----------------------------------------------------------

    def open(self, device: Accelerator) -> None:
        """Choose the rank's device and make what its calls need there."""
        from mkernel.backends.accelerators.hopper.opened import OpenDevice

        self._open = OpenDevice(device)

    def close(self, timeout_s: float) -> bool:
        """Wait for the device, and let go of it."""
        opened, self._open = self._open, None
        if opened is None or opened.close(timeout_s):
            return True
        self._left.append(opened)
        return False

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """The rank's device. ArgumentError for tensors on another one."""
        return self._opened().on(tensors)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed memory of the rank's device."""
        return self._opened().allocate(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory for the rank's device. OSError where it is gone."""
        return self._opened().attach(descriptor)

    def format(self, memory: SymmetricMemory) -> None:
        """Write the number of the first call, where kernels look for it."""
        self._opened().format(memory)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """A region, shared by all plans of a world; its flags are its own, so no signals."""
        from mkernel.backends.accelerators.hopper.launches import region_bytes

        return Workspace(nbytes=region_bytes(plan), signals=0, shared=True)

    def launch(self, call: Call) -> HopperLaunch:
        """Queue the call on torch's current stream, after the world's previous one."""
        return self._opened().launch(call)

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

    def _opened(self) -> OpenDevice:
        if self._open is None:
            raise BackendUnavailable(
                "accelerator 'hopper' is in no world; call mkernel.init() first"
            )
        return self._open


def _devices() -> list[_hopper.DeviceInfo]:
    return [device for device in native().devices() if (device.major, device.minor) == ARCHITECTURE]
