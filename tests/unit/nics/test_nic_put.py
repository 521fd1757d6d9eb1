"""Put-with-signal: when the signal is seen, every byte is there."""

from __future__ import annotations

import hashlib
import random
import time

import pytest
from nic_ranks import DEADLINE_S, Processes, Rank, local_ranks

from mkernel.backends.nics.session import NO_SIGNAL
from mkernel.errors import ArgumentError

SIZES = (0, 1, 7, 64, 65, 1000, 1024, 4095, 32_769, 65_536, 262_144, 1_000_003, 4 << 20)


@pytest.mark.parametrize("shared", [True, False], ids=["by-reference", "through-ring"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_are_there_when_the_signal_is(nbytes: int, shared: bool) -> None:
    with local_ranks(nbytes=8 << 20, shared=shared) as (a, b):
        local, remote = 13, 4_000_037
        sent = a.fill(nbytes, local)
        b.fill(nbytes + 2, remote - 1)
        edges = b.read(1, remote - 1), b.read(1, remote + nbytes)
        a.session.put(1, 0, local, remote, nbytes, 5, 1)
        assert b.wait(5, 1)
        assert b.read(nbytes, remote) == sent
        assert (b.read(1, remote - 1), b.read(1, remote + nbytes)) == edges
        assert b.count(5) == 1


def test_reading_before_the_signal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: on a slow link, a consumer that does not wait sees old bytes."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATENCY_NS", "100000000")
    with local_ranks() as (a, b):
        sent = a.fill(4096)
        a.session.put(1, 0, 0, 0, 4096, 0, 1)
        assert b.read(4096) != sent
        assert b.wait(0, 1)
        assert b.read(4096) == sent


@pytest.mark.parametrize("limit", [1, 100, 4096])
def test_large_puts_are_cut_into_messages(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", str(limit))
    with local_ranks(queue_depth=8) as (a, b):
        assert a.session.capabilities().max_message_bytes == limit
        sent = a.fill(20 * limit + 3 * (limit > 1))
        a.session.put(1, 0, 0, 77, len(sent), 1, 1)
        assert b.wait(1, 1)
        assert b.read(len(sent), 77) == sent
        assert b.count(1) == 1


@pytest.mark.parametrize("value", [1, 255, 256, 1000, 4080])
def test_large_values_arrive_whole(value: int) -> None:
    with local_ranks() as (a, b):
        sent = a.fill(100)
        a.session.put(1, 0, 0, 0, 100, 2, value)
        assert b.wait(2, value)
        assert b.read(100) == sent
        assert b.count(2) == value


def test_a_put_may_carry_no_signal() -> None:
    with local_ranks() as (a, b):
        sent = a.fill(5000)
        a.session.put(1, 0, 0, 0, 5000, NO_SIGNAL, 0)
        a.session.put(1, 0, 0, 0, 0, 0, 1)  # on the same path: after it
        assert b.wait(0, 1)
        assert b.read(5000) == sent


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("signal", (1, 0, 0, 0, 8, 1 << 23, 1)),
        ("signal", (1, 0, 0, 0, 8, -1, 1)),
        ("value", (1, 0, 0, 0, 8, 0, 1 << 23)),
        ("value", (1, 0, 0, 0, 8, 0, -1)),
        ("local", (1, 0, -1, 0, 8, 0, 1)),
        ("nbytes", (1, 0, 0, 0, 1 << 63, 0, 1)),
    ],
)
def test_illegal_arguments_are_named(argument: str, values: tuple[int, ...]) -> None:
    with local_ranks() as (a, _):
        with pytest.raises(ArgumentError) as caught:
            a.session.put(*values)
        assert caught.value.argument == argument
        assert a.session.failure() is None


