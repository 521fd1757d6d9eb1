"""Planted faults of the NIC checks: a table of honest backends with one promise broken each.

Each row is a NIC backend, ``mkernel.conformance.nic_faults:Name`` where a backend's name is
expected. Rows of :data:`FAULTS` are grouped by the backend that they wrap; a check that no row
trips does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

from mkernel.backends.contracts.nic import SELF, NicSession
from mkernel.backends.contracts.status import Status
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.transport import _transport
from mkernel.conformance.faults.rows import Plant, Row, checks_by_name, planted
from mkernel.conformance.nic_faults import sessions
from mkernel.conformance.nic_faults.flags import HOLD_NS, Flags
from mkernel.conformance.nic_faults.wrappers import DataLater, Opener, Put, Relayed, Session
from mkernel.errors import NicError
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes


def _session(base: type[Any] = Session, **methods: Callable[..., Any]) -> Plant:
    """Plant sessions of another class, or with other methods."""
    return {"session": type(base.__name__, (base,), methods)}


def _puts(change: Callable[[Put], Iterable[Put]], every: int = 1) -> Plant:
    """Plant a change of every put, or of every so-many-th of a session, into what ``change`` makes
    of it."""
    return _session(change=lambda self, put: [put] if next(self.number) % every else change(put))


def _answers(method: str, change: Callable[[Any], Any]) -> Plant:
    """Plant a change of the session's answer to a method."""
    methods = {method: lambda self, *given: change(getattr(self.inner, method)(*given))}
    return {"session": type("Session", (Session,), methods)}


def _at_times_unordered() -> Callable[[Any], Any]:
    calls = count()
    return lambda found: found.model_copy(update={"ordered": next(calls) % 2 == 0})


def _at_open(act: Callable[[], Any]) -> Plant:
    """Plant an action whenever a session is opened."""

    def start(self: Session, inner: NicSession) -> None:
        Session.__init__(self, inner)
        act()

    return _session(__init__=start)


def _wrap_at_32_bits(self: Relayed, pad: int, index: int, value: int) -> None:
    before = _transport.pad_load(pad, index)
    if before % (1 << 32) + value >= 1 << 32:
        value += (1 << 64) - (1 << 32)
    _transport.pad_add(pad, index, value)


def _put_quietly(self: Relayed, *put: int) -> None:
    with contextlib.suppress(NicError):
        self.inner.put(*put)


def _raise_if_unusable(self: Opener, verbs: str) -> Status:
    found = Opener.status(self, verbs)
    if not found.usable:
        raise OSError(found.detail)
    return found


