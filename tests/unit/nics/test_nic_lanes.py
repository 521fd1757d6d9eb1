"""Several rails and queue pairs through the Python session; regions that come and go."""

from __future__ import annotations

import json

import pytest
from nic_ranks import DEADLINE_S, Rank, join, local_ranks

from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import BackendUnavailable, NicError

BACKENDS = [Cx7Nic(), EfaNic()]
SPREAD = {"qps": 3, "stripe_bytes": 1000}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_a_put_is_spread_and_arrives_whole(backend: NicBackend) -> None:
    with local_ranks(backend=backend, **SPREAD) as (a, b):
        assert len(json.loads(a.session.address(9))["lanes"]) == 3
        for nbytes in (0, 1, 999, 1000, 1001, 100_000):
            before = b.count(4)
            sent = a.fill(nbytes)
            a.session.put(1, 0, 0, 77, nbytes, 4, 2)
            assert b.wait(4, before + 2)
            assert b.read(nbytes, 77) == sent
        assert a.session.flush(DEADLINE_S)
        assert not a.session.capabilities().ordered


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_several_devices_are_rails_of_one_session(backend: NicBackend) -> None:
    """One software device, opened twice."""
    ranks = [Rank(i, backend=backend, device="soft0,soft0:1", stripe_bytes=1000) for i in range(2)]
    try:
        join(ranks)
        a, b = ranks
        sent = a.fill(50_000)
        a.session.put(1, 0, 0, 0, 50_000, 0, 1)
        assert b.wait(0, 1)
        assert b.read(50_000) == sent
        key = json.loads(a.session.register(1, a.memory.address, 4096))
        assert len(key["rkeys"]) == 2
    finally:
        for each in ranks:
            each.close()


def test_a_rail_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="mlx5_7"):
        Rank(0, device="soft0,mlx5_7")
    with pytest.raises(BackendUnavailable, match="9 rails"):
        Rank(0, device=",".join(["soft0"] * 9))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_a_region_may_go_and_come_back(backend: NicBackend) -> None:
    with local_ranks(backend=backend, **SPREAD) as (a, b):
        for turn in range(1, 6):
            a.session.register(3, a.memory.address, 65_536)
            a.session.bind(3, 1, b.session.register(3, b.memory.address + 65_536, 65_536))
            assert a.session.statistics().host_regions == 2
            sent = a.fill(65_536)
            a.session.put(1, 3, 0, 0, 65_536, 0, 1)
            assert b.wait(0, turn)
            assert b.read(65_536, 65_536) == sent
            a.session.deregister(3, DEADLINE_S)
            b.session.deregister(3, DEADLINE_S)
        assert a.session.statistics().host_regions == 1
        a.session.put(1, 3, 0, 0, 8, 0, 1)
        assert not a.session.flush(DEADLINE_S)
        failure = a.session.failure()
        assert failure is not None
        assert failure.status == "INVALID_PUT"
        assert "region 3" in str(failure)


def test_a_late_put_to_a_region_that_is_gone_fails_at_its_sender() -> None:
    with local_ranks() as (a, b):
        before = b.fill(4096)
        b.session.deregister(0, DEADLINE_S)
        a.fill(4096)
        a.session.put(1, 0, 0, 0, 4096, 0, 1)
        assert not a.session.flush(DEADLINE_S)
        failure = a.session.failure()
        assert failure is not None
        assert (failure.status, failure.peer) == ("REM_ACCESS_ERR", 1)
        assert b.read(4096) == before


def test_device_memory_without_a_way_to_it_names_both_ways() -> None:
    with local_ranks() as (a, _):
        with pytest.raises(NicError, match=r"dmabuf.*nvidia_peermem") as caught:
            a.session.register_device(5, a.memory.address, 4096)
        assert caught.value.status == "SETUP"


def test_nobody_runs_ahead_of_the_receives() -> None:
    """Of a receiver with 8 receives and a sender with 8192 requests in flight."""
    with local_ranks(receive_depth=8, queue_depth=8192, rnr_retry=0) as (a, b):
        for i in range(5000):
            a.session.put(1, 0, 0, 0, 0, i % 2, 1)
        assert b.wait(0, 2500)
        assert b.wait(1, 2500)
        assert a.session.failure() is None
