"""Symmetric memory in host pages: anonymous files that same-node peers map through /proc.

Nothing lies on a file system, so nothing is left behind when a rank is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.backends.contracts.memory import SymmetricMemory

if TYPE_CHECKING:
    import torch

# A cookie follows the usable bytes: by it a peer that attaches recognises this allocation, because
# the process may by then have another file under the same descriptor number.
_COOKIE_BYTES = 16


def check_fit(room: int, offset: int, count: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``count`` elements from byte ``offset`` on are aligned and fit in
    ``room`` bytes."""
    end = offset + count * dtype.itemsize
    if offset < 0 or offset % dtype.itemsize or count < 1 or end > room:
        raise ValueError(f"{count} elements of {dtype} at byte {offset} do not fit {room} bytes")


def page_up(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _short_of(nbytes: int, error: OSError | OverflowError) -> OSError:
    """Return the error that a failed allocation of ``nbytes`` raises."""
    number, why = (
        (error.errno, error.strerror)
        if isinstance(error, OSError)
        else (errno.ENOMEM, "no file is as large")
    )
    return OSError(
        number,
        f"{nbytes} bytes of shared memory: {why}; ask for less, or let processes have more "
        "(`free`, `ulimit -v -n -f`, and the limits of the container, say what there is)",
    )


class HostMemory(SymmetricMemory):
    """A shared mapping of an anonymous file; page-aligned, zeroed when new.

    The pages are a MAP_SHARED mapping of a memfd, so that a software NIC finds the file by its
    inode.
    """

    NAME: ClassVar = "mkernel"
    """Begins the file's name, which /proc shows; the process that owns it follows."""

    def __init__(self, fd: int, nbytes: int, cookie: bytes, *, owner: bool) -> None:
        """Map ``fd``, which this object owns from now on."""
        self.nbytes = nbytes
        self._fd = fd
        self._cookie = cookie
        self._owner = owner
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, page_up(nbytes + _COOKIE_BYTES))
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise _short_of(nbytes, error) from error
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, nbytes: int) -> HostMemory:
        """Allocate zeroed memory. ValueError for a size below 1, OSError if memory is short."""
        if nbytes < 1:
            raise ValueError(f"nbytes = {nbytes} is not legal; expected at least 1")
        cookie = secrets.token_bytes(_COOKIE_BYTES)
        fd = os.memfd_create(f"{cls.NAME}-{os.getpid()}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, page_up(nbytes + _COOKIE_BYTES))
            os.pwrite(fd, cookie, nbytes)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError | OverflowError):
                raise _short_of(nbytes, error) from error
            raise
        return cls(fd, nbytes, cookie, owner=True)

    @classmethod
    def attach(cls, descriptor: dict[str, Any]) -> HostMemory:
        """Map the memory that a peer process exported. OSError if it is gone or is something else."""
        pid, number = int(descriptor["pid"]), int(descriptor["fd"])
        nbytes, cookie = int(descriptor["nbytes"]), bytes.fromhex(descriptor["cookie"])
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(
                error.errno,
                f"process {pid} does not share the {nbytes} bytes that it exported: {error.strerror} "
                f"({error.filename}); did it run out of memory, or was the world finalized there?",
            ) from error
        try:
            size = os.fstat(fd).st_size
            if nbytes < 1 or size != page_up(nbytes + _COOKIE_BYTES):
                raise OSError(
                    f"process {pid} no longer shares the {nbytes} bytes it exported: its "
                    f"descriptor {number} holds {size}; was the world finalized there?"
                )
            if os.pread(fd, _COOKIE_BYTES, nbytes) != cookie:
                raise OSError(
                    f"descriptor {number} of process {pid} holds another allocation than the one "
                    "it exported; was the world finalized there?"
                )
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes, cookie, owner=False)

    def export(self) -> dict[str, Any]:
        """Return a JSON-safe descriptor, valid until ``close``, on this machine."""
        if not self._owner:
            raise ValueError("only the rank that allocated memory can export it")
        return {
            "pid": os.getpid(),
            "fd": self._fd,
            "nbytes": self.nbytes,
            "cookie": self._cookie.hex(),
        }

    def view(self) -> memoryview:
        """Return all bytes. The view holds the map, also after ``close``. ValueError: it was closed."""
        if self._map is None:
            raise ValueError("this memory was closed")
        return memoryview(self._map)[: self.nbytes]

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor over the bytes from ``offset`` on. ValueError if it does not
        fit."""
        view, count = self.view(), math.prod(shape)
        check_fit(self.nbytes, offset, count, dtype)
        import torch  # not at the top: who only plans does without

        # The view holds the map; torch holds only what it is given.
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=offset)
        return flat.view(*shape)

    def close(self) -> None:
        """Unmap, or leave it to the last tensor or view of the memory to unmap. Calling it twice is
        harmless."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        with contextlib.suppress(BufferError):  # a tensor or a view holds the map
            mapped.close()
        os.close(self._fd)

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.close()


class HostPages:
    """The allocator of host memory, whatever the accelerator; the world's signal pads lie in it."""

    def allocate(self, nbytes: int) -> HostMemory:
        """Allocate zeroed memory."""
        return HostMemory.create(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> HostMemory:
        """Map the memory that a peer process exported."""
        return HostMemory.attach(descriptor)
