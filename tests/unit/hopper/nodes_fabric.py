"""The native module for tests of parts between nodes on the host: puts of a NIC as
kernels/moe/far_slots.hpp and device/network.cuh say, beside what ranks of a node do
(``parts_fabric``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from parts_fabric import BYTES, Here, PartsFabric


@dataclass(frozen=True)
class Slots:
    """Stands for FarSlots."""

    offset: int
    bytes: int
    flag: int


class NodesFabric(PartsFabric):
    """Stands for ``_kernels`` in all ranks of several nodes. A put is there at once, and its word
    counts it; whoever lands it waits for that count. ``areas``: what NICs read and write."""

    NETWORK_WORDS = 1 << 17
    FarSlots = Slots

    def __init__(self, nodes: int, ranks: int, staged: bool = True) -> None:
        super().__init__(nodes * ranks)
        self.ranks, self.staged = ranks, staged
        self.areas = [
            torch.full((BYTES,), 0xFF, dtype=torch.uint8) if staged else memory
            for memory in self.memory
        ]
        self.loaded: list[int] = []
        self._words: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], int] = {}

    def far(self, rank: int) -> list[int]:
        """The ranks of other nodes."""
        return [each for each in range(self.world) if each // self.ranks != rank // self.ranks]

    def DeviceWorld(self, workspaces: list[int], rank: int, *_: Any) -> Any:
        far = self.far(rank)
        assert workspaces == [
            0 if each in far else self.workspace(each) for each in range(self.world)
        ]
        return Here(rank)

    def load_parts(self, device: int) -> None:
        self.loaded.append(device)

    def push_part(self, device: int, here: Here, peer: int, *what: Any) -> None:
        assert peer not in self.far(here.rank)
        super().push_part(device, here, peer, *what)

    def fill_outbox(
        self, device: int, here: Here, from_: int, nbytes: int, outbox: int, stream: int
    ) -> None:
        self.told[here.rank].append(("fill", nbytes, outbox, stream))
        assert outbox + nbytes <= BYTES
        ctypes.memmove(self.areas[here.rank].data_ptr() + outbox, from_, nbytes)

    def send_far(self, device: int, here: Here, from_: int, slots: Slots, stream: int) -> None:
        self.told[here.rank].append(("send_far", slots, stream))
        own = slots.offset + here.rank * slots.bytes
        ctypes.memmove(self.areas[here.rank].data_ptr() + own, from_, slots.bytes)
        self._put(here, own, 0, slots)

    def send_outbox(self, device: int, here: Here, outbox: int, slots: Slots, stream: int) -> None:
        self.told[here.rank].append(("send_outbox", outbox, slots, stream))
        self._put(here, outbox, slots.bytes, slots)

    def land_far(self, device: int, here: Here, slots: list[Slots], stream: int) -> None:
        rank = here.rank
        self.told[rank].append(("land", slots, stream))
        for each in slots:
            for source in self.far(rank):
                key = rank, each.flag + source
                with self._raised:
                    self._seen[key] = self._seen.get(key, 0) + 1
                    come = self._raised.wait_for(
                        lambda key=key: self._words.get(key, 0) >= self._seen[key], 30
                    )
                    assert come, f"rank {rank} waits for a put of {source}"
                    at = each.offset + source * each.bytes
                    if self.staged:
                        landed = self.memory[rank][at : at + each.bytes]
                        landed.copy_(self.areas[rank][at : at + each.bytes])
                    self._flags[key] = here.number
                    self._raised.notify_all()

    def _put(self, here: Here, at: int, step: int, slots: Slots) -> None:
        to = slots.offset + here.rank * slots.bytes
        assert max(to, at + (self.world - 1) * step) + slots.bytes <= BYTES
        for peer in self.far(here.rank):
            first = at + peer * step
            put = self.areas[here.rank][first : first + slots.bytes]
            with self._raised:
                self.areas[peer][to : to + slots.bytes] = put
                key = peer, slots.flag + here.rank
                self._words[key] = self._words.get(key, 0) + 1
                self._raised.notify_all()

    def _end(self) -> None:
        super()._end()
        assert self._words == self._seen  # every put was waited for before the call was over
        super()._end()
