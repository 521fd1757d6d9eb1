"""``cx7`` against a peer that shares no code with it: ``pyverbs_peer.py``, by ``docs/nics.md``.

Guest 0 is ``cx7``, guest 1 runs the program. They meet over the guests' second network; puts cross the
first one, both ways at once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_traffic import BATCH, INBOX, NBYTES, SIGNALS, add_up, batch_of
from rxe_guest import only_in_guest, only_with_pyverbs

from mkernel.errors import NicError
from mkernel.harness.nic_ranks import NicSubject, Port
from mkernel.harness.outcome import CheckFailed

GUEST = int(os.environ.get("GUEST", "0"))
MEETING = ("10.99.1.1", 4792)  # of guest 0
ME, PEER = 0, 1
BATCHES = 30
"""A batch is 100 puts each way, four with a group; group numbers, modulo 64, are used again."""
MEETS_S = 270.0
RUNS_S = 280.0
SUBJECT = NicSubject("cx7", "system", timeout_s=60.0)
SETTINGS = {"qp_timeout": 16, "receive_depth": 64}
"""A quarter of a second a try; so few receives that both ends must wait for each other's credits."""
CHANGED = 57
"""The put of which a fault changes a byte, on either side."""

pytestmark = [only_in_guest, only_with_pyverbs]


class Line:
    """JSON texts, one a line, to the program."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(2 * SUBJECT.timeout_s)
        self._file = connection.makefile("rw")

    def say(self, **message: object) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line, "the program is gone; the other guest says why"
        return dict(json.loads(line))


@pytest.fixture(scope="module")
def line() -> Iterator[Line | None]:
    """To the program; None in the guest that runs it."""
    if GUEST != 0:
        yield None
        return
    with socket.create_server(MEETING) as server:
        server.settimeout(MEETS_S)
        with server.accept()[0] as connection:
            found = Line(connection)
            yield found
            found.say(batches=0)


def test_the_program_meets_no_error_of_its_own(line: Line | None) -> None:
    """Guest 1 runs it: it serves all that the tests below order."""
    if line is not None:
        return
    program = Path(__file__).with_name("pyverbs_peer.py")
    command = [sys.executable, str(program), *map(str, MEETING)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUNS_S, check=False)
    assert done.returncode == 0, done.stderr


def exchange_puts(
    line: Line,
    batches: int,
    *,
    fault: str = "",
    mine: bool = False,
    timeout_s: float = SUBJECT.timeout_s,
    **settings: Any,
) -> dict[str, Any]:
    """Both ends put so many batches; what the program says of ours.

    Args:
        fault: of the program's puts. mine: one byte of ours is wrong. timeout_s: of each wait.

    Raises:
        CheckFailed: counts or bytes of the program's puts are wrong. NicError: the session failed.
    """
    session = SUBJECT.session(ME, **SETTINGS, **settings)
    try:
        port = Port(ME, session, NBYTES, timeout_s)
        line.say(batches=batches, fault=fault, address=session.address(PEER))
        told = line.hear()
        session.connect(PEER, told["address"])
        session.start(port.pad, ())
        key = session.register(0, port.memory.address, NBYTES)
        session.bind(0, PEER, told["key"])
        line.say(key=key)
        try:
            put_and_check(port, batches, mine)
        except (CheckFailed, NicError) as error:
            line.say(closed="early")
            error.add_note(f"the program says: {line.hear()}")
            raise
        said = line.hear()
        if (failure := session.failure()) is not None:
            raise failure
        statistics = session.statistics()
        assert statistics.puts == statistics.signals_raised == batches * BATCH
        line.say(closed="in time")
        return said
    finally:
        session.close()


def put_and_check(port: Port, batches: int, mine: bool) -> None:
    """Our puts, and the program's, batch by batch. CheckFailed, NicError."""
    expected: dict[int, int] = {}
    for batch in range(batches):
        for slot, put in enumerate(batch_of(ME, batch)):
            nbytes = len(put.payload)
            here = port.memory.bytes[put.offset : put.offset + nbytes]
            here[:] = np.frombuffer(put.payload, dtype=np.uint8)
            if mine and slot == CHANGED:
                here[nbytes // 2] ^= 1
            at = INBOX + put.offset
            port.session.put(PEER, 0, put.offset, at, nbytes, put.signal, put.value)
        theirs = batch_of(PEER, batch)
        add_up(expected, theirs)
        check_arrivals(port, batch, expected)
        for slot, put in enumerate(theirs):
            at = INBOX + put.offset
            if port.memory.bytes[at : at + len(put.payload)].tobytes() != put.payload:
                raise CheckFailed(f"put {slot} of batch {batch}: its bytes are wrong")
    port.flush()


def check_arrivals(port: Port, batch: int, expected: dict[int, int]) -> None:
    """Every signal of a batch has what it must, and no more."""
    first = batch % 2 * SIGNALS
    signals = range(first, first + SIGNALS)
    try:
        for signal in signals:
            port.wait(signal, expected[signal], f"batch {batch}")
    except CheckFailed:
        if (failure := port.session.failure()) is not None:
            raise failure from None
        raise
    for signal in signals:
        port.exactly(signal, expected[signal], f"batch {batch}")


@pytest.mark.parametrize(
    ("batches", "settings"),
    [(BATCHES, {}), (6, {"qps": 2, "stripe_bytes": 4096})],
    ids=["one lane", "two lanes, striped"],
)
def test_thousands_of_puts_each_way(
    line: Line | None,
    batches: int,
    settings: dict[str, Any],
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    if line is None:
        return
    start = time.monotonic()
    said = exchange_puts(line, batches, **settings)
    assert said == {"wrong": "", "arrived": batches * BATCH}
    took = f"{batches * BATCH} puts each way in {time.monotonic() - start:.1f} s"
    record_testsuite_property(f"pyverbs {settings or 'one lane'}", took)
    print(took)


def incomplete() -> str:
    """What is seen when the first group of a batch never brings its value."""
    first = batch_of(PEER, 0)[0]
    counts: dict[int, int] = {}
    add_up(counts, batch_of(PEER, 0))
    whole = counts[first.signal]
    return f"waited for {whole} on signal {first.signal} and saw {whole - first.value} after"


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("layout", NicError, "which this rank's signal pad does not have"),
        ("group", CheckFailed, incomplete()),
        ("byte", CheckFailed, f"put {CHANGED} of batch 0: its bytes are wrong"),
    ],
    ids=["layout", "group", "byte"],
)
def test_a_peer_that_does_not_keep_to_the_page_is_noticed(
    line: Line | None, fault: str, error: type[Exception], says: str
) -> None:
    if line is None:
        return
    with pytest.raises(error, match=says):
        exchange_puts(line, 1, fault=fault, timeout_s=3.0)


def test_the_program_notices_a_byte_of_ours(line: Line | None) -> None:
    if line is None:
        return
    said = exchange_puts(line, 1, mine=True)
    assert said["wrong"] == f"put {CHANGED} of batch 0: its bytes are wrong"
