"""The check that a NIC session does what the plan says: lanes, turns and stripes, and no other plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mkernel.backends.contracts.nic import NO_SIGNAL, LaneStatistics
from mkernel.conformance.check import Check
from mkernel.errors import ArgumentError, BackendUnavailable
from mkernel.harness.nic_ranks import NicSubject, Port, Rank
from mkernel.harness.outcome import CheckFailed
from mkernel.topology.lanes import RankLanes

_PLANS: tuple[dict[str, Any], ...] = (
    {"qps": 1},
    {"qps": 2, "stripe_bytes": 1000},
    {"qps": 4, "stripe_bytes": 100_000},
)
_SMALL = 500
_TURNS = 6
_UNEVEN = 64
"""The number of bytes a lane by which the pieces of a striped put may differ from equal ones."""


def follows_plan(subject: NicSubject) -> None:
    """Check that puts go over the plan's queue pairs, by turns and by stripes, as the lanes'
    counters show; a plan that the session cannot follow must be refused, as must a peer that
    follows another one."""
    for settings in _PLANS:
        subject.run(_follows, 3, settings)
    _too_many_queue_pairs(subject)
    subject.run(_two_plans, 2)


def _follows(me: Rank, settings: dict[str, Any]) -> None:
    lanes = me.subject.lanes(me.rank, **settings)
    stripe = lanes.schedule.stripe_bytes
    with me.open(1 << 20, **settings) as port:
        for peer in me.peers:
            each = len(lanes.to(peer))
            _put(port, peer, _SMALL, _TURNS * each)
            _compare(port, lanes, peer, [(_TURNS, _TURNS * _SMALL)] * each, uneven=0)
            # Just below a stripe a put is one lane's; where several puts are, each lane has had one.
            large = 1 << 19 if stripe is None else stripe
            _put(port, peer, large - 1, each)
            before = [(_TURNS + 1, _TURNS * _SMALL + large - 1)] * each
            _compare(port, lanes, peer, before, uneven=0)
            _put(port, peer, large, 1)
            after = [(count, nbytes + large // each) for count, nbytes in before]
            _compare(port, lanes, peer, after, uneven=_UNEVEN * each)
        me.exchange()


def _put(port: Port, peer: int, nbytes: int, count: int) -> None:
    for _ in range(count):
        port.session.put(peer, 0, 0, 1 << 19, nbytes, NO_SIGNAL, 0)
    port.flush()


def _compare(
    port: Port, lanes: RankLanes, peer: int, expected: list[tuple[int, int]], uneven: int
) -> None:
    """Raise CheckFailed if a lane has fewer messages than expected, or another amount of data (by
    more than ``uneven`` bytes), or lies on another port than the plan's."""
    found: list[LaneStatistics] = [
        lane for lane in port.session.statistics().lanes if lane.peer == peer
    ]
    ports = [pair.own for pair in lanes.to(peer)]
    if [lane.port for lane in found] != ports:
        raise CheckFailed(
            f"rank {port.rank} reaches rank {peer} by queue pairs on {[one.port for one in found]}; "
            f"the plan has {ports}"
        )
    for number, (lane, (messages, nbytes)) in enumerate(zip(found, expected, strict=True)):
        if lane.messages < messages or abs(lane.nbytes - nbytes) > uneven:
            raise CheckFailed(
                f"queue pair {number} of {len(found)} from rank {port.rank} to {peer} carried "
                f"{lane.nbytes} bytes in {lane.messages} messages; by the plan ({lanes.schedule}) it "
                f"is {nbytes} in {messages} or more"
            )


def _too_many_queue_pairs(subject: NicSubject) -> None:
    backend = subject.backend()
    lanes = subject.lanes(0)
    most = backend.max_queue_pairs
    schedule = lanes.schedule.model_copy(
        update={"queue_pairs": most + 1, "stripe_bytes": lanes.schedule.stripe_bytes or 1000}
    )
    try:
        session = backend.open(subject.verbs, replace(lanes, schedule=schedule), subject.settings)
    except BackendUnavailable:
        return
    session.close()
    raise CheckFailed(
        f"open() takes a plan of {most + 1} queue pairs; max_queue_pairs is {most}, and a plan that "
        "cannot be followed is refused with BackendUnavailable"
    )


def _two_plans(me: Rank) -> None:
    """Have rank 1 stripe in another way than rank 0: neither may connect to the other."""
    settings = {"qps": 2, "stripe_bytes": 1000 + me.rank}
    if me.subject.lanes(0, **settings).schedule.stripe_bytes is None:
        return  # it has one queue pair to a peer, and so one plan
    (peer,) = me.peers
    session = me.subject.session(me.rank, **settings)
    try:
        told = me.exchange(session.address(peer))
        try:
            session.connect(peer, told[peer])
        except ArgumentError:
            return
        raise CheckFailed(
            "connect() takes a peer whose plan has another stripe; it is refused with ArgumentError"
        )
    finally:
        me.exchange()
        session.close()


PLAN_CHECKS: tuple[Check, ...] = (
    Check(
        "plan",
        "puts go over the plan's queue pairs, by its turns and stripes; other plans are refused",
        follows_plan,
    ),
)
