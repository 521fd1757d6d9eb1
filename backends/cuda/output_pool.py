"""Outputs that peers may write, as tensors of torch's own allocator (``output_memory.hpp``)."""

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

from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.contracts.output_memory import is_torchs
from mkernel.backends.cuda.memory import DeviceMemory

if TYPE_CHECKING:
    from mkernel.backends.cuda import _cuda

_allocators: dict[int, Any] = {}
"""By number; torch calls them as long as it has memory of theirs, which may be after all worlds."""
_captured: list[Any] = []
"""Pools that graphs of the user's have, which outlive their worlds."""
_telling = threading.Lock()
"""Held while torch's allocator is told of pools: it refuses two threads that use one, and ends the
process where one goes while another thread uses any."""


_worlds: weakref.WeakSet[OutputPool] = weakref.WeakSet()


@atexit.register
def _keep_those_of_graphs() -> None:
    """As the interpreter ends, in whose last steps a pool may go before the graph that has it."""
    kept = [*_captured, *(each.pool for world in _worlds for each in world._of_graphs)]
    for pool in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


class _OfGraphs:
    """A pool that was made for graphs. Torch ends the process where one goes that a graph has."""

    def __init__(self, pool: Any) -> None:
        self.pool, self._used = pool, False

    def look(self) -> None:
        """See whether a graph has it."""
        self._used |= self.pool.use_count() > 1

    def over(self) -> bool:
        """Whether graphs had it and none has it any more: its memory may go."""
        self.look()
        return self._used and self.pool.use_count() == 1


class OutputPool:
    """One world's, on one device. Tensors may outlive it."""

    def __init__(self, device: int) -> None:
        """Where as many worlds of the process have one as can, or torch has no such pools, outputs are
        torch's own."""
        from mkernel.backends.cuda import _cuda

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
        """One more range: this rank's memory, and where each rank's is mapped here. Whether there may
        be yet more, which is so on all ranks or none."""
        from mkernel.backends.cuda import _cuda

        assert isinstance(own, DeviceMemory)
        self.memory.add_range(own.shared(), [everywhere[rank] for rank in sorted(everywhere)])
        self._room += own.nbytes
        return self.memory.ranges < _cuda.MOST_OUTPUT_RANGES

    def graph_pool(self) -> tuple[int, int] | None:
        """The id of a pool for a graph's memory, of the same ranges. Not of :meth:`empty`'s pool: what
        is free there may be memory that a replay writes."""
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
        """A row-major tensor without contents on the current stream. While a graph is captured its own
        pool has it, and torch's own where torch's compilers see to that, and where as many live as the
        ranges have room for: what a pool takes besides is of no use to anything else before the world
        ends."""
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
        """Let go of what neither tensors nor graphs have. Twice is harmless."""
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
    """Of pools that no graph has any more."""
    _captured[:] = [pool for pool in _captured if pool.use_count() > 1]


def _torch_has_pools() -> bool:
    """Whether torch frees a pool's memory by the pool's own allocator: from 2.8 on, unless the user has
    chosen another allocator for all memory."""
    routes = hasattr(torch.cuda.memory, "_cuda_beginAllocateCurrentThreadToPool")
    return routes and torch.cuda.get_allocator_backend() == "native"


def _allocator(number: int) -> Any:
    """What torch takes memory with that number by."""
    from mkernel.backends.cuda import _cuda

    if number not in _allocators:
        names = (f"mkernel_{what}_outputs_{number}" for what in ("allocate", "release"))
        _allocators[number] = torch.cuda.memory.CUDAPluggableAllocator(_cuda.__file__, *names)
    return _allocators[number]
