"""The ``efa`` backend on the software device, which reorders and places bytes twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from nic_ranks import DEADLINE_S, Rank, join, local_ranks, settings

from mkernel.backends.contracts.nic import NO_SIGNAL, PUT_VALUE_MAX
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.runtime import _runtime as runtime
from mkernel.errors import ArgumentError, BackendUnavailable

_SLOT = 4096


@contextmanager
def efa_ranks(count: int = 2, **values: Any) -> Iterator[list[Rank]]:
    with local_ranks(count, backend=EfaNic(), **values) as ranks:
        yield ranks


def test_it_claims_no_order() -> None:
    with efa_ranks() as (a, _):
        claims = a.session.capabilities()
        assert not claims.ordered
        assert claims.immediate_data
        assert (claims.max_sge, claims.max_inline_bytes) == (1, 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("message", [100, 1 << 30], ids=["parts", "whole"])
def test_a_seen_signal_means_a_whole_put(
    seed: int, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more puts than there are groups; each in up to 41 messages, or in one."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", str(message))
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SEED", str(seed))
    monkeypatch.setenv("MKERNEL_SOFTVERBS_DUPLICATES", "50")
    draw = random.Random(seed)
    with efa_ranks() as (a, b):
        for _ in range(2):
            sent = a.fill(240 * _SLOT)
            b.memory.data[: 240 * _SLOT] = bytes(each ^ 0xFF for each in sent)
            start = b.count(0)
            sizes = [draw.randint(1, _SLOT) for _ in range(240)]
            for i, size in enumerate(sizes):
                a.session.put(1, 0, i * _SLOT, i * _SLOT, size, i, 1)
            for i, size in enumerate(sizes):
                assert b.wait(i, start + 1)
                at = i * _SLOT
                assert b.read(size, at) == sent[at : at + size]
                rest = b.read(_SLOT - size, at + size)
                assert rest == bytes(each ^ 0xFF for each in sent[at + size : at + _SLOT])
            assert a.session.flush(DEADLINE_S)
            assert [b.count(i) for i in range(240)] == [start + 1] * 240


def test_values_of_parted_and_of_empty_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", "64")
    with efa_ranks() as (a, b):
        for value in (1, 2, 127, 128, PUT_VALUE_MAX, PUT_VALUE_MAX + 1, (1 << 23) - 1):
            for signal, nbytes in ((3, 0), (4, 64), (5, 1000)):
                before = b.count(signal)
                a.session.put(1, 0, 0, 0, nbytes, signal, value)
                assert b.wait(signal, before + value)
                assert b.count(signal) == before + value
        with pytest.raises(ArgumentError, match="value"):
            a.session.put(1, 0, 0, 0, 8, 0, 1 << 23)
        with pytest.raises(ArgumentError, match="signal"):
            a.session.put(1, 0, 0, 0, 8, 1 << 23, 1)


def test_a_small_fifo_and_queue_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", "32")
    with efa_ranks(fifo_slots=2, queue_depth=4) as (a, b):
        sent = a.fill(64 * 1000)
        for i in range(1000):
            a.session.put(1, 0, 64 * i, 64 * i, 64, i % 3, 1)
        assert [b.wait(i, n) for i, n in enumerate((334, 333, 333))] == [True] * 3
        assert b.read(len(sent)) == sent
        assert a.session.flush(DEADLINE_S)


def test_flush_covers_puts_without_a_signal() -> None:
    with efa_ranks() as (a, b):
        sent = a.fill(100_000)
        a.session.put(1, 0, 0, 0, 100_000, NO_SIGNAL, 0)
        assert a.session.flush(DEADLINE_S)
        assert b.read(100_000) == sent


def test_a_wrong_key_is_refused_by_the_peer() -> None:
    ranks = [Rank(i, backend=EfaNic()) for i in range(2)]
    try:
        join(ranks, lambda key: key.replace('"rkeys":[', '"rkeys":[1'))
        a, b = ranks
        a.session.put(1, 0, 0, 0, 8, 0, 1)
        assert a.wait_abort() == runtime.AbortCode.nic_error
        failure = a.session.failure()
        assert failure is not None
        assert (failure.status, failure.peer) == ("REM_ACCESS_ERR", 1)
        assert b.count(0) == 0
    finally:
        for each in ranks:
            each.close()


def test_a_peer_that_is_gone_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50")
    with efa_ranks() as (a, b):
        b.session.close()
        a.session.put(1, 0, 0, 0, 8, 0, 1)
        assert a.wait_abort() == runtime.AbortCode.nic_error
        failure = a.session.failure()
        assert failure is not None
        assert (failure.status, failure.peer) == ("RESP_TIMEOUT_ERR", 1)


def test_a_device_without_rdma_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_RDMA_WRITE", "0")
    with pytest.raises(BackendUnavailable, match="no RDMA write"):
        EfaNic().open("soft0", "soft", 0, settings())
