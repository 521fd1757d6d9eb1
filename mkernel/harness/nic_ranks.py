"""The ranks of a NIC check or measurement: processes, each with memory, a signal pad and a NIC session.

A check hands a *body* to :meth:`NicSubject.run`; every rank process runs it and meets the others in
:meth:`Rank.exchange`, which goes through the parent and never through the NIC under test.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mkernel import fork_server
from mkernel.backends import registry
from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.transport import _transport
from mkernel.errors import BackendUnavailable, MkernelError
from mkernel.harness.outcome import CheckFailed, CheckSkipped, HarnessError
from mkernel.selection import chosen_verbs
from mkernel.settings import AUTO, NicSettings
from mkernel.settings import load as load_settings
from mkernel.topology.lanes import RankLanes, nic_schedule
from mkernel.topology.model import Nic

Bytes = npt.NDArray[np.uint8]

SIGNALS = 512
CLOSE_S = 1.0
"""The seconds that the contract gives ``close``."""
_BUSY_S = 3.0
"""The most that a busy machine may add to what a contract gives."""


class Memory:
    """Zeroed memory that a NIC can register; shared pages, as symmetric memory has them."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("mkernel-conformance")
        try:
            os.ftruncate(fd, nbytes)
            self.bytes: Bytes = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        finally:
            os.close(fd)
        self.address: int = self.bytes.ctypes.data
        self.nbytes = nbytes


class Port:
    """A rank's joined session: region 0 is ``memory`` on every rank, bound to every peer."""

    def __init__(self, rank: int, session: NicSession, nbytes: int, timeout_s: float) -> None:
        self.rank = rank
        self.session = session
        self.timeout_s = timeout_s
        self.memory = Memory(nbytes)
        self._pad_memory = Memory(_transport.pad_bytes(SIGNALS))
        self.pad = self._pad_memory.address
        _transport.pad_format(self.pad, SIGNALS)

    def count(self, index: int) -> int:
        """Return a signal's counter, as it is now."""
        return _transport.pad_load(self.pad, index)

    def wait(self, index: int, value: int, what: str) -> None:
        """Wait until a signal's counter is at least ``value``; CheckFailed at the deadline."""
        if _transport.pad_wait(self.pad, index, value, self.timeout_s) != _transport.WaitResult.ok:
            raise CheckFailed(
                f"{what}: rank {self.rank} waited for {value} on signal {index} and saw "
                f"{self.count(index)} after {self.timeout_s:g} s{self.failed()}"
            )

    def exactly(self, index: int, value: int, what: str) -> None:
        """Wait as ``wait`` does; then the counter must be just that."""
        self.wait(index, value, what)
        if self.count(index) != value:
            raise CheckFailed(f"{what}: signal {index} is {self.count(index)}, expected {value}")

    def flush(self) -> None:
        """Raise CheckFailed where the session's puts do not complete."""
        if not self.session.flush(self.timeout_s):
            raise CheckFailed(f"rank {self.rank}: flush returned False{self.failed()}")

    def failed(self) -> str:
        """Return what the session says went wrong, to append to a message."""
        failure = self.session.failure()
        return "" if failure is None else f"; the session failed: {failure}"

    def aborted(self) -> bool:
        """Return whether the session (or a time-out) set the pad's abort word."""
        return _transport.pad_aborted(self.pad)


def held_in_shm() -> set[int]:
    """Return the inodes of the files in /dev/shm that this process has open or mapped, under whatever
    name."""
    device = os.stat("/dev/shm").st_dev
    found = set()
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        major, _, minor = (fields := line.split(maxsplit=5))[3].partition(":")
        if os.makedev(int(major, 16), int(minor, 16)) == device:
            found.add(int(fields[4]))
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            status = os.stat(f"/proc/self/fd/{fd}")
            if status.st_dev == device:
                found.add(status.st_ino)
    return found


_AFTER_FAILURE: list[Port] = []
"""Ports of checks that failed. Their memory stays until the process ends, because a session that broke
its promises may still write to it."""


