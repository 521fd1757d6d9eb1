"""Sessions of ``tcp``: frames that are not the next or go elsewhere, connections of strangers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from mkernel.backends.nics.tcp import _HEADER, TcpNic, TcpSession
from mkernel.backends.transport import _transport
from mkernel.harness.nic_ranks import Port
from mkernel.settings import NicSettings
from mkernel.topology.lanes import NicSchedule, RankLanes

NBYTES = 4096


def opened(rank: int) -> TcpSession:
    nic = TcpNic()
    schedule = NicSchedule(queue_pairs=1, stripe_bytes=None)
    lanes = RankLanes.between_equals(rank, nic.probe("sockets"), schedule)
    made = nic.open("sockets", lanes, NicSettings())
    assert isinstance(made, TcpSession)
    return made


@pytest.fixture
def ports() -> Iterator[list[Port]]:
    """Two joined ranks; a stranger connects to each of them before its peer does."""
    sessions = [opened(rank) for rank in (0, 1)]
    found = [Port(rank, session, NBYTES, 20.0) for rank, session in enumerate(sessions)]
    told = [session.address(1 - rank) for rank, session in enumerate(sessions)]
    strangers = [
        socket.create_connection(("127.0.0.1", json.loads(address)[2])) for address in told
    ]
    for stranger in strangers:
        stranger.sendall(bytes(36))
    for rank, session in enumerate(sessions):
        session.connect(1 - rank, told[1 - rank])
    starts = [threading.Thread(target=each.session.start, args=(each.pad, ())) for each in found]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    keys = [each.session.register(0, each.memory.address, NBYTES) for each in found]
    for rank, each in enumerate(found):
        each.session.bind(0, 1 - rank, keys[1 - rank])
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()
    yield found
    for each in found:
        each.session.close()


def test_bytes_come_before_their_signal(ports: list[Port]) -> None:
    one, other = ports
    sent = torch.arange(256, dtype=torch.uint8).numpy()
    one.memory.bytes[:256] = sent
    one.session.put(1, 0, 0, 1024, 256, 3, 2)
    other.wait(3, 2, "a put")
    assert (other.memory.bytes[1024:1280] == sent).all()
    assert not other.memory.bytes[:1024].any()
    assert not other.memory.bytes[1280:].any()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ((1, 0, 0, 8, 0, 1), "expected frame 0 of rank 0"),
        ((0, 0, NBYTES - 4, 8, 0, 1), "within region 0"),
        ((0, 7, 0, 8, 0, 1), "within region 7"),
        ((0, 0, 0, 2**63, 0, 1), "within region 0"),
    ],
)
def test_a_frame_that_is_wrong_ends_the_session(
    ports: list[Port], frame: tuple[int, ...], message: str
) -> None:
    one, other = ports
    assert isinstance(one.session, TcpSession)
    one.session._to[1].sendall(_HEADER.pack(*frame) + b"12345678")
    assert _transport.pad_wait(other.pad, 0, 1, 20.0) != _transport.WaitResult.ok
    failure = other.session.failure()
    assert failure is not None
    assert message in str(failure)
    assert not other.memory.bytes.any()
