"""The watchdog sees which ranks live and which failed: one thread a rank, beside the data path.

Each rank reports a heartbeat (with the call it is in) and looks for three things: an abort notice,
the death of a process on this host (pidfd, at once), the silence of a rank on another host. The
first notice in a world wins and every rank raises that kind of error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

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

NoticeKind = Literal["PeerFailure", "Timeout", "NicError", "Cancelled", "Untrusted"]

_BEHIND_HEARTBEATS = 3
_SILENCE_HEARTBEATS = 50
"""A rank on another host that has not reported for this many heartbeats counts as lost."""


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
        looked: when somebody last began to look for an abort notice and found none, on the clock of
            ``time.monotonic`` (CLOCK_MONOTONIC). Native code reads it before each call that it starts.
        behind_s: a look that is older has missed some heartbeats.

    Args:
        bootstrap: a client of its own, so that no other request delays it.
        on_notice: called once, on the watchdog's thread.
        status: returns what the heartbeat carries (JSON-safe).
        own_failure: returns the notice of a failure that this rank's kernels or NIC have recorded,
            or None. It is told to the others once it has stood for a heartbeat: a dead peer shows
            up as one too, and its death is the better word.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        rank: int,
        peers: Mapping[int, Peer],
        heartbeat_s: float,
        status: Callable[[], dict[str, Any]],
        own_failure: Callable[[], Notice | None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._bootstrap = bootstrap
        self._rank = rank
        self._peers = {r: p for r, p in peers.items() if r != rank}
        self._heartbeat_s = heartbeat_s
        self._status = status
        self._own_failure = own_failure
        self._suspicious = False
        self._on_notice = on_notice
        self._beat = 0
        self.looked = 0.0
        self.behind_s = _BEHIND_HEARTBEATS * heartbeat_s
        self._last: dict[int, tuple[int, float]] = {}
        self._left: set[int] = set()
        self._elsewhere: dict[int, tuple[int, str]] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._stopped = self._said_left = False
        self._pidfds: dict[int, int] = {}  # fd → rank
        self._dead: list[int] = []  # before anybody could watch them
        host = peers[rank].host
        for peer in self._peers.values():
            if peer.host == host:
                self._watch_process(peer)
        self._thread = Thread(self._run, name="mkernel-watchdog")

    def _watch_process(self, peer: Peer) -> None:
        try:
            self._pidfds[os.pidfd_open(peer.pid)] = peer.rank
        except ProcessLookupError:
            self._dead.append(peer.rank)
        except OSError as error:  # no descriptor is left, or a sandbox has no such call
            warnings.warn(
                f"rank {self._rank} cannot watch the process {peer.pid} of rank {peer.rank} ({error}): "
                f"its death shows by {_SILENCE_HEARTBEATS * self._heartbeat_s:g} s of silence, not at "
                "once",
                RuntimeWarning,
                stacklevel=1,
            )

    def start(self) -> None:
        """Report the first heartbeat and start watching. RuntimeError: no thread can be had."""
        self._last = {peer: (0, time.monotonic()) for peer in self._peers}
        self.looked = time.monotonic()
        self._report("live")
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
        self._said_left = True
        with contextlib.suppress(PeerFailure):
            self._report("left")

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

    def left(self) -> set[int]:
        """Return the ranks that have left the world on purpose, as far as this one has seen."""
        return set(self._left)

    def busy_with(self, rank: int, call: int) -> str:
        """Return the other world that kept a rank busy, by its last report, before it came to this
        call of ours; empty: it reported none."""
        number, world = self._elsewhere.get(rank, (call, ""))
        return world if number < call else ""

    def raise_alarm(self, notice: Notice) -> Notice:
        """Publish a failure, and return the world's first notice, maybe another's. Any thread."""
        try:
            return Notice.from_json(self._bootstrap.publish_first("abort", notice.to_json()))
        except (PeerFailure, Untrusted):
            return notice

    def _report(self, state: str) -> None:
        self._beat += 1
        self._bootstrap.publish(
            f"heartbeat/{self._rank}", {"beat": self._beat, "state": state, **self._status()}
        )

    def _run(self) -> None:
        try:
            notice = self._watch()
        except Exception as error:  # of memory, say: no world goes on that nobody watches
            notice = Notice.from_error(self._rank, error)
            if not isinstance(error, PeerFailure):  # then the store is lost: nobody can be told
                with contextlib.suppress(Exception):
                    notice = self.raise_alarm(notice)
        if notice is not None:
            self._on_notice(notice)
        elif self._stopped:  # here, where a store that does not answer holds up nobody for ever
            self._say_left()

    def _watch(self) -> Notice | None:
        """Watch until a rank fails, and return the world's first notice; None once it is to stop."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for fd in self._pidfds:
            poller.register(fd, select.POLLIN)
        notice = self._look(self._dead) if self._dead else None
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
            if not self._has_left(rank):
                text = (
                    f"rank {rank} (process {self._peers[rank].pid}) died; look at its own output "
                    "or at the kernel log for the reason"
                )
                return self.raise_alarm(Notice("PeerFailure", rank, text, {}))
        told = self._bootstrap.peek("abort")
        if told is not None:
            return Notice.from_json(told)
        own = self._own_failure()
        if own is not None and self._suspicious:
            return self.raise_alarm(own)
        self._suspicious = own is not None
        self._report("live")
        now = time.monotonic()
        local = set(self._pidfds.values())
        for rank in self._peers:
            if rank in self._left or self._has_left(rank):
                continue
            silent_s = now - self._last[rank][1]
            if rank not in local and silent_s > _SILENCE_HEARTBEATS * self._heartbeat_s:
                text = f"rank {rank} has been silent for {silent_s:.1f} s; its host may be down"
                return self.raise_alarm(Notice("PeerFailure", rank, text, {}))
        self.looked = began
        return None

    def _has_left(self, rank: int) -> bool:
        latest = self._last[rank][0]
        told = self._bootstrap.peek(f"heartbeat/{rank}")
        if told is None:
            if latest > 0:
                raise Untrusted(
                    f"heartbeat {latest} of rank {rank} was deleted; keep strangers from the store's "
                    "port"
                )
            return False
        try:
            beat, state = told["beat"], told["state"]
            if not isinstance(beat, int):
                raise TypeError(f"beat {beat!r}")
            elsewhere = told.get("elsewhere") and (told["call"], str(told["elsewhere"]))
        except (LookupError, TypeError) as error:
            raise Untrusted(f"a heartbeat of rank {rank} that no rank writes: {error}") from error
        if beat < latest:
            raise Untrusted(
                f"heartbeat {beat} of rank {rank} was put in the place of its heartbeat {latest}; "
                "keep strangers from the store's port"
            )
        if elsewhere:
            self._elsewhere[rank] = elsewhere
        if beat > latest:
            self._last[rank] = (beat, time.monotonic())
        if state == "left":
            self._left.add(rank)
        return rank in self._left
