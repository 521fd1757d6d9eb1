"""Symmetric memory on a GPU: an allocation that other processes of the node map by descriptor.

The descriptor that ranks exchange is JSON; the memory itself travels as a file descriptor
(:mod:`mkernel.backends.runtime.fd_exchange`). A mapping keeps the memory alive: memory of a peer
whose process was killed stays valid until the mapping is closed here.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.cuda.mover import nic_access
from mkernel.backends.accelerators.cuda.native import native, pci_address
from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.runtime import fd_exchange
from mkernel.backends.runtime.host_memory import check_fit
from mkernel.errors import ArgumentError
from mkernel.settings import load

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _cuda

_FETCH_S = 10.0
_KIND = "cuda-vmm"


class DeviceMemory(SymmetricMemory):
    """Memory of this process's device, or a mapping of a peer's memory for kernels of this device.

    It is unmapped once it is closed and no tensor of it is left.
    """

    def __init__(
        self, made: _cuda.DeviceMemory, nbytes: int, offer: fd_exchange.Offer | None
    ) -> None:
        """Wrap native memory. Callers use :meth:`create` or :meth:`attach` instead."""
        self.nbytes = nbytes
        self.address = made.address
        self.device = made.device
        self._native: _cuda.DeviceMemory | None = made
        self._offer = offer
        self._fd = -1

    @classmethod
    def create(cls, nbytes: int, device: int) -> DeviceMemory:
        """Allocate zeroed memory. ValueError for a size below 1; OSError if the device is short of
        memory or cannot share it."""
        if nbytes < 1:
            raise ValueError(f"nbytes = {nbytes} is not legal; expected at least 1")
        from mkernel.backends.accelerators.cuda import _cuda

        try:
            return cls(_cuda.DeviceMemory.create(device, nbytes), nbytes, None)
        except _cuda.CudaError as error:
            raise OSError(f"no {nbytes} bytes of symmetric memory: {error}") from error

    @classmethod
    def attach(cls, descriptor: dict[str, Any], device: int) -> DeviceMemory:
        """Map the memory that a peer process of this host exported, for kernels of ``device``.

        Raises OSError if the memory is gone, is of another kind, or the devices cannot reach each
        other. Raises ArgumentError if it is on the same device and the setting ``ranks_per_device``
        is 1: kernels of two processes take turns there, so each would wait for the other.
        """
        if descriptor.get("kind") != _KIND:
            raise OSError(
                f"a peer exported memory of kind {descriptor.get('kind')!r}, not {_KIND!r}; "
                "do all ranks use the same accelerator?"
            )
        if descriptor["gpu"] == pci_address(device) and load().ranks_per_device == 1:
            raise ArgumentError(
                "device",
                f"cuda:{device} (GPU {descriptor['gpu']})",
                "a GPU of its own for each rank: torch.cuda.set_device(local_rank) before "
                "mkernel.init (or, for tests, MKERNEL_RANKS_PER_DEVICE on all ranks)",
                why="another rank uses it too",
            )
        from mkernel.backends.accelerators.cuda import _cuda

        fd = fd_exchange.fetch(descriptor["offer"], _FETCH_S)
        try:
            mapped = _cuda.DeviceMemory.attach(device, fd, int(descriptor["mapped"]))
        except _cuda.CudaError as error:
            raise OSError(
                f"device {device} cannot map a peer's memory: {error}; see `nvidia-smi topo -p2p r`"
            ) from error
        finally:
            os.close(fd)
        return cls(mapped, int(descriptor["nbytes"]), None)

    def export(self) -> dict[str, Any]:
        """Return a JSON-safe descriptor, valid until ``close``, on this host, for this user."""
        own = self._alive()
        if self._offer is None:
            self._fd = own.export_fd()
            self._offer = fd_exchange.offer(self._fd)
        return {
            "kind": _KIND,
            "offer": self._offer.address,
            "nbytes": self.nbytes,
            "mapped": own.mapped_bytes,
            "gpu": pci_address(self.device),
        }

    def shared(self) -> _cuda.DeviceMemory:
        """Return the native memory itself, which stays mapped as long as any reference to it
        exists."""
        return self._alive()

    def write_word(self, offset: int, value: int) -> None:
        """Write 64 bits at a multiple of 8; they are in memory when this returns."""
        self._alive().write_word(offset, value)

    def dmabuf(self) -> int:
        """Return a new dmabuf descriptor of the memory, for a NIC to register; the caller closes
        it. OSError if the device exports none."""
        from mkernel.backends.accelerators.cuda import _cuda

        access = nic_access(self.device)
        if not access.usable:
            raise OSError(f"no dmabuf: {access.detail}")
        try:
            return int(self._alive().export_dmabuf())
        except _cuda.CudaError as error:
            raise OSError(f"no dmabuf: {error}") from error

    def flush(self) -> int:
        """Return the address of the device's flush; 0 if the device orders what NICs write."""
        return int(native().device_flush(self.device))

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor over the bytes from ``offset`` on; it keeps the memory mapped.
        ValueError if it does not fit."""
        count = math.prod(shape)
        check_fit(self.nbytes, offset, count, dtype)
        own = self._alive()
        flat = bytes_at(own.address + offset, count * dtype.itemsize, own)
        return flat.view(dtype).view(*shape)

    def close(self) -> None:
        """Withdraw the descriptor and unmap. Calling it twice is harmless."""
        self._native = None
        offer, self._offer = self._offer, None
        if offer is not None:
            try:
                offer.close()
            finally:
                with contextlib.suppress(OSError):
                    os.close(self._fd)

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None:
            self.close()

    def _alive(self) -> _cuda.DeviceMemory:
        if self._native is None:
            raise ValueError("this memory was closed")
        return self._native


def bytes_at(address: int, nbytes: int, keeps: object = None) -> torch.Tensor:
    """Return a tensor over device memory. It holds ``keeps``, so that the memory stays mapped as
    long as the tensor lives."""
    # As bytes, since the interface has no name for bfloat16; without a device, not even torch's
    # default one, lest torch copy.
    with torch._C.DisableTorchFunction():
        return torch.as_tensor(_Bytes(address, nbytes, keeps))


class _Bytes:
    """A range of device memory in the CUDA array interface of numba and torch. A tensor made from
    it holds it."""

    def __init__(self, address: int, nbytes: int, keeps: object) -> None:
        self._keeps = keeps
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
