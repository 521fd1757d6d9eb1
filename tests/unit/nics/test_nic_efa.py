"""The ``efa`` backend on the software device, which reorders and places bytes twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from nic_ranks import DEADLINE_S, Rank, join, local_ranks, settings

from mkernel.backends.contracts.nic import NO_SIGNAL, PUT_VALUE_MAX
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.runtime import _runtime as runtime
from mkernel.errors import ArgumentError, BackendUnavailable


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


def test_values_of_parted_and_of_empty_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", "64")
    with efa_ranks() as (a, b):
        for value in (1, 2, 127, 128, PUT_VALUE_MAX, PUT_VALUE_MAX + 1, (1 << 23) - 1):
            for signal, nbytes in ((3, 0), (4, 64), (5, 1000)):
                before = b.count(signal)
                a.session.put(1, 0, 0, 0, nbytes, signal, value)
                assert b.waits(signal, before + value)
                assert b.count(signal) == before + value
        with pytest.raises(ArgumentError, match="value"):
            a.session.put(1, 0, 0, 0, 8, 0, 1 << 23)
        with pytest.raises(ArgumentError, match="signal"):
            a.session.put(1, 0, 0, 0, 8, 1 << 23, 1)


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


def test_a_device_without_rdma_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_RDMA_WRITE", "0")
    with pytest.raises(BackendUnavailable, match="no RDMA write"):
        EfaNic().open("soft0", "soft", 0, settings())
