"""Checks of a NIC session's life, its failures and its end."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mkernel.backends.contracts.nic import (
    NO_SIGNAL,
    NicBackend,
    NicCapabilities,
    NicSession,
    NicStatistics,
)
from mkernel.backends.contracts.status import Status
from mkernel.conformance.check import Check
from mkernel.conformance.nic_checks import Landing
from mkernel.errors import ArgumentError, BackendUnavailable, NicError, Timeout, Unsupported
from mkernel.harness.nic_ranks import (
    CLOSE_S,
    NicSubject,
    Pattern,
    Port,
    Rank,
    deadline,
    within,
)
from mkernel.harness.outcome import CheckFailed, CheckSkipped
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes, nic_schedule
from mkernel.topology.model import Nic

_KIB = 1 << 10
IDLE = 0.1
"""The share of a core below which a session is idle."""
_NO_PORT = "mkernel-nonexistent"
_NOWHERE = "/nonexistent/libmkernel-conformance.so"


def require(holds: bool, message: str) -> None:
    """Raise CheckFailed if a promise does not hold."""
    if not holds:
        raise CheckFailed(message)


def close_in_time(session: NicSession, what: str) -> None:
    """Close a session. Raises CheckFailed if it took longer than the contract allows."""
    with within(CLOSE_S, f"close {what}"):
        session.close()


# ---- what the backend says of itself --------------------------------------------------------------


def capabilities(subject: NicSubject) -> None:
    """Check that status, probe, open and the session's capabilities are what they claim to be."""
    backend = subject.backend()
    require(isinstance(backend.name, str) and bool(backend.name), "name is empty")
    require(
        subject.verbs in backend.providers or "/" in subject.verbs,
        f"{subject.verbs!r} is not among providers {backend.providers}",
    )
    _status(backend, subject.verbs)
    port = subject.port()
    session = subject.session(0)
    try:
        claimed = session.capabilities()
        require(isinstance(claimed, NicCapabilities), f"capabilities() is {claimed!r}")
        require(session.capabilities() == claimed, "capabilities() changes from call to call")
        require(session.failure() is None, f"a new session has failed: {session.failure()}")
        statistics = session.statistics()
        require(statistics == NicStatistics(0, 0, 0, 0, 0, 0), f"a new session's {statistics}")
    finally:
        session.close()
    missing = port.model_copy(update={"id": _NO_PORT, "name": _NO_PORT})
    for nic, verbs in ((missing, subject.verbs), (port, _NOWHERE)):
        _opens_not(backend, nic, verbs)


def _opens_not(backend: NicBackend, nic: Nic, verbs: str) -> None:
    """Require that ``open`` of a missing NIC or provider raises BackendUnavailable."""
    settings = NicSettings()
    schedule = nic_schedule(backend.use(settings), several_rails=False)
    try:
        opened = backend.open(verbs, RankLanes.between_equals(0, (nic,), schedule), settings)
    except BackendUnavailable as error:
        require(bool(str(error)), "BackendUnavailable without a word")
        return
    opened.close()
    raise CheckFailed(f"open of {nic.id!r} on {verbs!r} succeeded; expected BackendUnavailable")


def _status(backend: NicBackend, verbs: str) -> None:
    """Check ``status`` and ``probe``, of this provider and of one that is not there."""
    status = backend.status(verbs)
    require(isinstance(status, Status) and status.usable, f"status({verbs!r}) is {status}")
    found = backend.probe(verbs)
    require(
        isinstance(found, tuple) and all(isinstance(nic, Nic) for nic in found),
        f"probe({verbs!r}) is {found!r}, expected a tuple of Nic",
    )
    require(len({nic.id for nic in found}) == len(found), "probe() repeats an id")
    try:
        missing = backend.status(_NOWHERE)
        nothing = backend.probe(_NOWHERE)
    except Exception as error:
        raise CheckFailed(f"status or probe of a missing provider raised {error!r}") from error
    require(not missing.usable, "a provider that does not exist is called usable")
    require(bool(missing.detail), "status of a missing provider does not say why")
    require(nothing == (), f"probe of a missing provider is {nothing}")


# ---- registration ---------------------------------------------------------------------------------