def test_a_small_fifo_and_queue_lose_nothing() -> None:
    with local_ranks(fifo_slots=2, queue_depth=4) as (a, b):
        sent = a.fill(64 * 1000)
        for i in range(1000):
            a.session.put(1, 0, 64 * i, 64 * i, 64, i % 3, 1)
        assert [b.wait(i, 1000 // 3) for i in range(3)] == [True] * 3
        assert a.session.flush(DEADLINE_S)
        assert b.wait(0, 334)
        assert b.read(len(sent)) == sent
        assert a.session.statistics().puts == 1000


def test_flush_means_complete_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATENCY_NS", "200000000")
    with local_ranks() as (a, b):
        assert a.session.flush(1.0)  # nothing queued
        sent = a.fill(100_000)
        start = time.monotonic()
        a.session.put(1, 0, 0, 0, 100_000, 0, 1)
        assert not a.session.flush(0.02) or time.monotonic() - start > 0.2
        assert a.session.flush(DEADLINE_S)
        assert time.monotonic() - start > 0.2
        assert b.read(100_000) == sent


def test_statistics_count() -> None:
    with local_ranks() as (a, b):
        a.session.put(1, 0, 0, 0, 100, 0, 1)
        a.session.put(1, 0, 0, 0, 11, NO_SIGNAL, 0)
        a.session.put(1, 0, 0, 0, 0, 0, 1)
        assert a.session.flush(DEADLINE_S)
        assert b.wait(0, 2)
        sent, got = a.session.statistics(), b.session.statistics()
        assert (sent.puts, sent.put_bytes, sent.signals_sent) == (3, 111, 2)
        assert (sent.signals_raised, got.signals_raised, got.puts) == (0, 2, 0)
        assert sent.queue_depth == 0


def test_regions_are_added_while_puts_run() -> None:
    with local_ranks() as (a, b):
        for region in range(1, 9):
            a.session.put(1, 0, 0, 0, 100_000, 0, 1)
            start = 100_000 + region
            a.session.register(region, a.memory.address + start, 1000)
            key = b.session.register(region, b.memory.address + start, 1000)
            a.session.bind(region, 1, key)
            sent = a.fill(900, start)
            a.session.put(1, region, 0, 100, 900, region, 1)
            assert b.wait(region, 1)
            assert b.read(900, start + 100) == sent


def exchange(me: Rank, size: int) -> str:
    """Every rank puts blocks of random sizes to every other; each block carries its checksum."""
    rng = random.Random(me.rank)
    span = me.memory.nbytes // (2 * size)
    digest = hashlib.sha256()
    for step in range(1, 31):
        for peer in (p for p in range(size) if p != me.rank):
            length = rng.choice((1, 33, 1000, 5000, 70_001, span - 64))
            data = me.fill(length, peer * span)
            header = length.to_bytes(8, "little") + hashlib.sha256(data).digest()
            me.memory.data[peer * span + span - 64 : peer * span + span - 24] = header
            mine_there = (size + me.rank) * span
            me.session.put(peer, 0, peer * span, mine_there, length, NO_SIGNAL, 0)
            me.session.put(peer, 0, peer * span + span - 64, mine_there + span - 64, 40, me.rank, 1)
        for peer in (p for p in range(size) if p != me.rank):
            assert me.wait(peer, step), f"step {step}: rank {peer} sent no signal"
            at = (size + peer) * span
            header = me.read(40, at + span - 64)
            data = me.read(int.from_bytes(header[:8], "little"), at)
            assert hashlib.sha256(data).digest() == header[8:], f"step {step} from {peer}"
            digest.update(data)
            me.session.put(peer, 0, 0, 0, 0, 100 + me.rank, 1)  # the block may be overwritten
        for peer in (p for p in range(size) if p != me.rank):
            assert me.wait(100 + peer, step)
    assert me.session.flush(DEADLINE_S)
    assert me.session.failure() is None
    return digest.hexdigest()


@pytest.mark.multiprocess
@pytest.mark.parametrize("shared", [True, False], ids=["by-reference", "through-ring"])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_exchange_checksummed_blocks(size: int, shared: bool) -> None:
    ranks = Processes(exchange, size, nbytes=4 << 20, shared=shared)
    digests = [ranks.result(rank) for rank in range(size)]
    ranks.finish()
    assert len(set(digests)) == size
