"""Several rails and queue pairs through the Python session; regions that come and go."""

from __future__ import annotations

import json

import pytest
from nic_ranks import DEADLINE_S, Rank, local_ranks

from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import BackendUnavailable, NicError

BACKENDS = [Cx7Nic(), EfaNic()]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_several_devices_are_rails_of_one_session(backend: NicBackend) -> None:
    """One software device, opened twice."""
    with local_ranks(backend=backend, device="soft0,soft0:1", stripe_bytes=1000) as (a, b):
        sent = a.fill(50_000)
        a.session.put(1, 0, 0, 0, 50_000, 0, 1)
        assert b.waits(0, 1)
        assert b.read(50_000) == sent
        key = json.loads(a.session.register(1, a.memory.address, 4096))
        assert len(key["rkeys"]) == 2


def test_a_rail_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="mlx5_7"):
        Rank(0, device="soft0,mlx5_7")
    with pytest.raises(BackendUnavailable, match="9 rails"):
        Rank(0, device=",".join(["soft0"] * 9))


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
