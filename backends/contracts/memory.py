"""Symmetric memory: the memory that a backend allocates, a plan's needs of it, and a peer's as
kernels see it; and where tensors begin that kernels take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkernel.errors import Unsupported

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""The bytes at multiples of which kernels and libraries read and write tensors."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it begins at a multiple of 16 bytes, else a copy without gaps."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


class SymmetricMemory(ABC):
    """One rank's piece of a symmetric allocation, or a mapping of a peer's."""

    address: int
    nbytes: int

    @abstractmethod
    def export(self) -> dict[str, Any]:
        """Return a JSON-safe descriptor that a rank of the *same node* passes to ``attach``."""

    def dmabuf(self) -> int | None:
        """Return a new dmabuf descriptor of device memory, starting at its address, for a NIC; the
        caller closes it. None: it is host memory. OSError: the device exports none."""
        return None

    def flush(self) -> int:
        """Return the address of the ``DeviceFlush`` (``backends/transport/mover.hpp``) of device
        memory, after which kernels see what a NIC wrote there. 0: they see it at once."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release the mapping, and the memory once no tensor of it is left. Calling it twice is
        harmless. Nothing else may be called afterwards."""

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor over the bytes from ``offset`` on, which keeps them mapped. For
        :func:`mkernel.empty`. Raises ValueError if it does not fit, Unsupported if the memory has
        no tensor view."""
        raise Unsupported(f"{type(self).__name__} cannot be seen as a tensor")


@dataclass(frozen=True)
class Workspace:
    """The memory and counters that a plan needs on every rank. All plans of a world use the same
    memory and the same counters, in any order; calls of a world run one after another.

    Attributes:
        areas: bytes of each area of symmetric memory. An area is the same memory for all plans, as
            large as the largest plan needs, and never overlaps another area: a plan's contents of
            one area are not overwritten by plans that use the others. An area is zeroed when it is
            new and then formatted by the backend. A later plan may get new, larger areas; an
            earlier one keeps those it had. Empty: none.
        signals: the number of counters of the signal pad, the first ones. A wait for the amount
            that a call adds to a counter waits for the count expected before the call plus that
            amount (``transport/signal.hpp``).
        outputs: bytes of symmetric memory from which the backend may allocate outputs that peers
            write (:meth:`.accelerator.AcceleratorBackend.add_outputs`); plans of a world share it.
        staging: bytes of host memory, from the backend's ``allocate_staging``, that NICs read and
            write in place of the areas if the plan's routes are staged. It is symmetric, and shared
            by all plans as an area is.
    """

    areas: tuple[int, ...] = ()
    signals: int = 0
    staging: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class PeerMemory:
    """A same-node peer as kernels see it: its signal pad and workspace, mapped in this process.
    ``workspace`` is 0 if the plan needs no memory."""

    pad: int
    workspace: int
