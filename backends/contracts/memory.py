"""Symmetric memory: what a backend allocates, what a plan needs of it, what kernels see of a peer's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkernel.errors import Unsupported

if TYPE_CHECKING:
    import torch


class SymmetricMemory(ABC):
    """One rank's piece of a symmetric allocation, or a mapping of a peer's."""

    address: int
    nbytes: int

    @abstractmethod
    def export(self) -> dict[str, Any]:
        """JSON-safe descriptor that a rank of the *same node* passes to ``attach``."""

    def dmabuf(self) -> int | None:
        """A new dmabuf descriptor of device memory, from its address on, for a NIC; the caller's to
        close. None: it is host memory. OSError: the device exports none."""
        return None

    def flush(self) -> int:
        """Of device memory: address of the ``DeviceFlush`` (``backends/transport/mover.hpp``) after
        which kernels see what a NIC wrote there. 0: they see it at once."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release the mapping and the memory, the latter once no tensor of it is left. Twice is
        harmless. Nothing else may use it any more."""

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor over the bytes from ``offset`` on, which keeps them mapped. For
        :func:`mkernel.empty`; ValueError where it does not fit, Unsupported where there is none."""
        raise Unsupported(f"{type(self).__name__} cannot be seen as a tensor")


@dataclass(frozen=True)
class Workspace:
    """What a plan needs on every rank. All plans of a world use the same memory and the same counters,
    in any order; calls of a world run one after another.

    Attributes:
        areas: bytes of each area of symmetric memory. An area is the same memory for all plans, as
            large as the largest needs, and never overlaps another: what a plan has in one of them, no
            plan overwrites that uses the others. Zeroed when it is new and then formatted by the
            backend; a later plan may get new, larger areas, and an earlier one keeps what it had.
            Empty: none.
        signals: how many counters of the signal pad, the first ones. A wait for what a call adds to
            one is for the count expected before the call and that (``transport/signal.hpp``).
        outputs: bytes of symmetric memory from which the backend may allocate outputs that peers write
            (:meth:`.accelerator.AcceleratorBackend.add_outputs`); plans of a world share it.
        staging: bytes of host memory, from the backend's ``allocate_staging``, that NICs read and write
            in place of the areas, where the plan's routes are staged. Symmetric, and shared by all
            plans as an area is.
    """

    areas: tuple[int, ...] = ()
    signals: int = 0
    staging: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class PeerMemory:
    """A same-node peer as kernels see it: its signal pad and workspace, mapped here. ``workspace``: 0
    where the plan needs no memory."""

    pad: int
    workspace: int
