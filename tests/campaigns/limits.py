"""Limits that a process sets on itself, so that it runs out of something; lifted at the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_MIB = 1 << 20
_ATTRIBUTES = ctypes.c_char * 64
"""Large enough for a ``pthread_attr_t``."""
_NO_ROOM = 1 << 47
"""Bytes of a stack that no address space has."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """What is limited inside is not any more afterwards."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    before = [(kind, resource.getrlimit(kind)) for kind in kinds]
    libc = ctypes.CDLL("libc.so.6")
    stacks = _ATTRIBUTES()
    libc.pthread_getattr_default_np(stacks)
    try:
        yield
    finally:
        for kind, limit in before:
            resource.setrlimit(kind, limit)
        libc.pthread_setattr_default_np(stacks)


def exhaust(kind: str, amount: float) -> None:
    """Leave this process little. ``amount``: from nothing (0) to what may just do (1)."""
    if kind == "files-exhausted":
        free = int(40 * amount)
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        _limit(resource.RLIMIT_NOFILE, used + free)
    elif kind == "memory-exhausted":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + int(64 * _MIB * amount**3))
    elif kind == "disk-full":  # also of memory that is a file
        _limit(resource.RLIMIT_FSIZE, int(4 * _MIB * amount**3))
    elif kind == "threads-exhausted":
        libc = ctypes.CDLL("libc.so.6")
        stacks = _ATTRIBUTES()
        libc.pthread_getattr_default_np(stacks)
        libc.pthread_attr_setstacksize(stacks, ctypes.c_size_t(_NO_ROOM))
        if libc.pthread_setattr_default_np(stacks):
            raise OSError("the size of new threads' stacks cannot be set")


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
