"""The native module ``_cuda``, and the reasons why it may be missing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.software import nvcc
from mkernel.backends.contracts.status import Status
from mkernel.errors import INSTALL_AGAIN, BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType

    from mkernel.backends.accelerators.cuda import _cuda

FIRST = (8, 0)
"""The first compute capability whose devices run the kernels that need no wgmma."""


@cache
def native() -> ModuleType:
    """Return the module ``_cuda``. BackendUnavailable if it was not built."""
    try:
        from mkernel.backends.accelerators.cuda import _cuda
    except ImportError as error:
        raise BackendUnavailable(f"the native module for CUDA does not import: {error}") from error
    return _cuda


@cache
def pci_address(device: int) -> str:
    """Return a device's PCI address on this host, which is the same in every process, unlike its
    number."""
    return str(native().devices()[device].pci)


def device_clock(device: int) -> _cuda.DeviceClock | None:
    """Return a device's clock; None if its kernels are not built, or do not run on the device."""
    try:
        made = native()
    except BackendUnavailable:
        return None
    found = made.devices()[device]
    if (found.major, found.minor) < FIRST or not hasattr(made, "DeviceClock"):
        return None
    clock: _cuda.DeviceClock = made.DeviceClock(device)
    return clock


def not_built(error: BackendUnavailable) -> Status:
    """Return the status of a backend whose native module does not import."""
    found = nvcc(Path("/"))
    remedy = (
        f"install the CUDA toolkit (nvcc 12.5 or newer), then {INSTALL_AGAIN}"
        if found is None
        else f"{INSTALL_AGAIN} and without MKERNEL_KERNELS=OFF; {found} must be 12.5 or newer"
    )
    return Status(False, f"not built ({error})", remedy)


def missing() -> Status | None:
    """Return what prevents the native module from running anything here; None if nothing does."""
    try:
        made = native()
    except BackendUnavailable as error:
        return not_built(error)
    driver, runtime = made.versions()
    if driver == 0:
        return Status(
            False, "built, but no CUDA driver is installed here", "install NVIDIA's driver"
        )
    try:
        made.devices()
    except made.CudaError as error:
        wanted = f"CUDA {runtime // 1000}.{runtime % 1000 // 10}"
        return Status(
            False, f"built for {wanted}, but {error}", f"see `nvidia-smi`; it needs {wanted}"
        )
    return None
