"""The watchdog sees which ranks live and which failed: one thread a rank, beside the data path.

Each rank reports a heartbeat (with the call it is in) on the table of its node, in shared memory, and
learns of the death of a process on this host at once (pidfd). One rank of a node, the *speaker*, asks
the store for its node: it publishes the node's heartbeats as one message, looks for an abort notice,
which it marks on the table, and watches the heartbeats of the next node, so that the nodes form a
ring. So requests a second grow with the nodes alone. The first notice in a world wins and every rank
raises that kind of error.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from mkernel import log
from mkernel.backends.runtime.threads import END_S, Thread, end
from mkernel.errors import (
    Cancelled,
    Diagnosis,
    NicError,
    PeerFailure,
    Timeout,
    Untrusted,
    WorldError,
)
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.heartbeats import (
    Heartbeat,
    HeartbeatTable,
    Report,
    Row,
    deleted,
    newest,
    next_row,
    reported,
    row_to_json,
    shown,
    unreported,
)

NoticeKind = Literal["PeerFailure", "Timeout", "NicError", "Cancelled", "Untrusted"]

_BEHIND_HEARTBEATS = 3
_SILENCE_HEARTBEATS = 50
"""A rank on another host that has not reported for this many heartbeats counts as lost."""
Status = tuple[int, str, str]
"""The number and key of a rank's latest call, and the other world that keeps it busy; empty: none
does."""


def host_identity() -> str:
    """Return a text that two processes share exactly when pids of one mean the same to the other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class Notice:
    """The reason why a world ended. ``rank``: the one that failed; ``details``: fields of the error."""

    kind: NoticeKind
    rank: int
    message: str
    details: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Notice:
        """Read what ``to_json`` made. Untrusted: ``data`` is something else."""
        try:
            kind, rank, details = data["kind"], data["rank"], data["details"]
            if kind not in get_args(NoticeKind) or not isinstance(rank, int):
                raise ValueError(f"kind {kind!r}, rank {rank!r}")
            notice = cls(kind, rank, str(data["message"]), dict(details))
            notice.error()  # its details must be that error's
            return notice
        except (LookupError, TypeError, ValueError) as error:
            raise Untrusted(f"an abort notice that no rank writes: {error}") from error

    @classmethod
    def from_error(cls, rank: int, error: BaseException) -> Notice:
        """Make the notice that tells the other ranks of an error raised on ``rank``."""
        if isinstance(error, Timeout):
            details = {} if error.diagnosis is None else {"diagnosis": vars(error.diagnosis)}
            return cls("Timeout", rank, str(error), details)
        if isinstance(error, NicError):
            fields = ("status", "qp", "wr_id", "vendor_err", "peer")
            return cls("NicError", rank, str(error), {f: getattr(error, f) for f in fields})
        if isinstance(error, PeerFailure):
            return cls("PeerFailure", error.peer, str(error), {})
        if isinstance(error, Cancelled | KeyboardInterrupt):
            return cls("Cancelled", rank, f"rank {rank} was stopped by its user", {})
        if isinstance(error, Untrusted):
            return cls("Untrusted", rank, str(error), {})
        text = f"rank {rank} failed: {type(error).__name__}: {error}"
        return cls("PeerFailure", rank, text, {})

    def error(self) -> WorldError:
        """Return the exception that every rank raises."""
        if self.kind == "Timeout":
            found = self.details.get("diagnosis")
            return Timeout(self.message, Diagnosis(**found) if found else None)
        if self.kind == "NicError":
            return NicError(self.message, **self.details)
        if self.kind == "Cancelled":
            return Cancelled(self.message)
        if self.kind == "Untrusted":
            return Untrusted(self.message)
        return PeerFailure(self.message, self.rank)


