"""Ranks of one process for NIC tests: memory, a signal pad and a session each."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.runtime import _runtime as runtime
from mkernel.settings import NicSettings

SIGNALS = 256
DEADLINE_S = 60.0


def settings(**values: Any) -> NicSettings:
    """NicSettings with some values changed."""
    return NicSettings.model_validate(values)


class Memory:
    """Zeroed memory: a memfd, as symmetric memory is."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("nic-test")
        os.ftruncate(fd, nbytes)
        self.data = mmap.mmap(fd, nbytes)
        os.close(fd)
        self._hold = ctypes.c_char.from_buffer(self.data)
        self.address = ctypes.addressof(self._hold)
        self.nbytes = nbytes

    def close(self) -> None:
        del self._hold
        self.data.close()


class Rank:
    """One rank: open, then ``join`` the others, then put."""

    def __init__(
        self,
        rank: int,
        nbytes: int = 1 << 20,
        backend: NicBackend | None = None,
        device: str = "soft0",
        **values: Any,
    ) -> None:
        self.rank = rank
        self.memory = Memory(nbytes)
        self.pad_memory = Memory(runtime.pad_bytes(SIGNALS))
        self.pad = self.pad_memory.address
        runtime.pad_format(self.pad, SIGNALS)
        self.session: NicSession = (backend or Cx7Nic()).open(
            device, "soft", rank, settings(**values)
        )

    def count(self, signal: int) -> int:
        return runtime.pad_load(self.pad, signal)

    def wait(self, signal: int, value: int, timeout_s: float = DEADLINE_S) -> bool:
        return runtime.pad_wait(self.pad, signal, value, timeout_s) == runtime.WaitResult.ok

    def wait_abort(self, timeout_s: float = DEADLINE_S) -> runtime.AbortCode:
        """Waits for the pad's abort word through a wait that nobody satisfies."""
        runtime.pad_wait(self.pad, SIGNALS - 1, 1 << 60, timeout_s)
        return runtime.pad_outcome(self.pad)[0]

    def fill(self, nbytes: int, offset: int = 0) -> bytes:
        """Fresh random bytes at ``offset``; returns them."""
        data = os.urandom(nbytes)
        self.memory.data[offset : offset + nbytes] = data
        return data

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        return self.memory.data[offset : offset + nbytes]

    def close(self) -> None:
        self.session.close()
        self.memory.close()
        self.pad_memory.close()


def join(ranks: list[Rank], change_key: Callable[[str], str] = lambda key: key) -> None:
    """Connect ranks of this process all to all; ``change_key`` may spoil rank 1's key at rank 0."""
    pairs = [(a, b) for a in ranks for b in ranks if a is not b]
    addresses = {(a.rank, b.rank): a.session.address(b.rank) for a, b in pairs}
    for a, b in pairs:
        a.session.connect(b.rank, addresses[b.rank, a.rank])
    for each in ranks:
        each.session.start(each.pad, ())
    keys = {r.rank: r.session.register(0, r.memory.address, r.memory.nbytes) for r in ranks}
    for a, b in pairs:
        key = keys[b.rank]
        a.session.bind(0, b.rank, change_key(key) if (a.rank, b.rank) == (0, 1) else key)


@contextmanager
def local_ranks(count: int = 2, **values: Any) -> Iterator[list[Rank]]:
    """Joined ranks of this process."""
    ranks = [Rank(i, **values) for i in range(count)]
    try:
        join(ranks)
        yield ranks
    finally:
        for each in ranks:
            each.close()
