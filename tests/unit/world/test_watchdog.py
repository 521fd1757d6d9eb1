"""A rank's watchdog, one look at a time: a store and a clock of the test's own, no thread."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from mkernel.backends.runtime import threads
from mkernel.errors import Timeout, Untrusted
from mkernel.world import watchdog
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.watchdog import Notice, Peer, Watchdog

HEARTBEAT_S = 0.2
LIMIT_S = 50 * HEARTBEAT_S


class World:
    """Rank 0's watchdog, and three peers whose heartbeats the test publishes: rank 1 on its host, ranks
    2 and 3 on another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.bootstrap = Bootstrap(HashStore())
        here, there = os.getpid(), 2**22 + 1  # no process can have this number
        peers = {rank: Peer(rank, "here", here) for rank in (0, 1)}
        peers |= {rank: Peer(rank, "there", there) for rank in (2, 3)}
        self.beats = dict.fromkeys((1, 2, 3), 0)
        self.failed: Notice | None = None
        self.watchdog = Watchdog(
            self.bootstrap, 0, peers, HEARTBEAT_S, dict, lambda: self.failed, lambda notice: None
        )
        monkeypatch.setattr(self.watchdog._thread, "start", lambda: None)
        self.watchdog.start()

    def report(self, *ranks: int, state: str = "live") -> None:
        """A heartbeat of each of these ranks."""
        for rank in ranks:
            self.beats[rank] += 1
            told = {"beat": self.beats[rank], "state": state}
            self.bootstrap.publish(f"heartbeat/{rank}", told)

    def look(self, after_s: float = HEARTBEAT_S) -> Notice | None:
        """What the watchdog's next look says, so much later."""
        self.now += after_s
        return self.watchdog._look([])

    def look_until(self, end: float) -> Notice | None:
        """Every heartbeat until that time, or until something is said."""
        while self.now < end:
            told = self.look()
            if told is not None:
                return told
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.watchdog.stop()


@pytest.mark.parametrize("silent", [(2, 3), (2,), (3,)])
def test_a_silent_rank_of_another_host_is_lost_after_fifty_heartbeats(
    world: World, silent: tuple[int, ...]
) -> None:
    world.report(1, 2, 3)
    assert world.look() is None
    last_seen = world.now
    while world.now - last_seen < LIMIT_S - HEARTBEAT_S:
        world.report(*{1, 2, 3} - {*silent})
        assert world.look() is None, f"after {world.now - last_seen:.1f} s"
    told = world.look_until(last_seen + LIMIT_S + 3 * HEARTBEAT_S)
    assert told is not None
    assert (told.kind, told.rank) == ("PeerFailure", silent[0])
    assert told.message.startswith(f"rank {silent[0]} has been silent for ")
    assert world.bootstrap.peek("abort") == told.to_json()  # the other ranks read it there


def test_a_rank_of_another_host_that_never_reported_is_lost_too(world: World) -> None:
    world.report(2)
    told = None
    while told is None and world.now < 1000 + 2 * LIMIT_S:
        world.report(2)
        told = world.look()
    assert told is not None
    assert told.rank == 3
    assert world.now == pytest.approx(1000 + LIMIT_S, abs=2 * HEARTBEAT_S)


def test_a_slow_host_lives_on(world: World) -> None:
    """One heartbeat just before the limit, again and again."""
    for _ in range(5):
        world.report(2, 3)
        assert world.look_until(world.now + LIMIT_S - HEARTBEAT_S) is None


def test_what_was_reported_while_this_rank_slept_counts(world: World) -> None:
    """A watchdog that got no CPU for long looks at the store before it judges."""
    world.report(2, 3)
    assert world.look() is None
    world.report(2, 3)
    assert world.look(after_s=10 * LIMIT_S) is None


def test_a_watchdog_that_has_not_looked_for_some_heartbeats_is_behind(world: World) -> None:
    """From the begin of its look on: what came after that it has not seen."""
    assert not world.watchdog.is_behind(LIMIT_S)
    world.now += 4 * HEARTBEAT_S
    assert world.watchdog.is_behind(LIMIT_S)
    peek = world.bootstrap.peek

    def stopped(name: str) -> object:
        world.now += 4 * HEARTBEAT_S if name == "abort" else 0.0
        return peek(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.bootstrap, "peek", stopped)
        assert world.look() is None
    assert world.watchdog.is_behind(LIMIT_S)
    assert world.look() is None
    assert not world.watchdog.is_behind(LIMIT_S)


def test_a_look_older_than_a_deadline_is_behind_however_seldom_ranks_report(world: World) -> None:
    """Others give the world up by the deadline of their waits, not by heartbeats."""
    world.now += 2 * HEARTBEAT_S
    assert not world.watchdog.is_behind(3 * HEARTBEAT_S)
    assert world.watchdog.is_behind(HEARTBEAT_S)


def test_a_watchdog_that_fails_ends_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap, told = Bootstrap(HashStore()), []

    def no_memory() -> Notice:
        raise MemoryError("nothing is left")

    peers = {0: Peer(0, "here", os.getpid())}
    failing = Watchdog(bootstrap, 0, peers, HEARTBEAT_S, dict, no_memory, told.append)
    failing._run()
    failing.stop()
    (notice,) = told
    assert (notice.kind, notice.rank) == ("PeerFailure", 0)
    assert notice.message == "rank 0 failed: MemoryError: nothing is left"
    assert bootstrap.peek("abort") == notice.to_json()


def test_a_rank_that_left_may_be_silent(world: World) -> None:
    world.report(2, 3, state="left")
    assert world.look_until(world.now + 3 * LIMIT_S) is None
    assert world.watchdog.left() == {2, 3}