def _regions(me: Rank, count: int) -> None:
    """Register regions of odd sizes while puts run, and put to each at once."""
    cell, source = 8 * _KIB, 16 * _KIB
    with me.open(source + count * cell) as port:
        pattern = Pattern(me.subject.seed, source)
        port.memory.bytes[:source] = pattern.bytes
        landing = Landing(port.memory.bytes[source:])
        (peer,) = me.peers
        for region in range(1, count + 1):
            at = (region - 1) * cell + region
            nbytes = 4000 + region
            # What will lie in the region here is the peer's first bytes of its own.
            landing.expect(at + 100, pattern.window(region, nbytes - 100))
        me.exchange()
        for region in range(1, count + 1):
            at = source + (region - 1) * cell + region
            nbytes = 4000 + region
            port.session.put(peer, 0, 0, 0, 1, 0, 1)  # traffic, to a byte that is the same anyway
            me.share(port, region, port.memory.address + at, nbytes)
            port.session.put(peer, 0, region, at + 100, nbytes - 100, region, 1)
            port.wait(region, 1, f"a put beside region {region}")
        port.flush()
        landing.check(f"{count} regions")
        port.memory.bytes[source:] = 0
        me.exchange()
        for region in range(1, count + 1):  # now relative to the regions
            first = source + (region - 1) * cell + region
            port.memory.bytes[first : first + 50] = region % 251
        me.exchange()
        for region in range(count, 0, -1):
            port.session.put(peer, region, 0, 50, 50, region, 1)
        for region in range(1, count + 1):
            port.wait(region, 2, f"a put in region {region}")
            first = source + (region - 1) * cell + region
            got = port.memory.bytes[first : first + 110]
            require(
                bool((got[:100] == region % 251).all()) and not got[100:].any(),
                f"a put in region {region} of {count} went elsewhere",
            )
        port.flush()


_GUARD = 64 * _KIB
_REGION = 64 * _KIB


def _outside(me: Rank, case: str, put: Sequence[int]) -> None:
    """Make one put that is not allowed, in memory that goes on beyond both ends of the region."""
    with me.open(_REGION + 2 * _GUARD) as port:
        port.memory.bytes[:] = 0x11 * (me.rank + 1)
        me.share(port, 1, port.memory.address + _GUARD, _REGION)
        if me.rank == 0:
            _expect_error(port, case, put)
        me.exchange()
        require(
            bool((port.memory.bytes == 0x11 * (me.rank + 1)).all()),
            f"{case}: memory of rank {me.rank} was written",
        )
        if me.rank == 1:
            require(port.count(5) == 0, f"{case}: its signal was raised all the same")


def _expect_error(port: Port, case: str, put: Sequence[int]) -> None:
    """Require that the put is refused, or fails the session with everything that goes with it."""
    try:
        port.session.put(*put)
    except (ArgumentError, NicError):
        return
    late = deadline(port.timeout_s)
    while port.session.failure() is None and not late():
        time.sleep(0.01)
    require(
        isinstance(port.session.failure(), NicError),
        f"{case}: neither refused nor an error within {port.timeout_s:g} s",
    )
    require(not port.session.flush(1.0), f"{case}: flush returned True after a failure")
    try:
        port.session.put(1, 0, 0, 0, 0, 6, 1)
    except NicError:
        return
    raise CheckFailed(f"{case}: a failed session takes further puts")


_OUTSIDE = {
    "a put beyond the region's end at the peer": (1, 1, 0, _REGION - 50, 100, 5, 1),
    "a put from beyond the region's end here": (1, 1, _REGION - 50, 0, 100, 5, 1),
    "a put far outside": (1, 1, 0, 1 << 62, 100, 5, 1),
    "a put larger than the region": (1, 1, 0, 0, _REGION + 1, 5, 1),
    "a put to a region that nobody registered": (1, 9, 0, 0, 100, 5, 1),
    "a put to a rank that does not exist": (7, 1, 0, 0, 100, 5, 1),
}


def registration(subject: NicSubject) -> None:
    """Register regions while puts run; memory outside of them must be out of reach."""
    subject.run(_regions, 2, subject.scale(200, 40))
    for case, put in _OUTSIDE.items():
        subject.run(_outside, 2, case, put)


