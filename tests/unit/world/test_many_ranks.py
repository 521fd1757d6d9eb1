"""Worlds of many hosts, whose watchdogs look in turn at a store that a server of torch's serves: how
many requests they make, and who is told of what. The clock is the test's own, and no thread runs."""

from __future__ import annotations

import itertools
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from mkernel.world import watchdog
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.heartbeats import HeartbeatTable
from mkernel.world.watchdog import Notice, Peer, Watchdog

HOSTS, EACH = 64, 8
RANKS = HOSTS * EACH
HEARTBEAT_S = 0.2
SILENCE_S = 50 * HEARTBEAT_S
REQUESTS = 4
"""A host's requests in a heartbeat: whether there is an abort notice, its own heartbeats, whether there
are the next host's, and these."""


class Counted:
    """A client of a store that counts its requests."""

    requests = 0

    def __init__(self, port: int) -> None:
        self._client = PrefixStore("world", TCPStore("127.0.0.1", port, wait_for_workers=False))

    def __getattr__(self, name: str) -> Any:
        Counted.requests += name != "has_extended_api"
        return getattr(self._client, name)


class World:
    """The watchdogs of ``hosts`` hosts of ``each`` ranks."""

    def __init__(self, hosts: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.failed: set[int] = set()
        self.told: dict[int, Notice] = {}
        self.each = each
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        peers = {rank: Peer(rank, f"host{rank // each}/boot", 1) for rank in range(hosts * each)}
        client: Any = Counted(self._server.port)
        self.watchdogs: list[Watchdog] = []
        with pytest.MonkeyPatch.context() as patch:  # hundreds of ranks have too many descriptors
            numbers = itertools.count(-1, -1)
            patch.setattr(os, "pipe2", lambda flags: (next(numbers), next(numbers)))
            patch.setattr(os, "pidfd_open", lambda pid: next(numbers))
            for host in range(hosts):
                table = HeartbeatTable.create(range(host * each, (host + 1) * each))
                for rank in table.ranks:
                    made = Watchdog(
                        Bootstrap(client, b"secret"), rank, peers, table, HEARTBEAT_S,
                        lambda: (7, "key", ""), lambda: None, lambda notice: None,
                    )  # fmt: skip
                    made._report()
                    self.watchdogs.append(made)
        self._order = random.Random(7).sample(range(len(peers)), len(peers))
        Counted.requests = 0

    def host(self, number: int) -> range:
        """The ranks of a host."""
        return range(number * self.each, (number + 1) * self.each)

    def heartbeat(self, after_s: float = HEARTBEAT_S, died: int | None = None) -> None:
        """Let each rank that goes on look once, in an order without sense, so much later. ``died``: the
        rank whose death the kernel tells the others of its host."""
        self.now += after_s
        for rank in self._order:
            if rank in self.failed or rank in self.told:
                continue
            near = died is not None and rank // self.each == died // self.each
            told = self.watchdogs[rank]._look([died] if near and died is not None else [])
            if told is not None:
                self.told[rank] = told
                self.watchdogs[rank]._table.mark_failed()  # as the watchdog's thread does

    def until_told(self) -> None:
        """Let them look until one is told of those that have failed just now, which they must be in
        time. The clock leaps over most of the silence, in which every rank seems late to the others.
        """
        failed_at = self.now
        self.heartbeat()  # what was still reported is seen
        for _ in range(2):
            self.heartbeat(0.45 * SILENCE_S)
            self.heartbeat()
        while not self.told:
            assert self.now < failed_at + SILENCE_S + 3 * HEARTBEAT_S
            before = Counted.requests
            self.heartbeat()
            most = REQUESTS * len(self.watchdogs) / self.each
            assert self.told or Counted.requests - before <= most
        assert self.now > failed_at + SILENCE_S

    def only_notice(self) -> Notice:
        """Return what all that go on were told."""
        assert self.told.keys() == {*range(len(self.watchdogs))} - self.failed
        (text,) = {str(told.to_json()) for told in self.told.values()}
        notice = next(iter(self.told.values()))
        assert str(notice.to_json()) == text
        return notice


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(HOSTS, EACH, monkeypatch)


@pytest.mark.parametrize(("hosts", "each"), [(HOSTS, EACH), (8, EACH), (1, EACH), (HOSTS, 1)])
def test_requests_grow_with_the_hosts_alone(
    hosts: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first heartbeat on."""
    world = World(hosts, each, monkeypatch)
    for count in range(1, 6):
        world.heartbeat()
        assert Counted.requests <= count * REQUESTS * hosts
    assert not world.told


def test_a_dead_rank_is_named_on_all_others(large: World) -> None:
    for _ in range(2):
        large.heartbeat()
    large.failed = {137}
    large.heartbeat(died=137)
    for _ in range(2):  # who asks for a host hears of it in one, and the host's others in the next
        large.heartbeat()
    notice = large.only_notice()
    assert (notice.kind, notice.rank) == ("PeerFailure", 137)
    assert notice.message.startswith("rank 137 (process 1) died")


@pytest.mark.parametrize("dead", [{40}, {63, 0, 20}], ids=str)
def test_a_dead_host_is_named_on_all_others(large: World, dead: set[int]) -> None:
    """If several die at once, one of them is named."""
    for _ in range(2):
        large.heartbeat()
    large.failed = {rank for host in dead for rank in large.host(host)}
    large.until_told()
    for _ in range(2):
        large.heartbeat()
    notice = large.only_notice()
    first = notice.rank
    named = f"host host{first // EACH} ({', '.join(map(str, range(first, first + EACH)))})"
    assert (notice.kind, first // EACH in dead, first % EACH) == ("PeerFailure", True, 0)
    assert named in notice.message


def test_a_rank_that_stops_is_named_on_all_others(large: World) -> None:
    """It is the one that asks for its host; its process lives, so that its host cannot tell."""
    for _ in range(2):
        large.heartbeat()
    large.failed = {80}
    large.until_told()
    for _ in range(2):
        large.heartbeat()
    notice = large.only_notice()
    assert (notice.kind, notice.rank) == ("PeerFailure", 80)
    assert "others of host host10 have not" in notice.message


def test_ranks_that_leave_are_missed_by_nobody(large: World) -> None:
    """Nor does who remains ask for them again and again."""
    large.heartbeat()
    remains = {5, RANKS - 1}
    large.failed = {*range(RANKS)} - remains
    for rank in large.failed:
        large.watchdogs[rank]._say_left()
    asked = []
    for _ in range(5):
        before = Counted.requests
        large.heartbeat(SILENCE_S / 2)
        asked.append(Counted.requests - before)
    assert not large.told
    assert asked[1:] == [2 * REQUESTS] * 4
    before = Counted.requests
    for rank in remains:
        assert large.watchdogs[rank].left(range(RANKS)) == large.failed
    assert Counted.requests - before <= 2 * 2  # all nodes at once