def test_silence_of_a_process_of_this_host_says_nothing(world: World) -> None:
    """Its death is seen at once; a process that is only stopped may go on."""
    until = world.now + 3 * LIMIT_S
    while world.now < until:
        world.report(2, 3)
        assert world.look() is None


def test_a_rank_reports_before_it_first_looks(world: World) -> None:
    told = world.bootstrap.peek("heartbeat/0")
    assert (told["beat"], told["state"]) == (1, "live")


def test_an_own_failure_is_told_once_it_has_stood_for_a_heartbeat(world: World) -> None:
    """A dead peer shows up as one too, and its death is the better word."""
    assert world.look() is None
    world.failed = Notice("Timeout", 0, "waited for rank 1", {})
    assert world.look() is None
    assert world.look() == world.failed
    assert Notice.from_json(world.bootstrap.peek("abort")) == world.failed


def test_an_own_failure_that_goes_away_is_none(world: World) -> None:
    for _ in range(2):
        world.failed = Notice("Timeout", 0, "waited for rank 1", {})
        assert world.look() is None
        world.failed = None
        assert world.look() is None
    assert world.bootstrap.peek("abort") is None


def test_every_look_reports_once_more(world: World) -> None:
    """Else a rank that works for long would be silent."""
    for beat in (2, 3, 4):
        assert world.look() is None
        told: Any = world.bootstrap.peek("heartbeat/0")
        assert (told["beat"], told["state"]) == (beat, "live")


def test_who_stops_says_that_he_left(world: World) -> None:
    world.watchdog.stop()
    told: Any = world.bootstrap.peek("heartbeat/0")
    assert told["state"] == "left"


def test_a_heartbeat_that_was_deleted_is_a_strangers_work(world: World) -> None:
    world.report(2)
    assert world.look() is None
    world.bootstrap.forget("heartbeat/2")
    with pytest.raises(Untrusted, match="heartbeat 1 of rank 2 was deleted"):
        world.look()


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, "1", None])
def test_no_rank_has_such_a_number(pid: object) -> None:
    with pytest.raises(Untrusted, match="a hello of rank 3 that no rank writes"):
        Peer.from_hello(3, {"host": "here", "pid": pid, "world": {}})


def test_it_looks_by_itself_once_it_is_started() -> None:
    bootstrap, told = Bootstrap(HashStore()), threading.Event()
    peers = {0: Peer(0, "here", os.getpid())}
    failed = Notice("Timeout", 0, "waited for rank 1", {})
    started = Watchdog(bootstrap, 0, peers, 0.01, dict, lambda: failed, lambda notice: told.set())
    started.start()
    assert told.wait(120)
    started.stop()


def test_when_it_has_stopped_nothing_of_it_runs() -> None:
    """What it writes to, signal pads among it, is unmapped then."""
    looking, goes_on = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        goes_on.wait(0.5)

    peers = {0: Peer(0, "here", os.getpid())}
    started = Watchdog(Bootstrap(HashStore()), 0, peers, 0.01, dict, look, lambda notice: None)
    started.start()
    assert looking.wait(120)
    started.stop()
    assert not started._thread.is_alive()
    started.stop()


def test_a_watchdog_that_waits_for_the_store_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store's host is stopped, say; the thread keeps what it uses."""
    monkeypatch.setattr(threads, "END_S", 0.1)
    asked, answers = threading.Event(), threading.Event()

    def look() -> None:
        asked.set()
        answers.wait(120)

    peers = {0: Peer(0, "here", os.getpid())}
    bootstrap = Bootstrap(HashStore())
    started = Watchdog(bootstrap, 0, peers, 0.01, dict, look, lambda notice: None)
    started.start()
    assert asked.wait(120)
    with pytest.raises(Timeout, match=r"thread mkernel-watchdog did not end .* the job's store"):
        started.stop()
    os.fstat(started._wake_read)
    answers.set()
    started._thread.join(120)
    told: Any = bootstrap.peek("heartbeat/0")
    assert told["state"] == "left", "the thread says it when it can"
    for descriptor in (started._wake_read, started._wake_write):
        os.close(descriptor)


def test_a_process_that_died_before_it_was_watched_is_dead() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait(120)
    bootstrap, told = Bootstrap(HashStore()), []
    peers = {rank: Peer(rank, "here", pid) for rank, pid in enumerate((os.getpid(), ended.pid))}
    late = Watchdog(bootstrap, 0, peers, 3600.0, dict, lambda: None, told.append)
    late.start()
    late._thread.join(120)
    (notice,) = told
    assert (notice.kind, notice.rank) == ("PeerFailure", 1)
    assert f"(process {ended.pid}) died" in notice.message
    late.stop()


def test_a_process_that_cannot_be_watched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death then shows by its silence alone."""

    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(watchdog.os, "pidfd_open", refused)
    peers = {rank: Peer(rank, "here", os.getpid()) for rank in (0, 1)}
    with pytest.warns(
        RuntimeWarning, match=r"of rank 1 \(.*Too many open files\).* 10 s of silence"
    ):
        made = Watchdog(
            Bootstrap(HashStore()), 0, peers, HEARTBEAT_S, dict, lambda: None, lambda notice: None
        )
    made.stop()


def test_programs_that_a_process_starts_have_no_descriptor_of_it(world: World) -> None:
    for descriptor in (world.watchdog._wake_read, world.watchdog._wake_write):
        assert not os.get_inheritable(descriptor)
        assert not os.get_blocking(descriptor)
