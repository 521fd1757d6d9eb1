"""The failure of a world: what this rank records as wrong, what the others report, and the error that
all raise.

The first notice in a world wins. It ends every wait of this rank, on the host and in kernels, and
every rank raises the error that it describes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed import Store

from mkernel import failure_record, log
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Launch
from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.transport import _transport
from mkernel.errors import Diagnosis, MkernelError, PeerFailure, Timeout, WorldError
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.heartbeats import Heartbeat, HeartbeatTable
from mkernel.world.join_deadline import JoinDeadline
from mkernel.world.watchdog import Notice, Peer, Status, Watchdog

_ATTRIBUTION_S = 1.0
"""Seconds for which a failed rank waits to learn the first cause: a dead peer shows up as a NIC error
or a time-out too, and the watchdog's word is the better one."""
_NO_CHUNK = 0xFFFFFFFF
_CODES = {
    "Timeout": _transport.AbortCode.timeout,
    "NicError": _transport.AbortCode.nic_error,
    "Cancelled": _transport.AbortCode.cancelled,
}
"""Abort codes by the kind of a notice; that of any other kind is ``peer_failure``."""
_Record = tuple[_transport.AbortCode, _transport.Diagnosis]


failures: Counter[str] = Counter()
"""Worlds of this process that broke, by the kind of their first notice."""
os.register_at_fork(after_in_child=failures.clear)


def _nowhere() -> str:
    return ""


