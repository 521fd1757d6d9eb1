"""What a rank says of a failure that its kernels recorded."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from mkernel import failure_record
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, NicError, PeerFailure, Timeout
from mkernel.world.failure import FailureMonitor
from mkernel.world.heartbeats import Heartbeat
from mkernel.world.watchdog import Notice


class NoStore:
    """A store in which nothing is."""

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: b""


@pytest.mark.parametrize(
    ("latest", "call"),
    [
        (1, 1),
        (7, 5),
        ((1 << 32) + 7, (1 << 32) + 5),
        ((1 << 32) + 2, (1 << 32) - 3),
        (1 << 40, 1 << 40),
    ],
)
def test_the_call_of_a_diagnosis_is_named_by_its_whole_number(latest: int, call: int) -> None:
    """The record has its low 32 bits alone."""
    monitor = FailureMonitor(0, 2, 5.0, (NoStore(), NoStore()), bytes(32))  # type: ignore[arg-type]
    monitor.call = (latest, "")
    who = _transport.Diagnosis()
    who.op, who.peer = call & 0xFFFFFFFF, 1
    late = monitor._local_error(_transport.AbortCode.timeout, who)
    assert isinstance(late, Timeout)
    assert late.diagnosis is not None
    assert late.diagnosis.op == call
    lost = monitor._local_error(_transport.AbortCode.peer_failure, who)
    assert isinstance(lost, PeerFailure)
    assert str(lost).endswith(f"in call {call}")


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({1: 7, 2: 5}, "Rank 2 is still in call 5. "),
        ({1: 7, 2: 0}, "Rank 2 has made no call yet. "),
        ({1: 8, 2: 7}, ""),
    ],
)
def test_who_is_behind_is_no_rank_of_this_call(calls: dict[int, int], said: str) -> None:
    monitor = FailureMonitor(0, 3, 5.0, (NoStore(), NoStore()), bytes(32))  # type: ignore[arg-type]
    monitor.call = (7, "")
    told = {rank: Heartbeat(1, call=call) for rank, call in calls.items()}
    monitor._watchdog = Mock(heartbeats=lambda ranks: {0: Heartbeat(1)} | told)
    assert monitor.who_is_behind() == said


@pytest.mark.parametrize("behind", [False, True])
def test_a_watchdog_that_is_behind_is_not_waited_for(behind: bool) -> None:
    """A rank that was stopped hears of the failure before its next call, not some time in it."""
    store = HashStore()
    monitor = FailureMonitor(0, 2, 5.0, (store, store), bytes(32))
    monitor._watchdog = watchdog = Mock(is_behind=lambda timeout_s: behind, looked=0.0)
    monitor.look_if_behind()  # nobody has told of any
    assert (watchdog.looked > 0) == behind, "the next call need not look again"
    told = Notice.from_error(1, Timeout("rank 0 did not come"))
    monitor._alarm.publish_first("abort", told.to_json())
    with pytest.raises(Timeout, match="rank 0 did not come") if behind else nullcontext():
        monitor.look_if_behind()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records of failures, none of which reaches a file."""
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> Path:
        records.append(record)
        return Path("record.json")

    monkeypatch.setattr(failure_record, "keep", keep)
    return records


def alone() -> FailureMonitor:
    store = HashStore()
    return FailureMonitor(0, 2, 5.0, (store, store), bytes(32))


def test_a_failure_is_kept_as_soon_as_it_is_heard_of(kept: list[dict[str, Any]]) -> None:
    """Not only where it is raised: a rank that makes no more call keeps it too."""
    monitor = alone()
    assert monitor._keep() == "", "nothing has failed"
    assert kept == []
    monitor = alone()
    notice = Notice("PeerFailure", 1, "rank 1 died", {})
    monitor.take(notice)
    assert [record["failure"] for record in kept] == [notice.to_json()]
    monitor.take(notice)
    assert len(kept) == 1


def test_what_a_failure_led_to_is_not_its_cause(kept: list[dict[str, Any]]) -> None:
    """Memory of a peer that is gone, or the connection to it. What the caller did wrong is his."""
    monitor = alone()
    monitor.raise_first_cause(OSError("nothing was heard of yet"))
    monitor.take(Notice("PeerFailure", 1, "rank 1 died", {}))
    for echo in (OSError("gone"), Timeout("late"), NicError("lost", peer=1)):
        with pytest.raises(PeerFailure, match="rank 1 died"):
            monitor.raise_first_cause(echo)
    for own in (ArgumentError("a", 1, "2"), KeyboardInterrupt(), PeerFailure("rank 1 died", 1)):
        monitor.raise_first_cause(own)


@pytest.mark.parametrize("by_pad", [False, True])
def test_an_own_failure_is_told_as_long_as_nobody_told_one(
    kept: list[dict[str, Any]], by_pad: bool
) -> None:
    monitor = alone()
    assert monitor._own_notice() is None
    who = _transport.Diagnosis()
    who.peer = 1
    record = ctypes.create_string_buffer(_transport.RECORD_BYTES)
    pad = HostMemory.create(_transport.pad_bytes(1))
    _transport.pad_format(pad.address, 1)
    monitor._pads[pad.address] = 0
    monitor.accelerators += [Mock(record=lambda: 0), Mock(record=lambda: ctypes.addressof(record))]
    assert monitor._own_notice() is None
    code = _transport.AbortCode.peer_failure
    if by_pad:
        _transport.pad_abort(pad.address, code, who)
    else:
        _transport.record_failure(ctypes.addressof(record), code, who)
    found = monitor._own_notice()
    assert found is not None
    assert (found.kind, found.rank) == ("PeerFailure", 1)
    monitor.take(found)
    assert monitor._own_notice() is None


@pytest.mark.parametrize("waited", ["", "stream 3 waits for rank 1"])
def test_a_time_out_says_what_else_waited(waited: str) -> None:
    monitor = alone()
    monitor.accelerators += [Mock(at_deadline=lambda: ""), Mock(at_deadline=lambda: waited)]
    late = monitor._local_error(_transport.AbortCode.timeout, _transport.Diagnosis())
    behind = f"; all that waited on rank 0 then: {waited}" if waited else "raises the limit)"
    assert str(late).endswith(behind)
