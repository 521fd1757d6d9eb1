"""Base of accelerator backends written in Python, whose kernels are functions on threads of the
host.

It has everything that such backends share: memory, a call's two kernels in every view, waits with a
deadline, and puts to peers, which are the same for ranks of this node and of others. A subclass
adds its capabilities, its workspace and the two kernels.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ctypes import c_char, memmove
from typing import Any, NamedTuple

import torch

from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call, Launch
from mkernel.backends.contracts.instrumented import Instrumented, InstrumentedLaunch, LaunchTimes
from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.topology.model import Accelerator

_NO_CHUNK = 0xFFFFFFFF


class Signals(NamedTuple):
    """The signals of a call, each with the peer that adds to it. Every call adds 1 to each of them.

    ``arrivals``: data of peers has come, by chunk. ``releases``: a peer has read this rank's data.
    """

    arrivals: Sequence[tuple[int, int]]
    releases: Sequence[tuple[int, int]]


class Ended(Exception):
    """The end of a kernel whose wait was aborted or passed its deadline."""


class Kernel:
    """A kernel's view of its call. ``peers``: all other ranks."""

    def __init__(self, call: Call, waiter: _transport.Waiter) -> None:
        self.call = call
        self.rank = call.rank
        self.peers = [rank for rank in range(call.plan.world_size) if rank != call.rank]
        self._waiter = waiter

    def area(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's workspace as a tensor: the first area in even epochs, the second in
        odd ones."""
        at = self.call.workspace + self.call.areas[self.call.epoch % 2]
        memory = (c_char * (math.prod(shape) * dtype.itemsize)).from_address(at)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def put(self, peer: int, part: torch.Tensor, signal: int) -> None:
        """Copy a part of :meth:`area`, contiguous rows, to the same place at a peer, and then add 1
        to the peer's signal. The part must not change until the peer has released it."""
        offset = part.data_ptr() - self.call.workspace
        self._put(peer, offset, part.numel() * part.itemsize, signal)

    def tell(self, peer: int, signal: int) -> None:
        """Add 1 to a signal of a peer, after everything that this kernel has done before."""
        self._put(peer, 0, 0, signal)

    def wait(self, signal: int, peer: int, chunk: int = _NO_CHUNK, amount: int = 1) -> None:
        """Wait until this call has added ``amount`` to a signal of this rank; -1: until the calls
        before it have added all but one. Raises Ended at the deadline, or if the world is aborted."""
        call, computes = self.call, self._waiter == _transport.Waiter.compute_kernel
        if computes and call.view == "compute_only":  # puts still need areas that peers have read
            return
        value = max(0, _transport.pad_expected(call.pad, signal) + amount)
        self._check(
            _transport.pad_wait(call.pad, signal, value, call.timeout_s, self._who(peer, chunk))
        )

    def _put(self, peer: int, offset: int, nbytes: int, signal: int) -> None:
        call = self.call
        if peer in call.peers:
            if _transport.pad_aborted(call.pad) or time.monotonic() > call.begun_s + call.timeout_s:
                return  # the peer may have left: a rank that was stopped writes into no memory of it
            there = call.peers[peer]
            memmove(there.workspace + offset, call.workspace + offset, nbytes)
            _transport.pad_add(there.pad, signal, 1)
            return
        command = (peer, call.region, offset, offset, nbytes, signal, 1)
        who = self._who(peer, _NO_CHUNK)
        self._check(_transport.fifo_push(call.fifo, call.pad, command, call.timeout_s, who))

    def _who(self, peer: int, chunk: int) -> _transport.Diagnosis:
        who = _transport.Diagnosis()
        who.waiter, who.peer, who.chunk, who.op = self._waiter, peer, chunk, self.call.number
        return who

    @staticmethod
    def _check(result: _transport.WaitResult) -> None:
        if result != _transport.WaitResult.ok:
            raise Ended


class HostLaunch(Launch, InstrumentedLaunch):
    """A launch that runs both kernels of a call on two threads."""

    def __init__(self, call: Call, backend: HostAccelerator, pool: ThreadPoolExecutor) -> None:
        self._call: Call | None = call
        self._signals = backend.signals(call)
        self._seconds: dict[str, float] = {}
        comm = Kernel(call, _transport.Waiter.comm_kernel)
        compute = Kernel(call, _transport.Waiter.compute_kernel)
        first = pool.submit(self._timed, "comm", backend.communicate, comm)
        before = first if call.view == "sequential" else None
        self._kernels = [
            first,
            pool.submit(self._timed, "compute", backend.compute, compute, before),
        ]

    def wait(self, timeout_s: float) -> bool:
        """Return True once both kernels have returned; raise what they raised."""
        if wait(self._kernels, timeout_s).not_done:
            return False
        for kernel in self._kernels:
            kernel.result()
        call, self._call = self._call, None
        if call is not None and not _transport.pad_aborted(call.pad):
            for signal, _ in (*self._signals.arrivals, *self._signals.releases):
                _transport.pad_move_on(call.pad, signal, 1)
        return True

    def times(self) -> LaunchTimes:
        """Return the time of each kernel from its begin, without the time for which it waited for
        the other."""
        return LaunchTimes(self._seconds)

    def _timed(
        self,
        name: str,
        run: Callable[[Kernel], None],
        kernel: Kernel,
        before: Future[None] | None = None,
    ) -> None:
        try:
            if before is not None:  # sequential: all has come before anything is computed
                wait([before])
                for signal, peer in self._signals.arrivals:
                    kernel.wait(signal, peer)
            start = time.perf_counter()
            run(kernel)
            self._seconds[name] = time.perf_counter() - start
        except Ended:
            return


class HostAccelerator(AcceleratorBackend, Instrumented):
    """An accelerator backend that runs its ops in Python on CPUs. A subclass defines
    :meth:`signals`, :meth:`communicate` and :meth:`compute`, and what the contract requires beyond
    memory and launches."""

    _pool: ThreadPoolExecutor

    @abstractmethod
    def signals(self, call: Call) -> Signals:
        """Return every signal that the call adds to on this rank, in whatever view it runs. All
        plans share the signals, and the same single rank adds to a signal in every plan."""

    @abstractmethod
    def communicate(self, kernel: Kernel) -> None:
        """Run the comm kernel, on its thread: wait for releases, copy, put."""

    @abstractmethod
    def compute(self, kernel: Kernel) -> None:
        """Run the compute kernel, on its thread: wait for each arrival before its use, release."""

    def open(self, device: Accelerator) -> None:
        """Start a pool of two threads for the calls of a world, which run one after another."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix=f"mkernel-{self.name}")

    def close(self, timeout_s: float) -> bool:
        """End the threads; their waits ended with the world."""
        self._pool.shutdown(wait=False)
        return True

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate pages of the host."""
        return HostMemory.create(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map the host pages that a peer exported."""
        return HostMemory.attach(descriptor)

    def launch(self, call: Call) -> Launch:
        """Start both kernels."""
        return HostLaunch(call, self, self._pool)
