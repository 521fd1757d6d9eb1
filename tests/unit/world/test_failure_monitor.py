"""What a rank says of a failure that its kernels recorded."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from mkernel.backends.transport import _transport
from mkernel.errors import PeerFailure, Timeout
from mkernel.world.failure import FailureMonitor
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
def test_who_is_behind_is_no_rank_of_this_call(
    calls: dict[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = FailureMonitor(0, 3, 5.0, (NoStore(), NoStore()), bytes(32))  # type: ignore[arg-type]
    monitor.call = (7, "")
    heartbeats = {f"heartbeat/{rank}": {"call": call} for rank, call in calls.items()}
    monkeypatch.setattr(monitor._alarm, "peek", heartbeats.get)
    assert monitor.who_is_behind() == said


@pytest.mark.parametrize("behind", [False, True])
def test_a_watchdog_that_is_behind_is_not_waited_for(behind: bool) -> None:
    """A rank that was stopped hears of the failure before its next call, not some time in it."""
    store = HashStore()
    monitor = FailureMonitor(0, 2, 5.0, (store, store), bytes(32))
    monitor._watchdog = Mock(is_behind=lambda: behind)
    monitor.look_if_behind()  # nobody has told of any
    told = Notice.from_error(1, Timeout("rank 0 did not come"))
    monitor._alarm.publish_first("abort", told.to_json())
    with pytest.raises(Timeout, match="rank 0 did not come") if behind else nullcontext():
        monitor.look_if_behind()