class Rank:
    """A check's own rank, as its body sees it. ``held`` are the inodes of files in /dev/shm that this
    process had open or mapped when a session had started or was about to be closed, but not before."""

    def __init__(self, subject: NicSubject, rank: int, size: int, pipe: Connection) -> None:
        self.held: set[int] = set()
        self._inherited = held_in_shm()
        self.subject = subject
        self.rank = rank
        self.size = size
        self._pipe = pipe

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the other ranks."""
        return tuple(peer for peer in range(self.size) if peer != self.rank)

    def exchange(self, value: Any = None) -> list[Any]:
        """Return every rank's value, by rank; None for a rank that has died. Also a barrier."""
        self._pipe.send(("exchange", value))
        values: list[Any] = self._pipe.recv()
        return values

    @contextlib.contextmanager
    def open(
        self, nbytes: int, *, prepare: Callable[[Port], None] = lambda port: None, **settings: Any
    ) -> Iterator[Port]:
        """Open a joined session, closed at the end (after a barrier where nothing was raised).

        Args:
            nbytes: size of region 0. prepare: called before anybody can put here.
            settings: of :class:`NicSettings`.
        """
        session = self.subject.session(self.rank, **settings)
        try:
            port = Port(self.rank, session, nbytes, self.subject.timeout_s)
            prepare(port)
            told = self.exchange({peer: session.address(peer) for peer in self.peers})
            for peer in self.peers:
                session.connect(peer, told[peer][self.rank])
            session.start(port.pad, ())
            self._look()  # the caller may close the session
            self.exchange()
            self.share(port, 0, port.memory.address, nbytes)
            try:
                yield port
            except CheckFailed:
                _AFTER_FAILURE.append(port)
                raise
            self.exchange()
        finally:
            self._look()
            session.close()

    def _look(self) -> None:
        self.held |= held_in_shm() - self._inherited

    def share(self, port: Port, region: int, address: int, nbytes: int) -> None:
        """Register a region and bind it to every peer's. Collective."""
        keys = self.exchange(port.session.register(region, address, nbytes))
        for peer in self.peers:
            port.session.bind(region, peer, keys[peer])
        self.exchange()


Body = Callable[..., Any]


