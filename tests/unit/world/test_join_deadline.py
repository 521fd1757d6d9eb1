"""The deadline of a whole join: for what can be interrupted, and for what cannot."""

from __future__ import annotations

import threading
import time

import pytest
from in_world import TOLD_S
from torch.distributed import HashStore

from mkernel.errors import ArgumentError, Timeout
from mkernel.world.failure import FailureMonitor
from mkernel.world.join_deadline import JoinDeadline


def test_what_is_run_within_it_gives_its_result_or_its_error() -> None:
    deadline = JoinDeadline(60.0)
    assert deadline.within("nothing came", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        deadline.within("nothing came", lambda: 1 // 0)


def test_what_never_ends_is_left_behind() -> None:
    goes_on, began = threading.Event(), time.monotonic()
    said = r"nothing came within 0\.2 s, .*MKERNEL_JOIN_TIMEOUT_S raises"
    with pytest.raises(Timeout, match=said):
        JoinDeadline(0.2).within("nothing came", lambda: goes_on.wait(120))
    assert time.monotonic() - began < TOLD_S / 2
    goes_on.set()


def test_no_wait_is_longer_than_what_is_left() -> None:
    deadline = JoinDeadline(10.0)
    assert deadline.wait_s(2.0) == 2.0
    assert 0 < deadline.wait_s(60.0) <= 10.0
    assert JoinDeadline(0.0).wait_s(60.0) == 0.0


def test_a_rank_that_is_too_late_breaks_the_world_that_it_joins() -> None:
    """Whatever it waits for then ends: its waits look whether the world is broken."""
    store = HashStore()
    monitor = FailureMonitor(0, 2, 60.0, (store, store), bytes(32))
    monitor.joining = JoinDeadline(60.0)
    assert monitor._own_notice() is None
    assert monitor.wait_s() < 60.0
    monitor.joining = JoinDeadline(-60.0)
    told = monitor._own_notice()
    assert told is not None
    assert told.kind == "Timeout"
    assert told.message.startswith("rank 0 was not in the world within -60 s")
    monitor.joining = None
    assert monitor._own_notice() is None
    assert monitor.wait_s() == 60.0


def test_it_is_a_time_that_a_world_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.world import lifecycle

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match="join_timeout_s = 0"):
        lifecycle.init(join_timeout_s=0.0)
