"""NICs' access to the memory of a CUDA device: a real NIC's dmabufs, and the mover of an emulated
one."""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.native import native
from mkernel.backends.contracts.status import Status
from mkernel.backends.transport import mover


def offer_mover() -> None:
    """Let emulated NICs of this process reach its CUDA memory. Must be called before they are
    opened."""
    mover.register(native().mover())


def nic_access(device: int) -> Status:
    """Return whether a NIC can be given this device's memory as a dmabuf, so that kernels see what
    it writes. Queries the driver and allocates nothing; the result is the same on every rank with
    such devices."""
    found = native().gpu_direct(device)
    if not found.dmabuf:
        return Status(
            False,
            f"cuda:{device} exports no dmabufs",
            "use NVIDIA's open kernel modules and Linux 5.12 or later",
        )
    if not (found.ordered or found.flushes):
        return Status(
            False,
            f"cuda:{device} neither orders what NICs write nor flushes it",
            "stage in host memory",
        )
    return Status(True, "by dmabuf, " + ("ordered" if found.ordered else "flushed"))