@dataclass(frozen=True)
class NicSubject:
    """The NIC under test and how it is tested.

    Attributes:
        name: of the backend, or ``module:attribute`` of one that no entry point names.
        verbs: its provider. quick: fewer and smaller puts. seed: of sizes and payloads.
        timeout_s: deadline of every wait inside a check.
        divisor: of the amount of traffic, for devices that are emulated and slow.
        start: how rank processes start; ``fork`` spares the import of a fork server.
        settings: of sessions, where a check wants no other; by default the environment's.
    """

    name: str
    verbs: str = "soft"
    quick: bool = False
    seed: int = 0
    timeout_s: float = 20.0
    divisor: int = 1
    start: Literal["forkserver", "fork"] = "forkserver"
    settings: NicSettings = field(default_factory=lambda: load_settings().nic_settings)

    def __str__(self) -> str:
        return f"nic {self.name} on {self.verbs}"

    @classmethod
    def usable(cls, name: str, verbs: str | None, quick: bool, seed: int) -> NicSubject:
        """Return the subject of a backend that can run here. ``verbs``: None is the setting's, or the
        backend's first provider where it does not know that. UnknownBackend, BackendUnavailable."""
        if verbs is None:
            known = registry.nic(name).providers
            preferred = load_settings().verbs
            verbs = preferred if preferred in (AUTO, *known) or not known else known[0]
        if verbs == AUTO:
            verbs = chosen_verbs(name)
        subject = cls(name, verbs, quick, seed)
        subject.port()
        return subject

    def backend(self) -> NicBackend:
        """Return the backend itself. UnknownBackend, BackendUnavailable."""
        return registry.nic(self.name)

    def port(self) -> Nic:
        """Return the first active port."""
        backend = self.backend()
        status = backend.status(self.verbs)
        if not status.usable:
            raise BackendUnavailable(f"{self}: {status.detail}; {status.remedy}")
        active = [nic for nic in backend.probe(self.verbs) if nic.active]
        if not active:
            raise BackendUnavailable(f"{self}: usable, but probe() finds no active device")
        return active[0]

    def lanes(self, rank: int, **settings: Any) -> RankLanes:
        """Return the lanes that a rank's session follows: all ranks use the first active port."""
        use = self.backend().use(self._with(settings))
        schedule = nic_schedule(use, several_rails=False)
        return RankLanes.between_equals(rank, (self.port(),), schedule)

    def session(self, rank: int, **settings: Any) -> NicSession:
        """Open the port in this process."""
        lanes = self.lanes(rank, **settings)
        return self.backend().open(self.verbs, lanes, self._with(settings))

    def _with(self, settings: Mapping[str, Any]) -> NicSettings:
        return NicSettings.model_validate({**self.settings.model_dump(), **settings})

    def scale(self, whole: int, quick: int) -> int:
        """Return ``whole``, or ``quick`` where a quick run was asked for; at least 1."""
        return max(1, (quick if self.quick else whole) // self.divisor)

    def variants(self) -> tuple[Mapping[str, str], ...]:
        """Return environments to repeat the data checks in: the software device can be made to cut puts
        into many messages, to copy through its rings and to draw another order, which other
        providers do by themselves."""
        if self.verbs != "soft":
            return ({},)
        seeds = iter(range(self.seed + 1, self.seed + 4))
        settings = [{}, {"MAX_MESSAGE": "4096"}]
        if not self.quick:
            settings.append({"BY_REFERENCE": "0", "RELAXED_ORDERING": "1"})
        return tuple(
            {f"MKERNEL_SOFTVERBS_{name}": value for name, value in each.items()}
            for each in ({"SEED": str(next(seeds)), **chosen} for chosen in settings)
        )

    def slow_link(self, latency_s: float) -> Mapping[str, str]:
        """Return an environment in which the software device takes that long over each message."""
        if self.verbs != "soft":
            return {}
        return {"MKERNEL_SOFTVERBS_LATENCY_NS": str(round(latency_s * 1e9))}

    def run(
        self,
        body: Body,
        ranks: int,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        dies: Sequence[int] = (),
    ) -> list[Any]:
        """Run ``body(rank, *arguments)`` in ``ranks`` processes; their results by rank.

        Args:
            body: a module-level function. dies: ranks that kill themselves; their result is None.

        Raises:
            CheckFailed: a rank failed, died or hangs. CheckSkipped: a rank says so.
        """
        context: ForkContext | ForkServerContext = multiprocessing.get_context("fork")
        if self.start == "forkserver":
            context = fork_server.context()
        members: list[_Member] = []
        try:
            work = pickle.dumps((self, body, arguments, {**os.environ, **(environment or {})}))
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, ranks, work, theirs),
                    name=f"mkernel-nic{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                members.append(_Member(rank, process, ours, rank in dies))
            _serve(members, 30.0 + 3 * self.timeout_s)
            return [member.value for member in members]
        finally:
            for member in members:
                member.end()


