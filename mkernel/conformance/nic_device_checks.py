"""The check of a session's reaction to faults of its device, which the software device can have.

Each case is a world of three in the same three processes: rank 0's device has the fault, everybody
puts to everybody. A rank that finds its session failed closes it, as a broken world does, so that
the others lose a peer. Then the same processes make a new world, which must work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mkernel.conformance.check import Check
from mkernel.conformance.nic_life_checks import (
    close_in_time,
    left_behind,
    require,
    require_nothing_more,
    use_once,
)
from mkernel.errors import MkernelError, NicError
from mkernel.harness.environment import variables
from mkernel.harness.nic_ranks import NicSubject, Port, Rank, deadline
from mkernel.harness.outcome import CheckFailed, CheckSkipped

_KIB = 1 << 10
_NBYTES = 8 * _KIB
_PUTS = 200
_LOST = frozenset({"RETRY_EXC_ERR", "RESP_TIMEOUT_ERR"})
"""The statuses of a peer that does not answer: of RC, and of SRD."""
_GONE = _LOST | {"REM_INV_RD_REQ_ERR", "REM_OP_ERR"}
"""The statuses of a lost peer, and of one that answers without a queue pair or a handle any more
(SRD)."""
_BROKEN = frozenset({"QP_FATAL", "WR_FLUSH_ERR"})
_IMPATIENT = {"qp_timeout": 12, "retry_count": 3}
"""Settings with which a silent peer is an error after about 70 ms."""


@dataclass(frozen=True)
class Case:
    """A fault of rank 0's device (``MKERNEL_SOFTVERBS_FAULTS``) and what it must come to.

    Attributes:
        fault: the fault and when it comes. statuses: rank 0's error has one of these; none: it sees
            no error.
        heals: nobody sees an error, and nothing is lost.
    """

    fault: str
    statuses: frozenset[str] = frozenset()
    heals: bool = False


CASES = (
    Case("drop@50", _LOST),
    Case("cut@50", _LOST),
    Case("cut@100ms", _LOST),
    Case("cut@50+40ms", heals=True),
    Case("stall@50"),
    Case("stall@100ms+40ms", heals=True),
    Case("qp-error@50", _BROKEN),
    Case("qp-error@100ms", _BROKEN),
    Case("cq-overflow@50", frozenset({"CQ_ERR"})),
)
_REGISTRATION_S = 3.0
"""The fault comes so many seconds after the device was opened: until then, region 0 is registered,
on a busy machine too."""


@contextlib.contextmanager
def _world(me: Rank, fault: str, patient: bool) -> Iterator[Port]:
    """Open a session on every rank; rank 0's device has the fault."""
    values = {} if patient else {"MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS": "70"}
    if me.rank == 0:
        values["MKERNEL_SOFTVERBS_FAULTS"] = fault
    with contextlib.ExitStack() as stack:
        with variables(values):
            settings: dict[str, Any] = {} if patient else _IMPATIENT
            port = stack.enter_context(me.open(4 * _NBYTES, **settings))
        yield port


def _put_all(me: Rank, port: Port) -> None:
    """Put to every peer in turn, about as long as the faults that come by time need. Raises
    NicError."""
    for step in range(_PUTS):
        _put_to_each(me, port)
        if step % 4 == 0:
            time.sleep(0.004)


def _put_to_each(me: Rank, port: Port) -> None:
    for peer in me.peers:
        port.session.put(peer, 0, 0, (1 + me.rank) * _NBYTES, _NBYTES, me.rank, 1)


def _breaks(me: Rank, case: Case) -> None:
    with _world(me, case.fault, patient=False) as port:
        start = time.monotonic()
        with contextlib.suppress(NicError):
            _put_all(me, port)
        blind = me.rank == 0 and not case.statuses
        late = deadline(1.0 if blind else port.timeout_s / 2)
        while port.session.failure() is None and not late():
            # A rank that was done before rank 0 met its fault sees that one gone by its next put.
            if not blind:
                with contextlib.suppress(NicError):
                    _put_to_each(me, port)
            time.sleep(0.005)
        failure = port.session.failure()
        seconds = time.monotonic() - start
        what = f"{case.fault} at rank 0: rank {me.rank}"
        if blind:
            require(
                failure is None, f"{what} has no word of its stalled device, but says {failure}"
            )
            require(not port.session.flush(0.05), f"{what} flushed puts that are still under way")
        else:
            wanted = case.statuses if me.rank == 0 else _GONE
            require(failure is not None, f"{what} saw no error in {seconds:.1f} s")
            assert failure is not None
            require(failure.status in wanted, f"{what} saw {failure}, expected {sorted(wanted)}")
            known = failure.peer in me.peers or failure.status == "CQ_ERR"
            require(known, f"{what} says {failure}, which names no peer")
            aborted = deadline(port.timeout_s / 2)
            while not port.aborted() and not aborted():
                time.sleep(0.005)
            require(port.aborted(), f"{what} leaves its pad's abort word unset")
        close_in_time(port.session, f"after {case.fault} at rank 0")


def _heals(me: Rank, case: Case) -> None:
    with _world(me, case.fault, patient=True) as port:
        _put_all(me, port)
        for peer in me.peers:
            port.exactly(peer, _PUTS, f"{case.fault} at rank 0")
        port.flush()
        require(port.session.failure() is None, f"{case.fault} at rank 0{port.failed()}")


def _registration_fails(me: Rank) -> None:
    """Refuse one registration; the session must then go on as if it had not been requested."""
    fault = f"registration@{_REGISTRATION_S * 1e3:.0f}ms"
    with _world(me, fault, patient=True) as port:
        time.sleep(_REGISTRATION_S + 0.1)  # the device was opened before: it counts from then
        at = port.memory.address
        if me.rank == 0:
            try:
                port.session.register(1, at, _NBYTES)
            except MkernelError as error:
                require("region 1" in str(error), f"a failed registration only says {error}")
            else:
                raise CheckFailed("a registration that the device refused raised nothing")
        me.exchange()
        me.share(port, 1, at, _NBYTES)
        port.session.put(me.peers[0], 1, 0, 0, 100, me.rank, 1)
        if me.rank < 2:  # ranks 1 and 2 put to rank 0, rank 0 to rank 1
            port.wait(me.peers[0], 1, "a put in a region that was refused once")
        port.flush()


def _all(me: Rank) -> None:
    use_once(me, 0)
    before = left_behind(me)
    for turn, case in enumerate(CASES):
        (_heals if case.heals else _breaks)(me, case)
        use_once(me, 1 + turn)
    _registration_fails(me)
    require_nothing_more(me, before, f"{len(CASES)} worlds broke")


def device_faults(subject: NicSubject) -> None:
    """Plant every kind of fault, by count and by time; the right error must come everywhere, and
    then a new world must work."""
    if subject.verbs != "soft":
        raise CheckSkipped("only the software device has faults to order")
    subject.run(_all, 3)


DEVICE_FAULT_CHECKS = (
    Check(
        "device-faults",
        "a device's fault is the right error on every rank in time, and a new world works",
        device_faults,
    ),
)
