"""Who of a world gets what of a symmetric buffer: neighbours map it, other nodes have a key of it; and
who is named where a neighbour is gone before it could be mapped."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.backends.runtime.host_memory import HostPages
from mkernel.errors import PeerFailure
from mkernel.world.identity import Identity
from mkernel.world.memory import allocate


class Memory:
    """Of one rank; ``log`` says what became of it."""

    def __init__(self, rank: int, log: list[str]) -> None:
        self.rank, self.log = rank, log
        self.address = 4096 * (rank + 1)

    def export(self) -> dict[str, int]:
        return {"rank": self.rank}

    def dmabuf(self) -> None:
        return None

    def close(self) -> None:
        self.log.append(f"close {self.rank}")


class Fabric:
    """Source, session and exchange of rank ``rank``; all other ranks have published already."""

    def __init__(self, rank: int, lost: int | None = None) -> None:
        self.rank, self.lost = rank, lost
        self.log: list[str] = []
        self.published: dict[str, Any] = {}

    def allocate(self, nbytes: int) -> Any:
        assert nbytes == 64
        return Memory(self.rank, self.log)

    def attach(self, told: dict[str, int]) -> Any:
        if told["rank"] == self.lost:
            raise OSError("gone")
        return Memory(told["rank"], self.log)

    def register(self, region: int, address: int, nbytes: int) -> str:
        return f"key {region} {address} {nbytes}"

    def bind(self, region: int, peer: int, key: str) -> None:
        self.log.append(f"bind {region} {peer} {key}")

    def publish(self, key: str, value: Any) -> None:
        self.published[key] = value

    def collect(self, key: str, ranks: list[int]) -> dict[int, Any]:
        self.log.append(f"collect {key} {ranks}")
        return {each: {"rank": each} if "node" in key else f"key of {each}" for each in ranks}

    def gather(self, key: str, value: Any) -> None:
        self.log.append(f"gather {key} {value}")

    def forget(self, key: str) -> None:
        self.published.pop(key, None)


def made(fabric: Any, identity: Identity) -> Any:
    return allocate(
        7, 64, identity=identity, source=fabric, session=fabric, exchange=fabric,
        prepare=lambda memory: fabric.log.append(f"prepare {memory.rank}"),
    )  # fmt: skip


def test_neighbours_map_it_and_others_have_a_key() -> None:
    fabric = Fabric(2)
    buffer = made(fabric, Identity(2, 2, 2))  # ranks 0 and 1, 2 and 3
    assert fabric.log == [
        "prepare 2", "collect region/7/node1 [3]", "collect region/7/nic [0, 1]",
        "bind 7 0 key of 0", "bind 7 1 key of 1", "gather ready True",
    ]  # fmt: skip
    assert {rank: memory.rank for rank, memory in buffer.peers.items()} == {3: 3}
    assert (buffer.region, buffer.nbytes, buffer.local.rank) == (7, 64, 2)
    assert fabric.published == {}, "all have read it"
    buffer.close()
    assert fabric.log[-2:] == ["close 3", "close 2"]


def test_what_was_opened_is_closed_where_a_neighbour_is_gone() -> None:
    fabric = Fabric(0, lost=2)
    with pytest.raises(OSError, match="gone"):
        made(fabric, Identity(0, 1, 3))
    assert fabric.log[-2:] == ["close 1", "close 0"]
    assert "gather ready True" not in fabric.log


def test_a_peer_that_died_is_named() -> None:
    """Found by the campaign: the rank that mapped the memory took the blame."""
    gone = {"pid": 2**22 + 1, "fd": 3, "nbytes": 64, "cookie": ""}  # no process has this number
    exchange: Any = SimpleNamespace(
        publish=lambda key, value: None, collect=lambda key, ranks: {1: gone}
    )
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerFailure, match="rank 1 died, or ended its world") as raised:
        allocate(
            7, 64, identity=Identity(0, 1, 2), source=HostPages(), session=None, exchange=exchange
        )
    assert raised.value.peer == 1
    assert len(os.listdir("/proc/self/fd")) == before