@dataclass
class _Member:
    """A rank process as the parent sees it. ``state``: running, waiting (in an exchange), done."""

    rank: int
    process: BaseProcess
    pipe: Connection
    may_die: bool
    state: str = "running"
    value: Any = None

    def receive(self) -> None:
        """Take one message."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            code = self.process.exitcode
            if code is not None and code > 0:  # a body's own errors come as messages
                raise HarnessError(f"rank {self.rank} did not run: code {code}") from None
            how = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
            if not self.may_die:
                raise CheckFailed(f"rank {self.rank} died: {how}") from None
            self.state, self.value = "done", None
            return
        if kind == "skipped":
            raise CheckSkipped(value)
        if kind == "failed":
            raise CheckFailed(value)
        self.state, self.value = ("waiting" if kind == "exchange" else "done"), value

    def end(self) -> None:
        """End the process, which is gone when this returns."""
        self.pipe.close()
        if self.state == "done":
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.process.close()


def _serve(members: list[_Member], limit_s: float) -> None:
    """Answer exchanges until every rank is done. ``limit_s``: longest silence of all ranks."""
    while running := [member for member in members if member.state == "running"]:
        ready = wait([member.pipe for member in running], limit_s)
        if not ready:
            raise CheckFailed(
                f"rank {running[0].rank} hangs: it has not answered for {limit_s:g} s"
            )
        for member in running:
            if member.pipe in ready:
                member.receive()
        waiting = [member for member in members if member.state == "waiting"]
        if waiting and not any(member.state == "running" for member in members):
            values = [member.value for member in members]
            for member in waiting:
                member.state = "running"
                member.pipe.send(values)


def _rank_main(rank: int, size: int, work: bytes, pipe: Connection) -> None:
    fork_server.leave_ctrl_c_to_parent()
    message: tuple[str, Any]
    try:
        subject, body, arguments, environment = pickle.loads(work)
        os.environ.clear()
        os.environ.update(environment)
        message = ("result", body(Rank(subject, rank, size, pipe), *arguments))
    except CheckSkipped as skipped:
        message = ("skipped", str(skipped))
    except CheckFailed as failed:
        message = ("failed", str(failed))
    except MkernelError as error:
        message = ("failed", f"rank {rank}: {type(error).__name__}: {error}")
    except EOFError:
        return  # the parent is gone, or has given up on this check
    except Exception:
        message = ("failed", f"rank {rank}: {traceback.format_exc(limit=-3)}")
    with contextlib.suppress(OSError):
        pipe.send(message)
    pipe.close()


class Pattern:
    """Random bytes, the same on every rank; a put's payload is a window of them."""

    def __init__(self, seed: int, nbytes: int) -> None:
        self.bytes: Bytes = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def window(self, at: int, nbytes: int) -> Bytes:
        """Return ``nbytes`` from ``at``."""
        return self.bytes[at : at + nbytes]


def poison(target: Bytes, expected: Bytes) -> None:
    """Make every byte of ``target`` differ from ``expected``, so that none can go missing."""
    np.invert(expected, out=target)


def require_equal(got: Bytes, expected: Bytes, what: str) -> None:
    """Raise CheckFailed where bytes differ; say how many and where the first is.

    The last bytes are looked at first: a signal that comes early comes before those.
    """
    tail = slice(max(0, len(expected) - 64), None)
    early = not np.array_equal(got[tail], expected[tail])
    if not early and np.array_equal(got, expected):
        return
    wrong = np.flatnonzero(got != expected)
    if not len(wrong):
        raise CheckFailed(f"{what}: the last bytes came after the signal ({len(got)} in all)")
    raise CheckFailed(
        f"{what}: {len(wrong)} of {len(got)} bytes are wrong, the first at {wrong[0]}"
    )


def _stalled_s() -> float:
    """Return the seconds since boot in which some task of this machine was ready and waited for a
    CPU."""
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:  # a kernel that does not count them
        return time.monotonic()
    return int(some.rpartition("total=")[2]) / 1e6


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise CheckFailed where what is done inside takes longer, not counting (up to a limit) time in
    which this machine had more to do than CPUs to do it."""
    start, stalled = time.monotonic(), _stalled_s()
    yield
    took, stalled = time.monotonic() - start, _stalled_s() - stalled
    if took > seconds + min(stalled, _BUSY_S):
        raise CheckFailed(f"{what} took {took:.2f} s, expected at most {seconds:g} s")


def deadline(timeout_s: float) -> Callable[[], bool]:
    """Return a function that tells whether ``timeout_s`` have passed since now."""
    end = time.monotonic() + timeout_s
    return lambda: time.monotonic() > end
