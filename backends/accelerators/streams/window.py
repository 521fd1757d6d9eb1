"""Messages between CUDA devices of a node as puts: copy engines write to memory that peers map.

A rank's window is the world's symmetric memory: first words, then the landings, each at the same place
on every rank, so that a sender knows from its own window where something lies in a peer's. Of rank r's
window, peer p writes the words

    free[p]      the latest call for which p's own window may be written to
    arrived[p]   the latest message of p's that lies here

Words only grow, from call to call too, so none is ever cleared. Streams write them and wait for
them: no multiprocessor takes part in a message. Streams may share a hardware queue, where a wait holds
up all that was queued later. That is no danger: every rank first says that its window is free, then
puts and awaits step by step in the plan's order, puts first, so what a wait is for never lies behind
a wait for the same step or a later one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch

from mkernel.backends.accelerators.hopper.memory import bytes_at
from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.base import Call
from mkernel.plan.model import LaunchPlan

_WORD_BYTES = 8
_ALIGNMENT = 256
_MESSAGE_BITS = 20
"""Of a word: the message's number in its call; above them the call's number in the world."""
_ALL = 1 << 62
"""A word that ends every wait."""
_DRAIN_S = 60.0
_PAUSE_S = 0.001


class Landing(NamedTuple):
    """What peers write to: ``offset`` in bytes in the window, ``shape`` [source, rows, columns]."""

    offset: int
    shape: tuple[int, int, int]
    dtype: torch.dtype


def landings(plan: LaunchPlan) -> dict[str, Landing]:
    """By name, those of a plan; the same on every rank. None for ops whose messages vary in size."""
    if plan.op not in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        return {}
    gemm, world = plan.gemm, plan.world_size
    rows = -(-gemm.m // world)
    wanted: dict[str, tuple[int, torch.dtype]] = {}
    if plan.op == "all_gather_gemm":
        wanted["gathered"] = (gemm.k, getattr(torch, plan.dtype))
    else:
        wanted["slots"] = (gemm.n, torch.float32)
    if plan.op == "gemm_all_reduce":
        wanted["results"] = (gemm.n, getattr(torch, plan.out_dtype))
    found, offset = {}, _aligned(2 * world * _WORD_BYTES)
    for name, (columns, dtype) in wanted.items():
        found[name] = Landing(offset, (world, rows, columns), dtype)
        offset = _aligned(offset + prod(found[name].shape) * dtype.itemsize)
    return found


def window_bytes(plan: LaunchPlan) -> int:
    """Of a plan's window; 0 where its messages must go through torch.distributed."""
    world = plan.world_size
    if world == 1:
        return 0
    pairs = ((src, dst) for src in range(world) for dst in range(world) if src != dst)
    if any(plan.route(src, dst).kind != "p2p" for src, dst in pairs):
        return 0
    return max((_end(landing) for landing in landings(plan).values()), default=0)


class Window:
    """One call's puts and arrivals on one rank."""

    def __init__(self, call: Call) -> None:
        self._rank = call.rank
        self._base = call.workspace
        self._peers = {rank: memory.workspace for rank, memory in call.peers.items()}
        self._world = call.plan.world_size
        self._landings = landings(call.plan)
        self._call = call.number << _MESSAGE_BITS
        self._put: Counter[int] = Counter()  # messages so far, by peer
        self._awaited: Counter[int] = Counter()
        self._native = native()

    def landing(self, name: str) -> torch.Tensor:
        """What peers write to, [source, rows, columns]; contiguous, uninitialised."""
        offset, shape, dtype = self._landings[name]
        flat = bytes_at(self._base + offset, prod(shape) * dtype.itemsize)
        return flat.view(dtype).view(shape)

    def open(self, stream: Any) -> None:
        """Tell every peer that it may put. Whatever read this window in earlier calls has ended."""
        for base in self._peers.values():
            self._write(base + self._free(self._rank), self._call, stream)

    def put(self, peer: int, rows: torch.Tensor, place: torch.Tensor, stream: Any) -> None:
        """Once the peer's window is free, write ``rows`` to where ``place`` of this rank's lies in it,
        and then the message's number. Contiguous, of equal size."""
        to = self._peers[peer]
        self._wait(self._free(peer), self._call, stream)
        self._native.copy(
            to + place.data_ptr() - self._base,
            rows.data_ptr(),
            rows.nbytes,
            self._native.Engine.copy_engine,
            stream=stream.cuda_stream,
        )
        self._put[peer] += 1
        self._write(to + self._arrived(self._rank), self._call + self._put[peer], stream)

    def arrive(self, peer: int, stream: Any) -> None:
        """What is put on ``stream`` from now on sees the peer's next message."""
        self._awaited[peer] += 1
        self._wait(self._arrived(peer), self._call + self._awaited[peer], stream)

    def release(self, new_stream: Callable[[], Any], used: Sequence[Any]) -> None:
        """End every wait for peers, which may be dead, and return once the streams ``used`` are through
        with what was put on them: only then may the window be unmapped. The call has failed."""
        deadline = time.monotonic() + _DRAIN_S
        busy = list(used)
        with suppress(RuntimeError):  # a broken device runs nothing any more
            while busy and time.monotonic() < deadline:
                # Again and again: a peer that lives still may write a smaller number, and a stream may
                # share its hardware queue with one that waits.
                stream = new_stream()
                for word in range(2 * self._world):
                    self._write(self._base + word * _WORD_BYTES, _ALL, stream)
                time.sleep(_PAUSE_S)
                busy = [each for each in (*busy, stream) if not each.query()]

    def _free(self, peer: int) -> int:
        return peer * _WORD_BYTES

    def _arrived(self, peer: int) -> int:
        return (self._world + peer) * _WORD_BYTES

    def _write(self, address: int, value: int, stream: Any) -> None:
        self._native.write_word(address, value, stream=stream.cuda_stream)

    def _wait(self, word: int, value: int, stream: Any) -> None:
        self._native.wait_word(
            stream.device_index, self._base + word, value, stream=stream.cuda_stream
        )


def _end(landing: Landing) -> int:
    return landing.offset + prod(landing.shape) * landing.dtype.itemsize


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
