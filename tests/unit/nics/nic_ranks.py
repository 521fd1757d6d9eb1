"""Ranks for NIC tests: memory, a signal pad and a session each, in one process or in several."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.session import NativeSession
from mkernel.backends.runtime import _runtime as runtime
from mkernel.settings import NicSettings

SIGNALS = 256
DEADLINE_S = 60.0


def settings(**values: Any) -> NicSettings:
    """NicSettings with some values changed."""
    return NicSettings.model_validate(values)


class Memory:
    """Zeroed memory: a memfd as symmetric memory is, or private (``shared=False``)."""

    def __init__(self, nbytes: int, shared: bool = True) -> None:
        fd = -1
        if shared:
            fd = os.memfd_create("nic-test")
            os.ftruncate(fd, nbytes)
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.data = mmap.mmap(fd, nbytes, flags=flags)
        if fd >= 0:
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
        shared: bool = True,
        backend: NicBackend | None = None,
        device: str = "soft0",
        **values: Any,
    ) -> None:
        self.rank = rank
        self.memory = Memory(nbytes, shared)
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

    def inject_failure(self, peer: int) -> None:
        cast(NativeSession, self.session).inject_failure(peer)

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


def _child(
    body: Callable[..., Any], rank: int, size: int, pipe: Connection, arguments: Any
) -> None:
    me = Rank(rank, **arguments)
    peers = [p for p in range(size) if p != rank]
    pipe.send({p: me.session.address(p) for p in peers})
    for p, address in pipe.recv().items():
        me.session.connect(p, address)
    me.session.start(me.pad, ())
    pipe.send(me.session.register(0, me.memory.address, me.memory.nbytes))
    for p, key in pipe.recv().items():
        me.session.bind(0, p, key)
    pipe.send("joined")
    pipe.recv()
    try:
        pipe.send(("result", body(me, size)))
    except BaseException as error:  # to the parent, which raises it
        pipe.send(("error", repr(error)))
    pipe.recv()
    me.close()


class Processes:
    """``size`` rank processes that run ``body(rank, size)`` each."""

    def __init__(self, body: Callable[..., Any], size: int, **arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mkernel.backends.nics.session", "nic_ranks"])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_child, args=(body, rank, size, theirs, arguments))
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        addresses = [self.receive(rank) for rank in range(size)]
        for rank in range(size):
            self.pipes[rank].send({p: addresses[p][rank] for p in range(size) if p != rank})
        keys = [self.receive(rank) for rank in range(size)]
        for rank in range(size):
            self.pipes[rank].send({p: keys[p] for p in range(size) if p != rank})
        for rank in range(size):
            assert self.receive(rank) == "joined"
        for rank in range(size):
            self.pipes[rank].send("go")

    def receive(self, rank: int, timeout_s: float = 60.0) -> Any:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def result(self, rank: int) -> Any:
        kind, value = self.receive(rank)
        assert kind == "result", value
        return value

    def finish(self) -> None:
        """Let the ranks close; every one must end by itself."""
        for pipe in self.pipes:
            with suppress(OSError):  # a killed rank
                pipe.send("end")
        for process in self.processes:
            process.join(DEADLINE_S)
            alive = process.is_alive()
            process.kill()
            process.join()
            assert not alive, "a rank did not end"
