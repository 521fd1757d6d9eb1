"""Messages between CUDA devices of a node as puts: copy engines write to memory that peers map.

A rank's window is the world's symmetric memory on its device: the landings, each at the same place on
every rank, so that a sender derives an address in a peer's window from its own. The accompanying
words are set words of the ranks' signal pads (``transport/signal.hpp``). Peer p writes these words
of rank r:

    free[p]      the latest call for which p's own window may be written to
    arrived[p]   the latest message of p's that lies in r's window

Streams write the words and wait for them: no multiprocessor takes part in a message. They lie in
host memory, so that the host can end all waits for a dead peer. Streams may share a hardware queue,
in which a wait delays everything that was queued later. This cannot deadlock: every rank first
announces that its window is free, then puts and awaits step by step in the plan's order, puts
first, so the put that a wait needs is never queued after a wait for the same step or a later one.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from mkernel.backends.accelerators.cuda.memory import DeviceMemory, bytes_at
from mkernel.backends.accelerators.cuda.native import native
from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.accelerators.streams.schedule import StreamsSchedule, landings
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.runtime.host_memory import page_up
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan

_DRAIN_S = 60.0
_PAUSE_S = 0.001


def words_of(world: int) -> int:
    """Return the number of words of a signal pad that all windows of a world need together."""
    return 2 * world


class Words:
    """The words of one world, on one rank, for its device to write and to wait for until ``close``."""

    def __init__(self, call: Call) -> None:
        """Map the pads. ``call``: one whose plan has the signals. CudaError if devices cannot
        address the pads."""
        self._rank, self._world = call.rank, call.plan.world_size
        self._pad = call.pad
        self._indices = range(words_of(self._world))
        self._native = native()
        self._mapped = []
        self._addresses: dict[int, list[int]] = {}  # by rank, of all its words
        for rank, pad in ((call.rank, call.pad), *((r, p.pad) for r, p in call.peers.items())):
            start, end = _transport.word_range(pad, self._indices.start, len(self._indices))
            page = start - start % mmap.PAGESIZE
            self._mapped.append(self._native.MappedPages(page, page_up(end - page)))
            self._addresses[rank] = [_transport.word_address(pad, i) for i in self._indices]

    def free(self, peer: int) -> int:
        """Return the number of the word free[peer]."""
        return peer

    def arrived(self, peer: int) -> int:
        """Return the number of the word arrived[peer]."""
        return self._world + peer

    def write(self, rank: int, word: int, value: int, stream: Any) -> None:
        """Write that rank's word once all work that was put on ``stream`` before is done."""
        self._native.write_word(self._addresses[rank][word], value, stream=stream.cuda_stream)

    def wait(self, word: int, value: int, stream: Any) -> None:
        """Make ``stream`` wait until this rank's word is ``value`` or more."""
        address = self._addresses[self._rank][word]
        self._native.wait_word(stream.device_index, address, value, stream=stream.cuda_stream)

    def close(self) -> None:
        """Unmap the pads, which may be freed then. No stream may need the words any more."""
        self._mapped.clear()

    def end_waits(self) -> None:
        """End this rank's waits for all words that no peer writes any more."""
        for index in self._indices:
            _transport.pad_end_waits(self._pad, index)


class Window:
    """One call's puts and arrivals on one rank."""

    def __init__(self, call: Call, words: Words) -> None:
        self._rank = call.rank
        self._base = call.workspace
        self._peers = {rank: memory.workspace for rank, memory in call.peers.items()}
        self._words = words
        self._landings = landings(call.plan)
        self._call = call.number
        self._put: Counter[int] = Counter()  # messages so far, by peer
        self._awaited: Counter[int] = Counter()
        self._native = native()

    def landing(self, name: str) -> torch.Tensor:
        """Return the memory that peers write to, [source, rows, columns]; contiguous,
        uninitialised."""
        found = self._landings[name]
        flat = bytes_at(self._base + found.offset, found.nbytes)
        return flat.view(getattr(torch, found.dtype)).view(found.shape)

    def open(self, stream: Any) -> None:
        """Announce to every peer that it may put. All reads of this window by earlier calls must
        have ended."""
        for peer in self._peers:
            self._words.write(peer, self._words.free(self._rank), self._number(0), stream)

    def put(self, peer: int, rows: torch.Tensor, place: torch.Tensor, stream: Any) -> None:
        """Write ``rows`` to the place in the peer's window that ``place`` has in this rank's, once
        the window is free, and then the message's number. Both are contiguous and of equal size."""
        self._words.wait(self._words.free(peer), self._number(0), stream)
        self._native.copy(
            self._peers[peer] + place.data_ptr() - self._base,
            rows.data_ptr(),
            rows.nbytes,
            stream=stream.cuda_stream,
        )
        self._put[peer] += 1
        number = self._number(self._put[peer])
        self._words.write(peer, self._words.arrived(self._rank), number, stream)

    def arrive(self, peer: int, stream: Any) -> None:
        """Make the peer's next message visible to work that is put on ``stream`` from now on."""
        self._awaited[peer] += 1
        number = self._number(self._awaited[peer])
        self._words.wait(self._words.arrived(peer), number, stream)

    def _number(self, message: int) -> int:
        """Return the value that announces a message of this call; message 0: the call may begin."""
        number: int = _transport.message_number(self._call, message)
        return number

    def abandon(self, used: Sequence[Any]) -> bool:
        """End every wait for peers, which may be dead, after the call has failed, until the streams
        ``used`` have finished their work. The window may be unmapped only after it returned True."""
        deadline = time.monotonic() + _DRAIN_S
        with suppress(RuntimeError):  # a broken device runs nothing any more
            while time.monotonic() < deadline:
                self._words.end_waits()  # again and again: a peer that lives may still write
                if all(stream.query() for stream in used):
                    return True
                time.sleep(_PAUSE_S)
        return False


class Windows:
    """One rank's windows; they live as long as the world. A rank uses one device, that of its first
    call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._index: int | None = None  # of the device that the memory lies on
        self._words: Words | None = None

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context of the tensors' device. ArgumentError if it differs from the memory's."""
        for name, tensor in tensors.items():
            if self._index not in (None, tensor.get_device()):
                raise ArgumentError(
                    f"{name}.device",
                    tensor.device,
                    f"cuda:{self._index}, where what peers write to lies in this world",
                )
        return self._device.at(next(iter(tensors.values())).device)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory of the current device. OSError if it has none that peers can map."""
        self._index = self._device.index()
        with _advice():
            return DeviceMemory.create(nbytes, self._index)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory. OSError if it is gone, or the device cannot reach it."""
        if self._index is None:
            raise OSError("a peer's memory is mapped for the device of own memory; there is none")
        with _advice():
            return DeviceMemory.attach(descriptor, self._index)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return the memory and signals that a plan needs whose messages are puts."""
        nbytes = plan.part(StreamsSchedule).window_bytes
        return Workspace((nbytes,), signals=words_of(plan.world_size))

    def words(self, call: Call) -> Words | None:
        """Return the words of a call whose workspace is a window; None if it is not. OSError if the
        device cannot address the pads."""
        if not call.plan.part(StreamsSchedule).window_bytes:
            return None
        if self._words is None:
            with _advice():
                self._words = Words(call)
        return self._words

    def close(self) -> None:
        """Release the words as the world ends; none of its calls runs any more."""
        if self._words is not None:
            self._words.close()


@contextmanager
def _advice() -> Iterator[None]:
    try:
        yield
    except (OSError, native().CudaError) as error:
        raise OSError(
            f"{error}; MKERNEL_STREAMS_COPIES=0 on all ranks does without such memory"
        ) from error
