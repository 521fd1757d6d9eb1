"""The link between two guests is cut and comes back. Each guest is one rank and runs these tests.

The ranks meet over the guests' second network, which stays up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
from rxe_guest import DEVICE, only_in_guest

from mkernel.backends.nics.provider import list_nics
from mkernel.errors import NicError
from mkernel.harness.nic_ranks import NicSubject, Pattern, Port, Rank, poison, require_equal

pytestmark = only_in_guest
GUEST = int(os.environ.get("GUEST", "0"))
CONTROL = ("10.99.1.1", 4791)  # of guest 0
SUBJECT = NicSubject("cx7", "system", timeout_s=90.0)
PATIENT = {"qp_timeout": 20}
"""Four seconds a try, since a busy machine lets an emulated guest stand still."""
CUT = {"qp_timeout": 16}
"""A quarter of a second a try, seven tries."""
NOTICED_S = 60.0
"""Deadline of a cut link's error."""
MIB = 1 << 20


class Meeting:
    """What :class:`Rank` takes for the pipe to its parent: the two ranks tell each other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._mine: Any = None

    def send(self, message: tuple[str, Any]) -> None:
        _, self._mine = message
        self._connection.send(self._mine)

    def recv(self) -> list[Any]:
        assert self._connection.poll(SUBJECT.timeout_s), "the other guest does not answer"
        theirs = self._connection.recv()
        return [self._mine, theirs] if GUEST == 0 else [theirs, self._mine]


def connect(timeout_s: float) -> socket.socket:
    """To the other guest, which may come later."""
    if GUEST == 0:
        with socket.create_server(CONTROL) as server:
            server.settimeout(timeout_s)
            return server.accept()[0]
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(CONTROL, timeout=1)
        assert time.monotonic() < deadline, "the other guest does not come"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def me() -> Iterator[Rank]:
    with connect(270) as end:
        end.setblocking(True)
        with Connection(os.dup(end.fileno())) as connection:
            yield Rank(SUBJECT, GUEST, 2, cast(Connection, Meeting(connection)))


def set_link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "data", state], check=True, timeout=60)


def port_is_up() -> bool:
    return any(nic.active for nic in list_nics("system") if nic.name == DEVICE)


def carries(me: Rank) -> None:
    """A world of its own: 1 MiB each way."""
    with me.open(2 * MIB, **PATIENT) as port:
        pattern = Pattern(me.rank, MIB), Pattern(1 - me.rank, MIB)
        port.memory.bytes[:MIB] = pattern[0].bytes
        poison(port.memory.bytes[MIB:], pattern[1].bytes)
        me.exchange()
        port.session.put(1 - me.rank, 0, 0, MIB, MIB, 0, 1)
        port.exactly(0, 1, "a put between two machines")
        require_equal(port.memory.bytes[MIB:], pattern[1].bytes, "a put between two machines")
        port.flush()


def put_until_it_fails(port: Port) -> float:
    """Seconds until the session has failed; NOTICED_S where it has not by then."""
    start = time.monotonic()
    with contextlib.suppress(NicError):
        while port.session.failure() is None and time.monotonic() - start < NOTICED_S:
            port.session.put(1 - port.rank, 0, 0, MIB, 4096, 0, 1)
            time.sleep(0.001)
    return time.monotonic() - start


@pytest.mark.parametrize("cut_by", [(0,), (0, 1)], ids=["one end", "both"])
def test_a_cut_link_fails_both_ranks_and_a_new_world_works(
    me: Rank, cut_by: tuple[int, ...], record_testsuite_property: Callable[[str, object], None]
) -> None:
    carries(me)
    with me.open(2 * MIB, **CUT) as port:
        me.exchange()
        try:
            if me.rank in cut_by:
                set_link("down")
            took = put_until_it_fails(port)
            failure = port.session.failure()
            record_testsuite_property(f"cut by {cut_by}", f"{failure}, after {took:.2f} s")
            assert isinstance(failure, NicError), f"no error {took:.1f} s after the cut"
            if me.rank in cut_by:
                assert failure.status == "PORT_ERR"
            else:
                assert (failure.status, failure.peer) == ("RETRY_EXC_ERR", 1 - me.rank)
            assert port.aborted(), "waits go on"
            with pytest.raises(NicError):
                port.session.put(1 - me.rank, 0, 0, MIB, 4096, 0, 1)
            me.exchange()  # not before both have seen it
        finally:
            if me.rank in cut_by:
                set_link("up")
    deadline = time.monotonic() + NOTICED_S
    while not port_is_up() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert port_is_up(), "the port does not come up again"
    me.exchange()
    carries(me)