@dataclass(frozen=True)
class Peer:
    """A rank as its ``hello`` introduced it."""

    rank: int
    host: str
    pid: int

    @classmethod
    def from_hello(cls, rank: int, hello: Any) -> Peer:
        """Read a rank's ``hello``. Untrusted: it is not what a rank writes."""
        try:
            peer = cls(rank, hello["host"], hello["pid"])
            if not isinstance(peer.host, str) or not isinstance(hello["world"], dict):
                raise TypeError(f"host {peer.host!r}, world {hello['world']!r}")
            if not isinstance(peer.pid, int) or not 0 < peer.pid < 1 << 31:
                raise ValueError(f"pid {peer.pid!r}")
            return peer
        except (LookupError, TypeError, ValueError) as error:
            raise Untrusted(f"a hello of rank {rank} that no rank writes: {error}") from error


class Watchdog:
    """The watchdog of one rank, which runs until ``stop``.

    Attributes:
        looked: when a rank of this node last began to look for an abort notice and found none, on the
            clock of ``time.monotonic`` (CLOCK_MONOTONIC). Native code reads it before each call that it
            starts.
        behind_s: a look that is older has missed some heartbeats.

    Args:
        bootstrap: a client of its own, so that no other request delays it.
        table: of this rank's node; all nodes have as many ranks.
        on_notice: called once, on the watchdog's thread.
        status: returns what the heartbeat carries.
        own_failure: returns the notice of a failure that this rank's kernels or NIC have recorded,
            or None. It is told to the others once it has stood for a heartbeat: a dead peer shows
            up as one too, and its death is the better word.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        rank: int,
        peers: Mapping[int, Peer],
        table: HeartbeatTable,
        heartbeat_s: float,
        status: Callable[[], Status],
        own_failure: Callable[[], Notice | None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._bootstrap = bootstrap
        self._rank = rank
        self._peers = {r: p for r, p in peers.items() if r != rank}
        self._hosts = {r: p.host for r, p in peers.items()}
        self._table = table
        self._node_size = len(table.ranks)
        self._node, self._nodes = rank // self._node_size, len(peers) // self._node_size
        self._heartbeat_s = heartbeat_s
        self._status = status
        self._own_failure = own_failure
        self._suspicious = False
        self._on_notice = on_notice
        self._heartbeat = Heartbeat()
        self._asked, self.looked = -math.inf, 0.0
        self.behind_s = _BEHIND_HEARTBEATS * heartbeat_s
        self._published = unreported(self._node_size)
        self._rows: dict[int, tuple[Row, float]] = {}  # by node; and when they were read
        self._reading = threading.Lock()  # rows are compared in the order in which they are read
        self._last: dict[int, tuple[int, float]] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._stopped = self._said_left = False
        self._pidfds: dict[int, int] = {}  # fd → rank
        self._dead: list[int] = []  # before anybody could watch them
        for peer in self._peers.values():
            if peer.host == self._hosts[rank]:
                self._watch_process(peer)
        self._thread = Thread(self._run, name="mkernel-watchdog")

    def _watch_process(self, peer: Peer) -> None:
        try:
            self._pidfds[os.pidfd_open(peer.pid)] = peer.rank
        except ProcessLookupError:
            self._dead.append(peer.rank)
        except OSError as error:  # no descriptor is left, or a sandbox has no such call
            log.warn(
                __name__,
                f"rank {self._rank} cannot watch the process {peer.pid} of rank {peer.rank} ({error}): "
                f"its death shows by {_SILENCE_HEARTBEATS * self._heartbeat_s:g} s of silence, not at "
                "once",
            )

    def start(self) -> None:
        """Report the first heartbeat and start watching. RuntimeError: no thread can be had."""
        self.looked = time.monotonic()
        self._report()
        self._thread.start()
        atexit.register(self._exiting)

    def stop(self) -> None:
        """Say that this rank leaves on purpose, and end the thread. Twice is harmless.

        Raises:
            Timeout: the thread does not end: the store does not answer it. What it uses stays open.
        """
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self._exiting)
        self._stopping.set()
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            held = "It holds a connection to the job's store, whose host may be stopped, and the world."
            end([self._thread], held)
        if not self._said_left:
            self._say_left()
        for fd in (*self._pidfds, self._wake_read, self._wake_write):
            os.close(fd)

    def _say_left(self) -> None:
        """Report that this rank leaves, which its node's speaker may no longer be there to publish."""
        self._said_left = True
        self._report(left=True)
        with contextlib.suppress(PeerFailure, Untrusted):  # others of this node watch on
            self._publish()

    def _exiting(self) -> None:
        """End the thread as the process exits without ``stop``, without a word: to the others this rank
        dies. Python ends a daemon thread where it next wants the interpreter, and below a function of
        torch's in C++ that aborts the process."""
        if self._thread.is_alive():  # not in a child that was forked: the pipe is its parent's too
            self._stopping.set()
            os.write(self._wake_write, b"x")
            self._thread.join(END_S)

    def is_behind(self, timeout_s: float) -> bool:
        """Return whether others may have given the world up since the latest look, which is older than
        some heartbeats or than a wait's deadline: the thread got no CPU, or the process was stopped."""
        return time.monotonic() - self.looked > min(self.behind_s, timeout_s)

    def heartbeats(self, ranks: Iterable[int], *, fresh: bool = False) -> dict[int, Heartbeat]:
        """Return the latest heartbeats of these ranks. Any thread. PeerFailure, Untrusted.

        Args:
            fresh: ask the store for those of other nodes, which is done once a heartbeat otherwise.
        """
        wanted, size = [*ranks], self._node_size
        rows = self._rows_of({rank // size for rank in wanted}, fresh=fresh)
        return {rank: rows[rank // size][rank % size] for rank in wanted}

    def left(self, ranks: Iterable[int], *, fresh: bool = False) -> set[int]:
        """Return those of the ranks that have left the world on purpose. As :meth:`heartbeats`."""
        found = self.heartbeats(ranks, fresh=fresh)
        return {rank for rank, heartbeat in found.items() if heartbeat.left}

    def raise_alarm(self, notice: Notice) -> Notice:
        """Publish a failure, and return the world's first notice, maybe another's. Any thread."""
        try:
            return Notice.from_json(self._bootstrap.publish_first("abort", notice.to_json()))
        except (PeerFailure, Untrusted):
            return notice
        finally:
            self._table.mark_failed()

    def _report(self, *, left: bool = False) -> None:
        """Write the next heartbeat to the table."""
        call, plan, other = self._status()
        before = self._heartbeat
        busy = (call, shown(other)) if other else (before.busy_call, before.busy_with)
        self._heartbeat = Heartbeat(before.beat + 1, left, call, plan, *busy)
        self._table.write(self._rank, Report(self._heartbeat, time.monotonic(), self._asked))

    def _publish(self) -> None:
        """Publish the heartbeats of this node, this rank's latest among them. Where others of the node
        do so too, the newest of each rank counts; each of them can be first only once with what it
        read before this rank's latest."""
        key = f"heartbeats/{self._node}"
        for _ in range(self._node_size + 1):
            known = self._published
            if known[self._rank % self._node_size] == self._heartbeat:
                return
            row = newest(known, self._table.row())
            before = row_to_json(known) if reported(known) else None
            told = self._bootstrap.replace(key, before, row_to_json(row))
            if told is None:
                raise deleted(self._node)
            self._published = next_row(self._node, known, told)

    def _rows_of(self, nodes: set[int], *, fresh: bool) -> dict[int, Row]:
        """Return the latest heartbeats of nodes. ``fresh``: as :meth:`heartbeats` has it."""
        if nodes == {self._node}:  # without the store, which may not answer another thread
            return {self._node: self._table.row()}
        with self._reading:
            now, rows, due = time.monotonic(), {}, {}
            for node in nodes:
                row, read = self._rows.get(node, (unreported(self._node_size), -math.inf))
                rows[node] = self._table.row() if node == self._node else row
                ended = node == self._node or all(heartbeat.left for heartbeat in row)
                if not ended and (fresh or now - read >= self._heartbeat_s):
                    due[node] = f"heartbeats/{node}"
            told = self._bootstrap.peek_all([*due.values()])
            for node, key in due.items():
                if key in told:
                    rows[node] = next_row(node, rows[node], told[key])
                elif reported(rows[node]):
                    raise deleted(node)
                self._rows[node] = (rows[node], now)
            return rows

    def _run(self) -> None:
        try:
            notice = self._watch()
        except Exception as error:  # of memory, say: no world goes on that nobody watches
            notice = Notice.from_error(self._rank, error)
            if not isinstance(error, PeerFailure):  # then the store is lost: nobody can be told
                with contextlib.suppress(Exception):
                    notice = self.raise_alarm(notice)
        if notice is not None:
            self._table.mark_failed()
            self._on_notice(notice)
        elif self._stopped:  # here, where a store that does not answer holds up nobody for ever
            self._say_left()

    def _watch(self) -> Notice | None:
        """Watch until a rank fails, and return the world's first notice; None once it is to stop."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for fd in self._pidfds:
            poller.register(fd, select.POLLIN)
        notice = self._look(self._dead)
        while notice is None:
            ready = [fd for fd, _ in poller.poll(1000 * self._heartbeat_s)]
            if self._stopping.is_set():  # which it is before the wake-up is written
                return None
            for fd in ready:
                poller.unregister(fd)
            notice = self._look([self._pidfds[fd] for fd in ready])
        return notice

    def _look(self, dead: list[int]) -> Notice | None:
        began = time.monotonic()
        for rank in dead:
            if not self.left([rank], fresh=True):
                text = (
                    f"rank {rank} (process {self._peers[rank].pid}) died; look at its own output "
                    "or at the kernel log for the reason"
                )
                return self.raise_alarm(Notice("PeerFailure", rank, text, {}))
        here = self._table.read()
        speaks = self._speaks(here, began)
        if speaks or self._table.failed:
            told = self._bootstrap.peek("abort")
            if told is not None:
                return Notice.from_json(told)
            self._asked = began
        own = self._own_failure()
        if own is not None and self._suspicious:
            return self.raise_alarm(own)
        self._suspicious = own is not None
        self._report()
        if speaks:
            self._publish()
        notice = self._silence(speaks)
        if notice is not None:
            return self.raise_alarm(notice)
        self.looked = max(self.looked, self._asked, *(report.looked for report in here.values()))
        return None

    def _speaks(self, here: Mapping[int, Report], now: float) -> bool:
        """Return whether this rank is the speaker of its node: those before it have left, or are late
        with their reports. For a while several may be, or none."""
        return all(
            report.heartbeat.left or now - report.at > self.behind_s
            for rank, report in here.items()
            if rank < self._rank
        )

    def _silence(self, speaks: bool) -> Notice | None:
        """Return a notice of a rank that has not reported for too long. A process that this rank
        watches may be silent: it is only stopped, and may go on."""
        watched = self.heartbeats(self._table.ranks)
        if speaks:
            watched |= self._next_node()
        now, limit_s = time.monotonic(), _SILENCE_HEARTBEATS * self._heartbeat_s
        silent: dict[int, float] = {}
        for rank in watched.keys() - {self._rank, *self._pidfds.values()}:
            beat, since = self._last.get(rank, (-1, now))
            if watched[rank].beat != beat:
                beat, since = self._last[rank] = (watched[rank].beat, now)
            if not watched[rank].left:
                silent[rank] = now - since
        lost = min((rank for rank, silent_s in silent.items() if silent_s > limit_s), default=None)
        if lost is None:
            return None
        peer = self._peers[lost]
        there = [r for r, beat in watched.items() if self._hosts[r] == peer.host and not beat.left]
        name = peer.host.partition("/")[0]
        # Ranks of a host do not report at once, so that the last of them is lost a little later.
        text = f"rank {lost} has been silent for {silent[lost]:.1f} s, " + (
            f"as have all ranks of host {name} ({', '.join(map(str, there))}): it may be down"
            if all(silent.get(rank, 0.0) > limit_s / 2 for rank in there)
            else f"and others of host {name} have not: its process {peer.pid} may be stopped"
        )
        return Notice("PeerFailure", lost, text, {})

    def _next_node(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of the next node of the ring that has not left."""
        for node in (*range(self._node + 1, self._nodes), *range(self._node)):
            row = self._rows_of({node}, fresh=True)[node]
            if not all(heartbeat.left for heartbeat in row):
                return dict(enumerate(row, start=node * self._node_size))
        return {}
