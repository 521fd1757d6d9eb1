"""Memory of ranks that have left a broken world, into which a rank that is still stopped must not write
when it goes on."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Collection, Iterator

_POISON = b"\xa5" * mmap.PAGESIZE
SYMMETRIC = re.compile(r"/memfd:mkernel-(\d+) \(deleted\)")
"""Finds symmetric memory in /proc, with its owner; a table of heartbeats is none."""


class DeadMemory:
    """Symmetric memory of some processes, held beyond the end of their world."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}  # descriptor and owner's process, by inode
        self._poisoned: set[tuple[int, int]] | None = None  # pages: descriptor and offset

    def keep(self, processes: Collection[int]) -> None:
        """What these processes own by now."""
        for process in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for number in os.listdir(folder := f"/proc/{process}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        self._keep(f"{folder}/{number}", process)

    def _keep(self, path: str, process: int) -> None:
        name = SYMMETRIC.fullmatch(os.readlink(path))
        if name is None or int(name[1]) != process or os.stat(path).st_ino in self._files:
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._files[os.fstat(fd).st_ino] = (fd, process)

    def poison(self) -> None:
        """What was ever written of it; once: nobody who owns it uses it any more."""
        if self._poisoned is None:
            fds = [fd for fd, _ in self._files.values()]
            self._poisoned = {(fd, offset) for fd in fds for offset in _pages(fd)}
            for fd, offset in self._poisoned:
                os.pwrite(fd, _POISON, offset)

    def written(self) -> list[str]:
        """What has been written since, in sentences; nothing of it is held any more."""
        found = []
        for fd, owner in self._files.values():
            for offset in _pages(fd) if self._poisoned is not None else ():
                fresh = (fd, offset) not in (self._poisoned or ())
                before = bytes(mmap.PAGESIZE) if fresh else _POISON
                pairs = zip(before, os.pread(fd, mmap.PAGESIZE, offset), strict=True)
                wrong = [at for at, (was, now) in enumerate(pairs) if was != now]
                if wrong:
                    found.append(
                        f"{len(wrong)} bytes of process {owner}, whose world has ended, were written, "
                        f"the first at {offset + wrong[0]} of {os.fstat(fd).st_size}"
                    )
            os.close(fd)
        self._files.clear()
        return found


def _pages(fd: int) -> Iterator[int]:
    """Offsets of a file's pages but for holes."""
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: no data is left
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield from range(start, end, mmap.PAGESIZE)
