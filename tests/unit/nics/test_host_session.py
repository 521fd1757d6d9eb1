"""Sessions that are written in Python: what their base class promises, on a network of lists."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from mkernel.backends.contracts.nic import NO_SIGNAL, SELF
from mkernel.backends.runtime import threads
from mkernel.backends.runtime.host_session import HostSession
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, MkernelError, NicError, Timeout
from mkernel.settings import NicSettings

SIGNALS, NBYTES, SLOTS = 8, 64, 4


class Listed(HostSession):
    """Sends to a list; ``broken``: its peer is gone."""

    def __init__(self) -> None:
        super().__init__("port0", NicSettings(fifo_slots=SLOTS))
        self.sent: list[tuple[int, int, int, bytes, int, int]] = []
        self.broken = False

    def address(self, peer: int) -> str:
        self.expect(peer)
        return ""

    def connect(self, peer: int, address: str) -> None:
        return

    def send(
        self, peer: int, region: int, offset: int, data: memoryview, signal: int, value: int
    ) -> None:
        if self.broken:
            raise ConnectionResetError("reset")
        self.sent.append((peer, region, offset, bytes(data), signal, value))

    def disconnect(self) -> None:
        return


class Opened:
    """A started session with region 0 bound to peer 1, its memory and its pad."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * NBYTES).from_buffer(bytearray(range(NBYTES)))
        self._pages = (ctypes.c_uint64 * (_transport.pad_bytes(SIGNALS) // 8 + 8))()
        self.pad = -(-ctypes.addressof(self._pages) // 64) * 64
        _transport.pad_format(self.pad, SIGNALS)
        self.session = Listed()
        self.session.address(1)
        self.session.start(self.pad, ())
        key = self.session.register(0, ctypes.addressof(self.memory), NBYTES)
        self.session.bind(0, 1, key)

    def push(self, *command: int) -> _transport.WaitResult:
        """As a kernel does: peer, region, local, remote, bytes, signal, value."""
        return _transport.fifo_push(self.session.fifo, self.pad, command, 10)


@pytest.fixture
def opened() -> Iterator[Opened]:
    found = Opened()
    yield found
    found.session.close()


def test_what_kernels_push_is_sent_in_order(opened: Opened) -> None:
    for number in range(5 * SLOTS):
        assert opened.push(1, 0, number, 2, 3, number % 4, 7) == _transport.WaitResult.ok
    opened.push(SELF, 0, 0, 0, 0, 5, 9)
    assert opened.session.flush(10)
    whole = bytes(opened.memory)
    assert opened.session.sent == [
        (1, 0, 2, whole[number : number + 3], number % 4, 7) for number in range(5 * SLOTS)
    ]
    assert _transport.pad_load(opened.pad, 5) == 9, "a completion is the own rank's"
    counted = opened.session.statistics()
    assert (counted.puts, counted.put_bytes, counted.signals_sent) == (20, 60, 20)
    assert [(lane.peer, lane.messages, lane.nbytes) for lane in counted.lanes] == [(1, 20, 60)]


@pytest.mark.parametrize(
    "command",
    [
        (1, 0, NBYTES - 3, 0, 4, 0, 1),
        (1, 0, 0, NBYTES - 3, 4, 0, 1),
        (1, 7, 0, 0, 4, 0, 1),
        (2, 0, 0, 0, 4, 0, 1),
    ],
    ids=["beyond here", "beyond there", "no region", "no peer"],
)
def test_a_put_outside_of_what_is_bound_is_refused(
    command: tuple[int, ...], opened: Opened
) -> None:
    with pytest.raises(ArgumentError, match="put"):
        opened.session.put(*command)
    assert opened.session.failure() is None, "a caller of the host is told at once"
    opened.push(*command)
    assert not opened.session.flush(10)
    assert _transport.pad_aborted(opened.pad)
    with pytest.raises(NicError, match="region"):
        opened.session.put(1, 0, 0, 0, 4, 0, 1)
    assert opened.session.sent == []


def test_the_first_error_ends_the_waits_of_kernels(opened: Opened) -> None:
    opened.session.broken = True
    opened.push(1, 0, 0, 0, 4, 0, 1)
    waited = _transport.pad_wait(opened.pad, 0, 1, 60)
    assert waited == _transport.WaitResult.aborted
    failure = opened.session.failure()
    assert failure is not None
    assert failure.peer == 1
    assert "reset" in str(failure)
    assert opened.push(1, 0, 0, 0, 4, 0, 1) == _transport.WaitResult.aborted


def test_an_arrival_outside_of_a_region_is_refused(opened: Opened) -> None:
    opened.session.landing(0, 60, 4)[:] = b"last"
    assert bytes(opened.memory)[60:] == b"last"
    for region, offset in ((0, 61), (1, 0)):
        with pytest.raises(ArgumentError, match="region"):
            opened.session.landing(region, offset, 4)
    opened.session.arrived(NO_SIGNAL, 1)
    opened.session.arrived(3, 2)
    assert _transport.pad_load(opened.pad, 3) == 2
    assert opened.session.statistics().signals_raised == 1


def test_a_region_that_is_gone_is_closed_to_puts(opened: Opened) -> None:
    opened.session.deregister(0, 10)
    with pytest.raises(ArgumentError, match="region 0"):
        opened.session.put(1, 0, 0, 0, 4, 0, 1)
    assert opened.session.statistics().host_regions == 0


def test_nothing_is_put_when_it_is_closed(opened: Opened) -> None:
    opened.session.close()
    with pytest.raises(MkernelError, match="closed"):
        opened.session.put(1, 0, 0, 0, 4, 0, 1)
    opened.session.close()


def test_a_thread_that_does_not_end_is_waited_for_until_a_deadline(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "END_S", 0.2)
    over, closed = threading.Event(), threading.Event()
    raised: list[Timeout] = []
    opened.session.spawn(over.wait, 60)

    def close() -> None:
        try:
            opened.session.close()
        except Timeout as error:
            raised.append(error)
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    in_time = closed.wait(30)
    over.set()
    assert in_time, "close waits as long as the thread"
    for part in (
        "thread mkernel-Listed did not end within 0.2 s",
        "'port0'",
        "regions [0]",
        "Listed.disconnect",
    ):
        assert part in str(raised[0])


def test_a_thread_that_never_began_is_not_waited_for(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threads.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threads.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            opened.session.spawn(print)
    opened.session.close()
