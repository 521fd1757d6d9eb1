"""Several rails and queue pairs through the Python session; regions that come and go."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from nic_ranks import DEADLINE_S, Rank, lanes, local_ranks, settings

from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import ArgumentError, BackendUnavailable, NicError
from mkernel.topology.lanes import PortPair

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


@pytest.mark.parametrize(
    ("device", "values", "named"),
    [
        ("soft0", {}, (("soft0",), (5_000,))),
        ("soft0", {"qps": 2}, (("soft0", "soft0"), (1_599, 3_401))),
        ("soft0", {"qps": 2, "stripe_bytes": 1000}, (("soft0", "soft0"), (3_071, 1_929))),
        ("soft0,soft0:1", {}, (("soft0", "soft0:1"), (1_599, 3_401))),
        ("soft0,soft0:1", {"stripe_bytes": 1000}, (("soft0", "soft0:1"), (3_071, 1_929))),
        ("soft0,soft0:1", {"qps": 2}, (("soft0", "soft0:1") * 2, (1_299, 3_201, 300, 200))),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_another_plan_moves_the_bytes_otherwise(
    backend: NicBackend,
    device: str,
    values: dict[str, int],
    named: tuple[tuple[str, ...], tuple[int, ...]],
) -> None:
    """Six puts, of which the last alone is striped, where the plan says from 1000 bytes on."""
    with local_ranks(backend=backend, device=device, **values) as (a, b):
        for nbytes in (300, 200, 300, 200, 999, 3001):
            a.session.put(1, 0, 0, 0, nbytes, 0, 1)
        assert b.waits(0, 6)
        lanes = a.session.statistics().lanes
        assert tuple(lane.port for lane in lanes) == named[0]
        assert tuple(lane.nbytes for lane in lanes) == named[1]
        assert {lane.peer for lane in lanes} == {1}
        assert [lane.nbytes for lane in b.session.statistics().lanes] == [0] * len(lanes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ports": 9}, "9 ports for rank 0; a session has 1 to 8"),
        ({"ports": 0}, "0 ports"),
        ({"queue_pairs": 9}, "9 queue pairs of two ranks on each rail for rank 0"),
        ({"twice": True}, "a port twice for rank 0: soft0, soft0"),
    ],
    ids=str,
)
def test_a_plan_that_no_session_can_follow_is_refused(change: dict[str, int], says: str) -> None:
    part = lanes(Cx7Nic(), 0, qps=2)
    (port,) = part.ports
    if "ports" in change:
        many = tuple(port.model_copy(update={"id": f"p{i}"}) for i in range(change["ports"]))
        part = replace(part, ports=many)
    elif "twice" in change:
        part = replace(part, ports=(port, port))
    else:
        part = replace(part, schedule=part.schedule.model_copy(update=change))
    with pytest.raises(BackendUnavailable, match=says):
        Cx7Nic().open("soft", part, settings())


def test_a_rail_from_a_port_that_is_not_open_is_refused() -> None:
    part = replace(lanes(Cx7Nic(), 0), rails=lambda peer: (PortPair("soft7", "soft0"),))
    session = Cx7Nic().open("soft", part, settings())
    with pytest.raises(ArgumentError, match=r"lanes.rails\(1\) = from port 'soft7'.*soft0"):
        session.address(1)
    session.close()


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"qps": 3}, "nics.queue_pairs = 3"),
        ({"qps": 2, "stripe_bytes": 7}, "nics.stripe_bytes = 7"),
        ({"qps": 2, "device": "soft0:1"}, r"nics.rails\[0\]\[0\] = 'soft0:1'"),
        ({"qps": 2, "device": "soft0,soft0:1"}, "nics.rails.length = 2"),
    ],
    ids=str,
)
def test_a_peer_with_another_plan_is_refused(theirs: dict[str, Any], says: str) -> None:
    one, other = Rank(0, qps=2), Rank(1, **theirs)
    try:
        address = other.session.address(0)
        one.session.address(1)
        with pytest.raises(ArgumentError, match=says):
            one.session.connect(1, address)
    finally:
        one.close()
        other.close()


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
