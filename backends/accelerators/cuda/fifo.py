"""The command FIFO of a NIC session, for kernels of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.native import native
from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _cuda


def device_fifo(fifo: int, device: int) -> _cuda.DeviceFifo:
    """Return the object through which kernels of ``device`` push commands. Its ``handle`` is the
    host address of a ``FifoDevice`` (``backends/transport/fifo_device.hpp``), which kernels take by
    value.

    The FIFO takes one device at a time, until the object is deleted; no kernel may push after that.
    The session that owns ``fifo`` must outlive the object.

    Args:
        fifo: ``NicSession.fifo`` or ``Call.fifo``. device: its CUDA number in this process.

    Raises:
        ArgumentError: the session takes puts from the host only, or a device pushes already.
        CudaError: its memory cannot be registered. BackendUnavailable: no native module.
    """
    module = native()
    try:
        made: _cuda.DeviceFifo = module.DeviceFifo(fifo, device)
    except ValueError as error:
        raise ArgumentError(
            "fifo",
            fifo,
            "the command FIFO of a NIC session that no device pushes to",
            why=str(error),
        ) from error
    return made