def _open_anything(self: Opener, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
    return Opener.open(self, "soft", replace(lanes, ports=self.probe("soft")[:1]), settings)


def _open_what_it_can(
    self: Opener, verbs: str, lanes: RankLanes, settings: NicSettings
) -> NicSession:
    most = min(lanes.schedule.queue_pairs, self.max_queue_pairs)
    schedule = lanes.schedule.model_copy(update={"queue_pairs": most})
    return Opener.open(self, verbs, replace(lanes, schedule=schedule), settings)


def _connect_to_any(self: Session, peer: int, address: str) -> None:
    told = json.loads(address)
    own = self.lanes.schedule
    told["plan"] |= {"queue_pairs": own.queue_pairs, "stripe_bytes": own.stripe_bytes}
    self.inner.connect(peer, json.dumps(told))


_HELD = {"MKERNEL_SOFTVERBS_HOLD_NS": str(HOLD_NS)}
_RELAXED = {**_HELD, "MKERNEL_SOFTVERBS_RELAXED_ORDERING": "1"}
"""Settings that relax order whatever a registration says, as cards can be set up to do."""
_ONCE = {**_HELD, "MKERNEL_SOFTVERBS_DUPLICATES": "0"}
"""Settings without duplicates: a second placement would be held far longer."""

# fmt: off
_ON_RC: tuple[Row, ...] = (
    planted(Opener, "SignalFirst", "The signal goes out before the data.", "visibility",
            _session(DataLater)),
    planted(Opener, "SignalFirstAtTimes",
            "The signal goes out before the data, once in 100 puts that carry data.", "visibility",
            _session(sessions.SignalFirstAtTimes)),
    planted(Opener, "SignalBeforeTail", "The last 16 bytes travel after the signal.", "visibility",
            _session(sessions.SignalBeforeTail)),
    planted(Opener, "RelaxedFlag",
            "The flag is a write behind its data, to memory with relaxed ordering.", "visibility",
            _session(Flags), schedule={"queue_pairs": 1}, environment=_RELAXED),
    planted(Opener, "PeersOfTwoBits", "Ranks above 3 are taken for those below.", "worlds",
            _puts(lambda put: [put._replace(peer=put.peer & 3)])),
    planted(Opener, "CutsOddSizes", "The last byte of an odd size does not travel.", "sizes",
            _puts(lambda put: [put._replace(nbytes=put.nbytes & ~1)])),
    planted(Opener, "FirstMegabyteOnly", "What is beyond 1 MiB of a put does not travel.", "sizes",
            _puts(lambda put: [put._replace(nbytes=min(put.nbytes, 1 << 20))])),
    planted(Opener, "EmptyPutsLost", "A put of no bytes does nothing, its signal included.", "sizes",
            _puts(lambda put: [put] if put.nbytes else [])),
    planted(Opener, "OneByteMore", "A put writes the byte behind it too.", "sizes alignment",
            _puts(lambda put: [put._replace(nbytes=put.nbytes + 1) if put.nbytes else put])),
    planted(Opener, "RemoteAligned", "Remote offsets are rounded down to a multiple of 4.",
            "alignment", _puts(lambda put: [put._replace(remote=put.remote & ~3)])),
    planted(Opener, "LocalAligned", "Local offsets are rounded down to a multiple of 8.",
            "alignment", _puts(lambda put: [put._replace(local=put.local & ~7)])),
    planted(Opener, "LosesPuts", "Every 1000th put is lost.", "in-flight",
            _puts(lambda put: [], every=1000)),
    planted(Opener, "LosesData", "Every 1000th put is its signal alone.", "in-flight",
            _puts(lambda put: [put._replace(nbytes=0)], every=1000)),
    planted(Opener, "RepeatsPuts", "Every 1000th put happens twice.", "in-flight",
            _puts(lambda put: [put, put], every=1000)),
    planted(Opener, "DeadFifo", "The FIFO's handle names a ring that nobody drains.", "fifo",
            _session(sessions.DeadFifo)),
    planted(Opener, "AddsOne", "Whatever the value, 1 is added.", "signal-values",
            _puts(lambda put: [put._replace(value=min(put.value, 1))])),
    planted(Opener, "SevenBitValues", "Values above 127 are cut to seven bits.", "signal-values",
            _puts(lambda put: [put._replace(value=put.value & 127)])),
    planted(Opener, "SequenceWraps",
            "A sequence number of 12 bits: every 4096th put on a signal is taken for a repetition.",
            "counter-wrap", _session(sessions.SequenceWraps)),
    planted(Opener, "CountersOf32Bits", "Signals wrap around at 2^32.", "counter-wrap",
            _session(Relayed, carry=_wrap_at_32_bits)),
    planted(Opener, "Reorders",
            "A put is held back until the next one is out, and until the receiver has looked.",
            "order", _session(sessions.Reorders)),
    planted(Opener, "FlushAtOnce", "Flush returns True while puts have yet to read their source.",
            "flush", _session(sessions.FlushAtOnce)),
    planted(Opener, "CompletesAtOnce", "A completion is raised when it is queued.", "completion",
            _session(sessions.CompletesAtOnce)),
    planted(Opener, "CompletesNever", "Completions are dropped.", "completion",
            _puts(lambda put: [] if put.peer == SELF else [put])),
    planted(Opener, "FlushNever", "Flush returns False whatever happened.", "flush",
            _answers("flush", lambda done: False)),
    planted(Opener, "RegionsTooWide",
            "A registration covers 4 KiB more at its end than was asked for.", "registration",
            _session(register=lambda self, region, address, nbytes:
                     self.inner.register(region, address, nbytes + 4096 * (region > 0)))),
    planted(Opener, "DropsSilently",
            "What lies outside of a region is neither written nor refused.", "registration",
            _session(sessions.DropsSilently)),
    planted(Opener, "RegionsAlias", "Region numbers are kept in five bits.", "registration",
            _puts(lambda put: [put._replace(region=put.region % 32)])),
    planted(Opener, "KeepsRegions", "Deregistering does nothing.", "churn",
            _session(deregister=lambda self, region, timeout_s: None)),
    planted(Opener, "SwallowsErrors",
            "Failures are nobody's business: no error, no abort word.",
            "killed-peer registration device-faults",
            _session(Relayed, put=_put_quietly, failure=lambda self: None)),
    planted(Opener, "NoAbort",
            "A failure is known to the session, but waiting kernels are not woken.",
            "killed-peer device-faults", _session(Relayed)),
    planted(Opener, "NamesNobody", "Errors do not say which peer.", "killed-peer",
            _answers("failure", lambda found: found and NicError(str(found), status=found.status))),
    planted(Opener, "SlowClose", "Close waits a while for the network, the first time.",
            "close killed-peer", _session(sessions.SlowClose)),
    planted(Opener, "CloseLater", "Close returns while the NIC still works.", "close",
            _session(sessions.CloseLater)),
    planted(Opener, "LeaksDescriptor", "Each session leaves a file open.", "reopen device-faults",
            _at_open(lambda: os.open("/dev/null", os.O_RDONLY))),
    planted(Opener, "LeaksThread", "Each session leaves a thread.", "reopen",
            _at_open(lambda: threading.Thread(target=threading.Event().wait, daemon=True).start())),
    planted(Opener, "LeaksMemory", "Each session leaves shared memory mapped.", "reopen",
            _session(sessions.LeaksMemory)),
    planted(Opener, "BusyLoop", "The session polls without a pause.", "idle-cpu",
            _session(sessions.BusyLoop)),
    planted(Opener, "CountsTwice", "Bytes of puts are counted twice.", "statistics",
            _answers("statistics", lambda found: replace(found, put_bytes=2 * found.put_bytes))),
    planted(Opener, "CountsSignalsOnly", "A put without a signal does not count.", "statistics",
            _answers("statistics", lambda found: replace(found, puts=found.signals_sent))),
    planted(Opener, "StatusRaises", "Status of a provider that is not there raises.",
            "capabilities", status=_raise_if_unusable),
    planted(Opener, "OpensAnything", "Open takes any device name.", "capabilities",
            open=_open_anything),
    planted(Opener, "QueuePairsUnused", "There is one queue pair, whatever the plan says.", "plan",
            schedule={"queue_pairs": 1}),
    planted(Opener, "NeverStripes", "The plan's stripe is not heeded.", "plan",
            schedule={"stripe_bytes": 1 << 40}),
    planted(Opener, "OpensWhatItCan", "Of too many queue pairs it makes as many as it can.", "plan",
            open=_open_what_it_can),
    planted(Opener, "ConnectsToAny", "A peer's plan is taken for the own one.", "plan",
            _session(connect=_connect_to_any)),
    planted(Opener, "TakesStrangers", "Puts of whoever knows where a rank is are taken.", "strangers",
            _session(sessions.TakesStrangers)),
    planted(Opener, "MissingReceiveOnRc",
            "Receives are not posted again after the first thousand.", "in-flight",
            mistake="missing-receive"),
    planted(Opener, "ChangesItsClaims", "Capabilities differ from call to call.", "capabilities",
            _answers("capabilities", _at_times_unordered())),
)

_ON_SRD: tuple[Row, ...] = (
    planted(Opener, "SeparateFlag", "The flag is an SRD write of its own.", "visibility",
            _session(Flags), around=EfaNic, environment=_ONCE),
    planted(Opener, "MiscountedImmediate",
            "Of a put of several messages, one immediate fewer is counted than there are.",
            "visibility", around=EfaNic, mistake="miscount"),
    planted(Opener, "MissingReceive", "Receives are not posted again after the first thousand.",
            "in-flight", around=EfaNic, mistake="missing-receive"),
)

HONEST: tuple[Row, ...] = (
    planted(Opener, "Honest", "Breaks nothing: what the faults are wrapped in.",
            "sizes order flush registration reopen"),
    planted(Opener, "FlagBehindData",
            "Breaks nothing: on one RC queue pair, in strictly ordered memory, a flag may be a write "
            "behind its data.", "visibility in-flight", _session(Flags),
            schedule={"queue_pairs": 1}),
    planted(Opener, "HonestLibrary", "Breaks nothing: the library between passes everything on.",
            "visibility in-flight", around=EfaNic, mistake="none"),
)
# fmt: on

FAULTS = {"cx7": checks_by_name(__name__, _ON_RC), "efa": checks_by_name(__name__, _ON_SRD)}
"""Maps a backend to names of its faulty variants, and each of these to the checks that must fail on
it."""
_BACKENDS = {row.name: row.backend for row in (*_ON_RC, *_ON_SRD, *HONEST)}


def __getattr__(name: str) -> type[Opener]:
    """Return a row's backend, as the registry requests it."""
    try:
        return _BACKENDS[name]
    except KeyError:
        raise AttributeError(f"no planted fault is called {name!r}") from None
