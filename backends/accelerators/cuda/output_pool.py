"""Pools of outputs that peers may write, as tensors of torch's own allocator
(``output_memory.hpp``)."""

from __future__ import annotations

import atexit
import ctypes
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.contracts.output_memory import is_torchs

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _cuda

_allocators: dict[int, Any] = {}
"""The allocators by number. torch calls them as long as it has memory of theirs, possibly after all
worlds have ended."""
_captured: list[Any] = []
"""Pools that the user's graphs use, which outlive their worlds."""
_telling = threading.Lock()
"""Held while torch's allocator is given or loses a pool. The allocator refuses two threads that use
one pool, and aborts the process if a pool is destroyed while another thread uses any."""


_worlds: weakref.WeakSet[OutputPool] = weakref.WeakSet()


@atexit.register
def _keep_those_of_graphs() -> None:
    """Keep the graphs' pools for ever as the interpreter ends, because in its last steps a pool may
    be freed before the graph that uses it."""
    kept = [*_captured, *(each.pool for world in _worlds for each in world._of_graphs)]
    for pool in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


class _OfGraphs:
    """A pool that was made for graphs. torch aborts the process if such a pool is freed while a
    graph uses it."""

    def __init__(self, pool: Any) -> None:
        self.pool, self._used = pool, False

    def look(self) -> None:
        """Record whether a graph uses the pool."""
        self._used |= self.pool.use_count() > 1

    def over(self) -> bool:
        """Return whether graphs used the pool and none uses it any more, so that its memory may be
        freed."""
        self.look()
        return self._used and self.pool.use_count() == 1


class OutputPool:
    """One world's pool of outputs on one device. Tensors may outlive it."""

    def __init__(self, device: int) -> None:
        """Create the pool. If the maximum number of worlds of the process have one already, or
        torch has no such pools, outputs come from torch's own allocator."""
        from mkernel.backends.accelerators.cuda import _cuda

        self.memory: _cuda.OutputMemory = _cuda.OutputMemory(device)
        self._device = device
        self._number = self.memory.number() if _torch_has_pools() else -1
        self.pool: Any = self._new_pool() if self._number >= 0 else None
        self._of_graphs: list[_OfGraphs] = []
        _worlds.add(self)
        self._room = 0  # bytes of all ranges
        self._alive: list[tuple[StorageWeakRef, int]] = []  # outputs of the pool, and their bytes
        with _telling:
            _let_go()

    def add(self, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        """Add one more range: this rank's memory, and the addresses here of every rank's. Returns
        whether further ranges are possible, which is the same on all ranks."""
        from mkernel.backends.accelerators.cuda import _cuda

        assert isinstance(own, DeviceMemory)
        self.memory.add_range(own.shared(), [everywhere[rank] for rank in sorted(everywhere)])
        self._room += own.nbytes
        return self.memory.ranges < _cuda.MOST_OUTPUT_RANGES

    def graph_pool(self) -> tuple[int, int] | None:
        """Return the id of a new pool over the same ranges for a graph's memory. It differs from
        the pool of :meth:`empty`, in which free memory may be memory that a replay writes."""
        if self.pool is None:
            return None
        with _telling:
            if not torch.cuda.is_current_stream_capturing():  # as for another thread's use
                self._of_graphs = [each for each in self._of_graphs if not each.over()]
            made = self._new_pool()
            self._of_graphs.append(_OfGraphs(made))
        found: tuple[int, int] = made.id
        return found

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised row-major tensor on the current stream.

        It comes from the graph's own pool while a graph is captured. It comes from torch's
        allocator if torch's compilers plan the memory, or if live outputs fill the ranges: whatever
        a pool takes beyond them is useless for anything else until the world ends."""
        if torch.cuda.is_current_stream_capturing():
            for each in self._of_graphs:
                each.look()
            return torch.empty(shape, dtype=dtype, device=self._device)
        nbytes = math.prod(shape) * dtype.itemsize
        with _telling:
            if self.pool is not None and not is_torchs() and self._has_room(nbytes):
                with torch.cuda.use_mem_pool(self.pool, self._device):
                    made = torch.empty(shape, dtype=dtype, device=self._device)
                storage = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
                self._alive.append((storage, nbytes))
                return made
        return torch.empty(shape, dtype=dtype, device=self._device)

    def close(self) -> None:
        """Release what neither tensors nor graphs hold. Calling it twice is harmless."""
        with _telling:
            if self.pool is None:
                return
            self.pool = None
            _captured.extend(each.pool for each in self._of_graphs)
            self._of_graphs.clear()
            _let_go()
        self.memory.retire(self._number)

    def _has_room(self, nbytes: int) -> bool:
        alive = self._alive
        self._alive = [one for one in alive if not one[0].expired()]  # type: ignore[no-untyped-call]
        return sum(each for _, each in self._alive) + nbytes <= self._room

    def _new_pool(self) -> Any:
        with torch.cuda.device(self._device):  # a pool is the current device's
            return torch.cuda.MemPool(_allocator(self._number).allocator())


def _let_go() -> None:
    """Release pools that no graph uses any more."""
    _captured[:] = [pool for pool in _captured if pool.use_count() > 1]


def _torch_has_pools() -> bool:
    """Return whether torch frees a pool's memory by the pool's own allocator: it does from 2.8 on,
    unless the user has chosen another allocator for all memory."""
    routes = hasattr(torch.cuda.memory, "_cuda_beginAllocateCurrentThreadToPool")
    return routes and torch.cuda.get_allocator_backend() == "native"


def _allocator(number: int) -> Any:
    """Return the torch allocator for memory of that number."""
    from mkernel.backends.accelerators.cuda import _cuda

    if number not in _allocators:
        names = (f"mkernel_{what}_outputs_{number}" for what in ("allocate", "release"))
        _allocators[number] = torch.cuda.memory.CUDAPluggableAllocator(_cuda.__file__, *names)
    return _allocators[number]
