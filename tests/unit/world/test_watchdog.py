"""A rank's watchdog, one look at a time: a store and a clock of the test's own, no thread."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore, Store

from mkernel.backends.runtime import threads
from mkernel.errors import PeerFailure, Timeout, Untrusted
from mkernel.world import watchdog
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.heartbeats import Heartbeat, HeartbeatTable, Report, row_to_json
from mkernel.world.watchdog import Notice, Peer, Status, Watchdog

HEARTBEAT_S = 0.2
LIMIT_S = 50 * HEARTBEAT_S


def idle() -> Status:
    """A rank that has made no call."""
    return 0, "", ""


def table(ranks: int = 1) -> HeartbeatTable:
    """A table of node 0."""
    return HeartbeatTable.create(range(ranks))


class Counted(Bootstrap):
    """Counts how often it asks the store."""

    requests = 0

    def _request(self, action: Callable[[Store], Any]) -> Any:
        self.requests += 1
        return super()._request(action)


class World:
    """The watchdog of rank 0, or of ``rank``, and peers whose heartbeats the test writes: ranks 0 and 1
    share a host and a table, ranks 2 and 3 are on another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.bootstrap = Counted(HashStore())
        here, there = os.getpid(), 2**22 + 1  # no process can have this number
        peers = {rank: Peer(rank, "here/boot", here) for rank in (0, 1)}
        peers |= {rank: Peer(rank, "there/boot", there) for rank in (2, 3)}
        self.table = table(2)
        self.told = dict.fromkeys(range(4), Heartbeat())
        self.failed: Notice | None = None
        self.watchdog = Watchdog(
            self.bootstrap, rank, peers, self.table, HEARTBEAT_S,
            idle, lambda: self.failed, lambda notice: None,
        )  # fmt: skip
        monkeypatch.setattr(self.watchdog._thread, "start", lambda: None)
        self.watchdog.start()

    def report(self, *ranks: int, left: bool = False) -> None:
        """A heartbeat of each of these ranks."""
        for rank in ranks:
            self.told[rank] = Heartbeat(self.told[rank].beat + 1, left)
            if rank in self.table.ranks:
                self.table.write(rank, Report(self.told[rank], self.now))
        if {2, 3} & {*ranks}:
            row = (self.told[2], self.told[3])
            self.bootstrap.publish("heartbeats/1", row_to_json(row))

    def own(self) -> Heartbeat:
        """What the other hosts can read of rank 0."""
        return Heartbeat(*self.bootstrap.peek("heartbeats/0")[0])

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
    whole = "as have all ranks of host there (2, 3): it may be down"
    one = "others of host there have not: its process 4194305 may be stopped"
    assert told.message.endswith(whole if len(silent) == 2 else one)
    assert world.bootstrap.peek("abort") == told.to_json()  # the other ranks read it there


def test_a_rank_of_another_host_that_never_reported_is_lost_too(world: World) -> None:
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
    failing = Watchdog(bootstrap, 0, peers, table(), HEARTBEAT_S, idle, no_memory, told.append)
    failing._run()
    failing.stop()
    (notice,) = told
    assert (notice.kind, notice.rank) == ("PeerFailure", 0)
    assert notice.message == "rank 0 failed: MemoryError: nothing is left"
    assert bootstrap.peek("abort") == notice.to_json()


def test_a_rank_that_left_may_be_silent(world: World) -> None:
    world.report(2, 3, left=True)
    assert world.look_until(world.now + 3 * LIMIT_S) is None
    assert world.watchdog.left(range(4)) == {2, 3}


def test_silence_of_a_process_of_this_host_says_nothing(world: World) -> None:
    """Its death is seen at once; a process that is only stopped may go on."""
    until = world.now + 3 * LIMIT_S
    while world.now < until:
        world.report(2, 3)
        assert world.look() is None


def test_a_rank_reports_before_it_first_looks(world: World) -> None:
    assert world.table.row()[0] == Heartbeat(1)


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
        assert world.own() == Heartbeat(beat)


def test_who_stops_says_that_he_left(world: World) -> None:
    world.watchdog.stop()
    assert world.own().left