class FailureMonitor:
    """Watches one world for one rank. Lives as long as the world.

    Joining adds to ``accelerators``, fills in ``session`` and calls ``guard`` as they open; a failure
    ends the waits of those that are there. ``bootstrap`` is the client of the rank's own thread;
    ``timeout_s`` the deadline of each of its waits, which may change.

    Args:
        stores: two clients of the world's store. Only the watchdog and alarms use the second, so that
            no request delays them.
        key: seals the world's messages.

    Attributes:
        running: calls that may still be under way, in their order. Empty once an error is raised that
            tells what broke them.
        about: of the world, for the record of its failure; JSON-safe.
        raised: whether this rank has raised what broke the world.
        joining: the deadline of the join while there is one.
        first: the rank that records of the accelerators' own kernels call 0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        stores: tuple[Store, Store],
        key: bytes,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.bootstrap = Bootstrap(stores[0], key, self.tell)
        self._alarm = Bootstrap(stores[1], key)
        self.running: deque[Launch] = deque()
        self._noticed = threading.Event()
        self._watchdog: Watchdog | None = None
        self._pads: dict[int, int] = {}
        self.notice: Notice | None = None
        self.raised = False
        self.first = 0
        self.about: Mapping[str, Any] = {}
        self._keeping = threading.Lock()
        self._kept: str | None = None
        self.joining: JoinDeadline | None = None
        self.accelerators: list[AcceleratorBackend] = []
        self.session: NicSession | None = None
        # The other world that this process is making or calling; empty: there is none.
        self.elsewhere: Callable[[], str] = _nowhere
        # (number of the latest call, its key), replaced as one so that a heartbeat never pairs one
        # call's number with another's plan.
        self.call: tuple[int, str] = (0, "")

    @property
    def world(self) -> str:
        """Return the world's name, for the log."""
        return str(self.about.get("world", "-"))

    def wait_s(self) -> float:
        """Return how long, in seconds, a wait on the host that begins now may take."""
        joining = self.joining
        return self.timeout_s if joining is None else joining.wait_s(self.timeout_s)

    def watch(self, peers: Mapping[int, Peer], table: HeartbeatTable, heartbeat_s: float) -> None:
        """Start the watchdog. ``table``: of this rank's node."""
        self._watchdog = Watchdog(
            self._alarm,
            self.rank,
            peers,
            table,
            heartbeat_s,
            self._status,
            self._own_notice,
            self.take,
        )
        self._watchdog.start()

    def guard(self, pad: int, first: int = 0) -> None:
        """Abort the signal pad at this address too, from now on, when the world breaks. ``first``: the
        rank that its records call 0."""
        self._pads[pad] = first
        if self.notice is not None:  # an alarm rang before there was a pad to write it to
            self.take(self.notice)

    def stop(self) -> None:
        """Stop the watchdog, before the pad is unmapped into which it writes the abort word."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def close(self) -> None:
        """Let go of the store and of all that refers back to this monitor. The world has ended, and its
        memory may be unmapped: nothing is recorded from now on."""
        self._watchdog = self.session = None
        self._pads.clear()
        self.accelerators.clear()
        self.running.clear()
        self.elsewhere = _nowhere
        self.bootstrap.close()
        self._alarm.close()

    # ---- what the others are told, and what they tell ------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Let every other rank know that this one failed."""
        notice = Notice.from_error(self.rank, error)
        if self._watchdog is not None:
            notice = self._watchdog.raise_alarm(notice)
        else:
            with contextlib.suppress(MkernelError):
                self._alarm.publish_first("abort", notice.to_json())
        self.take(notice)
        if isinstance(error, WorldError):  # it is about to be raised here
            text, kept = str(error), self._keep()
            error.args = (text if text.endswith(kept) else text + kept,)

    def take(self, notice: Notice) -> None:
        """Take the world's first failure and end every wait of this rank. Any thread."""
        self.notice = self.notice or notice
        code = _CODES.get(notice.kind, _transport.AbortCode.peer_failure)
        for pad in self._pads:
            _transport.pad_abort(pad, code)
        for accelerator in self.accelerators:
            accelerator.abort(code)
        self._noticed.set()
        self._keep()

    def look_for_abort(self) -> None:
        """Raise the world's failure where a rank has told of one, without waiting for the watchdog."""
        told = self.bootstrap.peek("abort")
        if told is not None:
            self.take(Notice.from_json(told))
            self.raise_if_broken()

    def look_if_behind(self) -> None:
        """Raise the world's failure where the watchdog may not have heard of it yet. A rank that was
        stopped must not begin a call of a world that the others have given up, and write into their
        memory. Every call comes here when native code finds that
        (``backends/runtime/calls/call_path.cpp``)."""
        watchdog = self._watchdog
        if watchdog is not None and watchdog.is_behind(self.timeout_s):
            began = time.monotonic()
            self.look_for_abort()
            watchdog.looked = began

    def check_peers(self, missing: set[int]) -> None:
        """Raise where the world is broken, or one of the ranks that are waited for has left it."""
        if self._watchdog is None:
            self.look_for_abort()
            return
        self.raise_if_broken()
        heartbeats = self.heartbeats(missing)
        gone = sorted(rank for rank, heartbeat in heartbeats.items() if heartbeat.left)
        if gone:
            self.look_for_abort()  # a rank that fails says so before it leaves
            raise PeerFailure(f"rank {gone[0]} has left the world; it cannot take part", gone[0])

    def heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the latest heartbeats of these ranks; nothing while nobody watches. PeerFailure,
        Untrusted."""
        try:
            return self._watchdog.heartbeats(ranks) if self._watchdog else {}
        except WorldError as error:
            self.tell(error)
            raise

    def _status(self) -> Status:
        return (*self.call, self.elsewhere())

    # ---- what is raised ------------------------------------------------------------------------

    def raise_if_broken(self) -> None:
        """Raise the world's failure where there is one."""
        if self.notice is not None:
            self.running.clear()
            raise self._failed(self.notice)

    def raise_recorded(self) -> None:
        """Raise what this rank's kernels and proxy have recorded as wrong, if anything."""
        found = self._recorded()
        if found is not None:
            raise self._attribute(*found)

    def raise_unflushed(self) -> None:
        """Raise the reason why puts did not complete: what was recorded, else a time-out."""
        nothing = (_transport.AbortCode.none, _transport.Diagnosis())
        raise self._attribute(*(self._recorded() or nothing))

    def raise_late(self, late: Timeout) -> NoReturn:
        """Break the world because a rank did not come in time, and raise its first failure."""
        error = Timeout(f"{late}. {self.who_is_behind()}".rstrip())
        self.tell(error)
        try:
            self.raise_first_cause(error)
            raise error from late
        finally:
            del error  # or it and this frame would hold each other

    def raise_first_cause(self, error: BaseException) -> None:
        """Raise the world's first failure where ``error`` is only what it led to here: memory or a
        connection of a peer that is gone, say."""
        echo = isinstance(error, WorldError) or not isinstance(error, MkernelError)
        first = self.notice
        if not isinstance(error, Exception) or not echo or first is None:
            return
        own = Notice.from_error(self.rank, error)
        if first != replace(own, message=own.message.removesuffix(self._keep())):
            raise self._failed(first) from error

    def _recorded(self) -> _Record | None:
        """Return what this rank's kernels and proxy recorded as wrong; None: nothing. Any thread."""
        records = [(_transport.pad_record(pad), first) for pad, first in self._pads.items()]
        records += [(each.record(), self.first) for each in self.accelerators]
        for record, first in records:
            found: _Record | None = _transport.record_outcome(record) if record else None
            if found is not None:
                found[1].peer += first
                return found
        return None

    def _own_notice(self) -> Notice | None:
        """Return a notice of what this rank recorded as wrong before any rank reported an error, or of
        a join that takes too long. Runs on the watchdog's thread."""
        if self.notice is not None:
            return None
        found, joining = self._recorded(), self.joining
        if found is not None:
            return Notice.from_error(self.rank, self._local_error(*found))
        if joining is not None and joining.passed():
            late = joining.late(f"rank {self.rank} was not in the world")
            return Notice.from_error(self.rank, late)
        return None

    def _attribute(self, code: _transport.AbortCode, who: _transport.Diagnosis) -> WorldError:
        """Wait for the first cause, tell of this rank's own where none comes, and return its error."""
        if not self._noticed.wait(_ATTRIBUTION_S):
            self.tell(self._local_error(code, who))
        notice = self.notice
        assert notice is not None
        self.running.clear()
        return self._failed(notice)

    def _failed(self, notice: Notice) -> WorldError:
        """Return the notice's error, whose message says where the failure is kept."""
        self.raised = True
        kept = self._keep()
        return replace(notice, message=notice.message.removesuffix(kept) + kept).error()

    def _keep(self) -> str:
        """Keep a record of the world's first failure, once, and return where it is, as the end of a
        message. An end that the user wanted is no failure. Any thread."""
        with self._keeping:
            if self._kept is None:
                self._kept = self._recorded_in_file()
            return self._kept

    def _recorded_in_file(self) -> str:
        notice = self.notice
        if notice is None or notice.kind == "Cancelled":
            return ""
        number, _ = self.call
        failures[notice.kind] += 1
        log.of_world(__name__, self.rank, self.world).error(
            "broken in call %d: %s: %s", number, notice.kind, notice.message
        )
        record = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.about,
            "rank": self.rank,
            "size": self.size,
            "call": number,
            "timeout_s": self.timeout_s,
            "failure": notice.to_json(),
        }
        try:
            file = failure_record.keep(record)
        except OSError as error:
            return f" (no record of it: {error})"
        return f" (kept for `mkernel doctor --report`: {file})"

    def _local_error(self, code: _transport.AbortCode, who: _transport.Diagnosis) -> WorldError:
        nic = self.session.failure() if self.session else None
        if nic is not None:
            return nic
        if code == _transport.AbortCode.peer_failure:
            call = self._call_of(who.op)
            text = f"rank {self.rank} lost its connection to rank {who.peer} in call {call}"
            return PeerFailure(text, who.peer)
        if code == _transport.AbortCode.timeout:
            diagnosis = Diagnosis(
                rank=self.rank,
                waiter=who.waiter.name,
                core=who.core,
                signal=who.signal,
                seen=who.seen,
                wanted=who.wanted,
                op=self._call_of(who.op),
                chunk=None if who.chunk == _NO_CHUNK else who.chunk,
                peer=who.peer,
            )
            told = (each.at_deadline() for each in self.accelerators)
            waiting = "; ".join(filter(None, told))
            return Timeout(
                f"{diagnosis}; nothing came within {self.timeout_s:g} s: is that rank in the same "
                f"call? {self.who_is_behind()}(MKERNEL_TIMEOUT_S raises the limit)"
                + (f"; all that waited on rank {self.rank} then: {waiting}" if waiting else ""),
                diagnosis,
            )
        return Timeout(f"the NIC did not complete its puts within {self.timeout_s:g} s")

    def _call_of(self, op: int) -> int:
        """Return the full number of a call, of which a diagnosis has the low 32 bits: the latest call
        with these."""
        latest = self.call[0]
        found = latest - ((latest - op) & 0xFFFFFFFF)
        return found if found > 0 else op

    def who_is_behind(self) -> str:
        """Describe the first rank that has not reached this call, and the other world that keeps it
        busy; empty where there is none. The rank that is waited for may itself wait for another."""
        call, found = self.call[0], {}
        if self._watchdog is not None:
            with contextlib.suppress(WorldError):  # another error is about to be raised
                found = self._watchdog.heartbeats(range(self.size))
        for rank, heartbeat in found.items():
            if rank == self.rank or not heartbeat.beat or heartbeat.call >= call:
                continue
            if heartbeat.busy_with and heartbeat.busy_call < call:
                return (
                    f"Rank {rank} was busy with world {heartbeat.busy_with!r}: ranks that share "
                    "several worlds make and call them in one order. "
                )
            return f"Rank {rank} " + (
                f"is still in call {heartbeat.call}. "
                if heartbeat.call
                else "has made no call yet. "
            )
        return ""