def _churn(me: Rank, rounds: int) -> None:
    """Register one region after another under few numbers, beside puts in region 0 that never
    stop."""
    base, span = 64 * _KIB, 8 * _KIB
    with me.open(base + 8 * span) as port:
        (peer,) = me.peers
        for turn in range(rounds):
            for _ in range(4):
                port.session.put(peer, 0, 0, 32 * _KIB, 32 * _KIB, 0, 1)
            half, region, signal = 2000 + turn % 97, 1 + turn % 3, 1 + turn % 5
            at = base + turn % 8 * span + turn % 61
            area = port.memory.bytes[at : at + 2 * half]
            area[:half] = (7 * turn + me.rank) % 251
            area[half:] = 0xFF
            me.share(port, region, port.memory.address + at, 2 * half)
            port.session.put(peer, region, 0, half, half, signal, 1)
            port.wait(signal, turn // 5 + 1, f"a put in region {turn + 1} of {rounds}")
            require(
                bool((area[half:] == (7 * turn + peer) % 251).all()),
                f"a put in region {turn + 1} of {rounds} brought other bytes",
            )
            me.exchange()  # nobody puts in it any more
            try:
                port.session.deregister(region, port.timeout_s)
            except Unsupported as error:
                raise CheckSkipped(str(error)) from error
        port.flush()
        port.exactly(0, 4 * rounds, "puts beside regions that come and go")
        me.exchange()
        # What is gone is out of reach, here and there.
        if me.rank == 0:
            _expect_error(port, "a put in a region that is gone", (peer, 1, 0, 0, 100, 7, 1))
        me.exchange()
        require(port.count(7) == 0, "a put in a region that is gone raised its signal")


def churn(subject: NicSubject) -> None:
    """Deregister regions and use their numbers again, while puts of another go on."""
    subject.run(_churn, 2, subject.scale(500, 60))


# ---- failure --------------------------------------------------------------------------------------


def _killed_peer(me: Rank, nbytes: int) -> None:
    with me.open(4 * nbytes + 4096) as port:
        me.exchange()
        victim = me.size - 1
        if me.rank == victim:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        _put_until_it_fails(port, victim, nbytes)
        failure = port.session.failure()
        require(
            isinstance(failure, NicError),
            f"rank {victim} was killed; {port.timeout_s:g} s later failure() is {failure!r}",
        )
        assert failure is not None
        require(failure.peer == victim, f"rank {victim} was killed, {failure} names another")
        require(
            bool(failure.status) and bool(str(failure)), f"{failure!r} does not say what failed"
        )
        late = deadline(port.timeout_s / 2)
        while not port.aborted() and not late():
            time.sleep(0.01)
        require(port.aborted(), "a failed session leaves the pad's abort word unset: waits go on")
        with within(1.0, "flush of a failed session"):
            flushed = port.session.flush(port.timeout_s)
        require(not flushed, "flush returned True after a failure")
        try:
            port.session.put(1 - me.rank, 0, 0, 0, 0, 3, 1)
        except (NicError, Timeout):
            pass
        else:
            raise CheckFailed("a failed session takes further puts")
        close_in_time(port.session, "after a peer was killed")
        require(port.session.failure() is not None, "the failure is forgotten at close")


def _put_until_it_fails(port: Port, victim: int, nbytes: int) -> None:
    late = deadline(port.timeout_s)
    try:
        while port.session.failure() is None and not late():
            port.session.put(victim, 0, 0, 4096 + port.rank * nbytes, nbytes, 0, 1)
            time.sleep(0.001)
    except NicError:
        pass
    except Timeout as error:
        raise CheckFailed(f"put stuck after rank {victim} was killed: {error}") from error


def killed_peer(subject: NicSubject) -> None:
    """Kill a peer: every rank that puts to it must get a NicError in time."""
    settings = (100_000, 64) if not subject.quick else (100_000,)
    for nbytes in settings:
        subject.run(_killed_peer, 3, nbytes, dies=(2,))


def _close(me: Rank, puts: int) -> None:
    with me.open(2 << 20) as port:
        me.exchange()
        with suppress(NicError):  # the peer may have closed already
            for _ in range(puts):
                port.session.put(me.peers[0], 0, 0, 1 << 20, 1 << 20, 0, 1)
        close_in_time(port.session, f"with {puts} puts of 1 MiB under way")
        close_in_time(port.session, "for the second time")
        me.exchange()
        port.memory.bytes[:] = mine = 0x70 + me.rank
        time.sleep(0.5)
        require(bool((port.memory.bytes == mine).all()), "memory was written after close")
        try:
            port.session.put(me.peers[0], 0, 0, 0, 0, 0, 1)
        except Exception:
            return
        raise CheckFailed("put after close says nothing")


def close(subject: NicSubject) -> None:
    """Close in the middle of traffic, on a link that still holds some of it."""
    for latency_s in (0.0, 0.2):
        puts = subject.scale(400, 100)
        subject.run(_close, 2, puts, environment=subject.slow_link(latency_s))


# ---- what a session leaves and costs --------------------------------------------------------------


def left_behind(me: Rank) -> dict[str, int]:
    """Count what this process holds that a closed session must not, and the names in /dev/shm of files
    that it held while it had a session. Other processes' files come and go there meanwhile."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
        "files in /dev/shm": sum(file.inode() in me.held for file in os.scandir("/dev/shm")),
    }


def require_nothing_more(me: Rank, before: dict[str, int], since: str) -> None:
    """Raise CheckFailed if this process holds more than ``before`` soon after all was closed."""
    gc.collect()  # an error's traceback may be what still holds a session
    late = deadline(me.subject.timeout_s / 2)  # a joined thread leaves /proc a little later
    while (after := left_behind(me)) != before and not late():
        time.sleep(0.02)
    for what, count in before.items():
        require(after[what] <= count, f"{after[what] - count} {what} more than before {since}")


def use_once(me: Rank, turn: int) -> None:
    """Require that a world works: every rank puts to the next one."""
    ahead = (me.rank + 1) % me.size
    with me.open(256 * _KIB) as port:
        pattern = Pattern(turn, 100_000)
        port.memory.bytes[:100_000] = pattern.bytes
        port.session.put(ahead, 0, 0, 128 * _KIB, 100_000, 0, 1)
        port.wait(0, 1, f"session {turn + 1} in one process")
        got = port.memory.bytes[128 * _KIB : 128 * _KIB + 100_000]
        require(bool((got == pattern.bytes).all()), f"session {turn + 1} carries other bytes")
        port.flush()


def _reopen(me: Rank, turns: int) -> None:
    for turn in range(2):  # what is made once, lazily, is no leak
        use_once(me, turn)
    time.sleep(0.1)
    before = left_behind(me)
    for turn in range(turns):
        use_once(me, turn)
    require_nothing_more(me, before, f"{turns} sessions were used and closed")


def reopen(subject: NicSubject) -> None:
    """Open one session after another in one process; they must leave nothing behind."""
    subject.run(_reopen, 2, subject.scale(12, 4))


def _thread_times() -> dict[str, tuple[int, int]]:
    """Map each thread to nanoseconds run, and nanoseconds ready to run while others had the CPU."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        run, waited, _ = Path(f"/proc/self/task/{task}/schedstat").read_text().split()
        found[task] = int(run), int(waited)
    return found


def _idle(me: Rank, seconds: float) -> None:
    with me.open(64 * _KIB) as port:
        port.session.put(me.peers[0], 0, 0, 32 * _KIB, 8, 0, 1)
        port.wait(0, 1, "the first put")
        time.sleep(0.2)
        for _ in range(3):  # a virtual machine counts what its host took from it as the session's
            if (share := _used(seconds)) < IDLE:
                break
        require(share < IDLE, f"an idle session uses {share:.0%} of a core, expected below 10%")


def _used(seconds: float) -> float:
    """Return the share of a core, as if nobody else were on it, that this process uses meanwhile."""
    start, before = time.monotonic_ns(), _thread_times()
    time.sleep(seconds)
    elapsed, after = time.monotonic_ns() - start, _thread_times()
    share = 0.0
    for task in before.keys() & after.keys():
        run, waited = (after[task][i] - before[task][i] for i in (0, 1))
        share += run / max(elapsed - waited, run, 1)
    return share


def idle_cpu(subject: NicSubject) -> None:
    """Check that an idle session uses (nearly) no CPU."""
    subject.run(_idle, 2, subject.scale(2, 1))


def _statistics(me: Rank, puts: int) -> None:
    with me.open(64 * _KIB) as port:
        nbytes = 0
        for index in range(puts):
            size = index % 500
            nbytes += size
            port.session.put(
                me.peers[0], 0, 0, 0, size, NO_SIGNAL if index % 4 == 3 and size else index % 3, 1
            )
        signals = sum(not (index % 4 == 3 and index % 500) for index in range(puts))
        port.flush()
        for index in range(3):
            mine = [i for i in range(puts) if i % 3 == index and not (i % 4 == 3 and i % 500)]
            port.exactly(index, len(mine), f"{puts} puts")
        me.exchange()
        got = port.session.statistics()
        expected = {
            "puts": puts,
            "put_bytes": nbytes,
            "signals_sent": signals,
            "queue_depth": 0,
        }
        for name, value in expected.items():
            require(
                getattr(got, name) == value,
                f"statistics().{name} is {getattr(got, name)} after {puts} puts, expected {value}",
            )
        # A value may travel in several parts, each raised by itself; here every value is 1.
        require(
            got.signals_raised == signals,
            f"statistics().signals_raised is {got.signals_raised}, expected {signals}",
        )
        port.session.close()
        require(port.session.statistics().puts == puts, "statistics are gone after close")
        me.exchange()


def statistics(subject: NicSubject) -> None:
    """Check that counters are exact once everything was flushed."""
    subject.run(_statistics, 2, subject.scale(5000, 1000))


LIFE_CHECKS: tuple[Check, ...] = (
    Check(
        "capabilities",
        "status, probe, open and capabilities answer as the contract says, also when refusing",
        capabilities,
    ),
    Check(
        "registration",
        "regions may be added at any time, and only they can be read and written",
        registration,
    ),
    Check("churn", "regions may go and come while puts of others run", churn),
    Check("statistics", "puts, bytes and signals are counted exactly", statistics),
    Check("killed-peer", "a killed peer becomes a NicError in time, and close works", killed_peer),
    Check("close", "close takes at most a second in mid-traffic and is final", close),
    Check("reopen", "sessions can be opened again and again and leave nothing", reopen),
    Check("idle-cpu", "an idle session uses less than 10% of a core", idle_cpu),
)