@pytest.mark.parametrize("node", [0, 1])
def test_heartbeats_that_were_deleted_are_a_strangers_work(world: World, node: int) -> None:
    world.report(2)
    assert world.look() is None
    world.bootstrap.forget(f"heartbeats/{node}")
    with pytest.raises(Untrusted, match=f"the heartbeats of node {node} were deleted"):
        world.look()


@pytest.mark.parametrize("node", [0, 1])
def test_heartbeats_that_were_put_back_are_a_strangers_work(world: World, node: int) -> None:
    world.report(2)
    assert world.look() is None
    old = world.bootstrap.peek(f"heartbeats/{node}")
    world.report(2)
    assert world.look() is None
    world.bootstrap.publish(f"heartbeats/{node}", old)
    told = f"of rank {2 * node} was put in the place of its heartbeat"
    with pytest.raises(Untrusted, match=told):
        world.look()


# ---- who asks the store for a node -----------------------------------------------------------------


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rank 1's watchdog. Rank 0, which is before it, is the test's."""
    made = World(monkeypatch, rank=1)
    yield made
    made.watchdog.stop()


def test_one_rank_of_a_node_asks_the_store_for_all(second: World) -> None:
    for _ in range(100):
        second.report(0)
        assert second.look() is None
    assert second.bootstrap.requests == 0
    assert second.table.row() == (Heartbeat(100), Heartbeat(101))


@pytest.mark.parametrize("how", ["stops", "leaves"])
def test_the_next_rank_asks_the_store_where_the_first_does_not(second: World, how: str) -> None:
    second.report(0, left=how == "leaves")
    assert second.look() is None
    late = how == "stops"
    assert (second.bootstrap.requests == 0) == late
    for _ in range(3):
        assert second.look() is None
    first, own = second.bootstrap.peek("heartbeats/0")
    assert (Heartbeat(*first).beat, Heartbeat(*own).beat) == (1, 5)
    if late:
        second.report(0)  # it goes on
    before = second.bootstrap.requests
    assert second.look() is None
    assert (second.bootstrap.requests == before) == late


def test_what_two_ranks_publish_at_once_is_the_newest_of_each(world: World) -> None:
    """A rank that leaves publishes beside its node's speaker, and may have read less or more."""
    assert world.look() is None
    world.report(1)
    theirs = (Heartbeat(1), Heartbeat(4, left=True))
    world.bootstrap.publish("heartbeats/0", row_to_json(theirs))
    with pytest.raises(Untrusted, match="heartbeat 1 of rank 0 was put in the place"):
        world.look()
    theirs = (Heartbeat(2), Heartbeat(4, left=True))
    world.bootstrap.publish("heartbeats/0", row_to_json(theirs))
    assert world.look() is None
    row = world.bootstrap.peek("heartbeats/0")
    assert [Heartbeat(*each) for each in row] == [world.table.row()[0], theirs[1]]


def test_who_leaves_need_not_publish_what_another_has_published(world: World) -> None:
    """The node's speaker, in between."""
    assert world.look() is None
    world.report(1)
    replace = world.bootstrap.replace

    def second(key: str, known: object, value: object) -> object:
        world.bootstrap.publish(key, row_to_json(world.table.row()))
        return replace(key, known, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.bootstrap, "replace", Mock(side_effect=second))
        world.watchdog.stop()
        world.bootstrap.replace.assert_called_once()  # type: ignore[attr-defined]
    assert world.own().left


def test_a_rank_that_does_not_ask_the_store_hears_of_an_abort(second: World) -> None:
    """By the mark of who asks, or of who failed."""
    told = Notice("Timeout", 3, "waited for rank 1", {})
    second.bootstrap.publish("abort", told.to_json())
    second.report(0)
    assert second.look() is None
    second.report(0)
    second.table.mark_failed()
    assert second.look() == told


@pytest.mark.parametrize("lost", [True, False])
def test_who_hears_of_a_failure_tells_the_ranks_of_its_node(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Also of a store that is lost, of which nobody can tell there."""
    if lost:
        gone = PeerFailure("the store is gone", 0)
        monkeypatch.setattr(world.bootstrap, "peek", Mock(side_effect=gone))
    else:
        world.bootstrap.publish("abort", Notice("Timeout", 3, "waited", {}).to_json())
    assert not world.table.failed
    world.watchdog._run()
    assert world.table.failed


def test_who_tells_of_a_failure_marks_it(second: World) -> None:
    assert not second.table.failed
    second.watchdog.raise_alarm(Notice("Timeout", 1, "waited for rank 3", {}))
    assert second.table.failed


def test_who_waits_for_other_nodes_asks_once_a_heartbeat(second: World) -> None:
    """It looks every few ms whether they have left."""
    second.report(2, 3)
    before = second.bootstrap.requests
    for asked in (1, 2):
        for _ in range(10):
            assert second.watchdog.left({2, 3}) == set()
        assert second.bootstrap.requests - before == asked
        second.now += HEARTBEAT_S
    for _ in range(10):
        assert second.watchdog.left({0, 1}) == set()
    assert second.bootstrap.requests - before == 2


def test_a_process_that_ends_may_have_left_just_before(world: World) -> None:
    """It is on this host, and of another node."""
    world.report(2, 3)
    assert world.look() is None
    world.report(2, left=True)
    assert world.watchdog._look([2]) is None
    told = world.watchdog._look([3])
    assert told is not None
    assert told.rank == 3


def test_another_ranks_look_counts_for_a_node(second: World) -> None:
    """It found no abort since it began, so that nobody of the node is behind."""
    second.now += 4 * HEARTBEAT_S
    second.table.write(0, Report(Heartbeat(1), second.now, second.now - 0.1))
    assert second.watchdog.is_behind(LIMIT_S)
    assert second.look(after_s=0.0) is None
    assert not second.watchdog.is_behind(LIMIT_S)
    assert second.watchdog.looked == second.now - 0.1


def test_a_world_that_kept_a_rank_busy_is_reported_until_another_does(world: World) -> None:
    for doing in ((3, "", "other"), (3, "", ""), (4, "key", "")):
        world.watchdog._status = Mock(return_value=doing)
        assert world.look() is None
    assert world.own() == Heartbeat(4, False, 4, "key", 3, "other")


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, "1", None])
def test_no_rank_has_such_a_number(pid: object) -> None:
    with pytest.raises(Untrusted, match="a hello of rank 3 that no rank writes"):
        Peer.from_hello(3, {"host": "here", "pid": pid, "world": {}})


def test_it_looks_by_itself_once_it_is_started() -> None:
    bootstrap, told = Bootstrap(HashStore()), threading.Event()
    peers = {0: Peer(0, "here", os.getpid())}
    failed = Notice("Timeout", 0, "waited for rank 1", {})
    started = Watchdog(
        bootstrap, 0, peers, table(), 0.01, idle, lambda: failed, lambda notice: told.set()
    )
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
    started = Watchdog(
        Bootstrap(HashStore()), 0, peers, table(), 0.01, idle, look, lambda notice: None
    )
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
    started = Watchdog(bootstrap, 0, peers, table(), 0.01, idle, look, lambda notice: None)
    started.start()
    assert asked.wait(120)
    with pytest.raises(Timeout, match=r"thread mkernel-watchdog did not end .* the job's store"):
        started.stop()
    os.fstat(started._wake_read)
    answers.set()
    started._thread.join(120)
    (told,) = bootstrap.peek("heartbeats/0")
    assert Heartbeat(*told).left, "the thread says it when it can"
    for descriptor in (started._wake_read, started._wake_write):
        os.close(descriptor)


def test_a_process_that_died_before_it_was_watched_is_dead() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait(120)
    bootstrap, told = Bootstrap(HashStore()), []
    peers = {rank: Peer(rank, "here", pid) for rank, pid in enumerate((os.getpid(), ended.pid))}
    late = Watchdog(bootstrap, 0, peers, table(2), 3600.0, idle, lambda: None, told.append)
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
            Bootstrap(HashStore()), 0, peers, table(2), HEARTBEAT_S,
            idle, lambda: None, lambda notice: None,
        )  # fmt: skip
    made.stop()


def test_programs_that_a_process_starts_have_no_descriptor_of_it(world: World) -> None:
    for descriptor in (world.watchdog._wake_read, world.watchdog._wake_write):
        assert not os.get_inheritable(descriptor)
        assert not os.get_blocking(descriptor)
