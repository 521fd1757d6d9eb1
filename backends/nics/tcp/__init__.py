"""The ``tcp`` NIC backend: puts over TCP, from host memory to host memory.

It carries what crosses between nodes whose RDMA ports speak no common protocol. It is chosen by name,
and by worlds of such nodes. Ranks prove to each other that they are of one world when they connect;
after that bytes are neither encrypted nor authenticated, as on RDMA. Frames are numbered, and their
lengths are checked before a byte is written.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import ClassVar

from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_session import HostSession, read_into
from mkernel.errors import ArgumentError, BackendUnavailable
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes
from mkernel.topology.model import KindName, Nic

PROVIDER = "sockets"
_HEADER = struct.Struct("<QQQQII")  # number of the frame, region, offset, bytes, signal, value
_HELLO = struct.Struct("<I32s")  # rank, proof
_TIMEOUT_S = 30.0
"""Seconds that connecting takes at most, or sending to a peer that takes nothing."""
_HELLO_S = 5.0
"""Seconds in which a connection has to say who it is, which peers do as they connect."""
_PORT = Nic(id="tcp0", kind="tcp", name="tcp0", gpudirect=False, emulated=True)


class TcpNic(NicBackend):
    """The backend of sockets."""

    name: ClassVar[str] = "tcp"
    providers: ClassVar[tuple[str, ...]] = (PROVIDER,)
    kinds: ClassVar[tuple[KindName, ...]] = ("tcp",)

    def status(self, verbs: str) -> Status:
        """Return a usable status: every host has sockets."""
        known = verbs == PROVIDER
        return Status(known, "TCP" if known else f"no provider {verbs!r}", f"use {PROVIDER}")

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """Return one port, which stands for all of the host's interfaces."""
        return (_PORT,) if verbs == PROVIDER else ()

    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        """Listen for the peers. BackendUnavailable."""
        names = [port.id for port in lanes.ports]
        if verbs != PROVIDER or names != [_PORT.id] or lanes.schedule.queue_pairs != 1:
            raise BackendUnavailable(
                f"tcp has port {_PORT.id} on {PROVIDER!r}, once, not {names} on {verbs!r}"
            )
        return TcpSession(lanes.rank, settings)


class TcpSession(HostSession):
    """One rank's connections: one to each peer for its puts, and one from each."""

    def __init__(self, rank: int, settings: NicSettings) -> None:
        super().__init__(_PORT.id, settings)
        self._rank = rank
        self._secrets: dict[int, bytes] = {}
        self._listener = socket.create_server(("", 0), backlog=256)
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._frames: dict[int, int] = {}

    def address(self, peer: int) -> str:
        """Return where this rank listens, and the secret by which that peer proves itself, once."""
        self.expect(peer)
        secret = self._secrets[peer] = secrets.token_bytes(_HELLO.size)
        host, port = socket.gethostname(), self._listener.getsockname()[1]
        return json.dumps([host, _addresses(host), port, secret.hex()])

    def connect(self, peer: int, address: str) -> None:
        """Connect, and prove that this rank read the peer's secret in the world's store.
        BackendUnavailable."""
        host, addresses, port, secret = json.loads(address)
        places = ["127.0.0.1"] if host == socket.gethostname() else addresses
        self._to[peer] = connection = _connected(places, port, peer)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_hello(bytes.fromhex(secret), self._rank))
        self._frames[peer] = 0

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Accept every peer, and close the connections of strangers. BackendUnavailable: a peer did
        not come."""
        super().start(pad, cpus)
        deadline = time.monotonic() + _TIMEOUT_S
        while missing := sorted({*self._secrets} - {*self._from}):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                text = f"ranks {missing} did not connect within {_TIMEOUT_S:g} s"
                raise BackendUnavailable(f"tcp: {text}; does a firewall keep them out?") from error
            peer = self._proven(connection)
            if peer is None:
                connection.close()
                continue
            self._from[peer] = connection
            self.spawn(self._receive, peer, connection)

    def _proven(self, connection: socket.socket) -> int | None:
        """Return which peer a connection is of; None: a stranger's."""
        told = bytearray(_HELLO.size)
        connection.settimeout(_HELLO_S)
        if not read_into(connection, told):
            return None
        connection.settimeout(None)  # `disconnect` ends its reads
        peer: int = _HELLO.unpack(told)[0]
        known = self._secrets.get(peer)
        fits = known is not None and hmac.compare_digest(bytes(told), _hello(known, peer))
        return peer if fits and peer not in self._from else None

    def send(
        self, peer: int, region: int, offset: int, data: memoryview, signal: int, value: int
    ) -> None:
        """Send a frame."""
        header = self._frames[peer], region, offset, len(data), signal, value
        self._frames[peer] += 1
        self._to[peer].sendall(_HEADER.pack(*header))
        self._to[peer].sendall(data)

    def _receive(self, peer: int, connection: socket.socket) -> None:
        """Take one peer's frames, in order: the bytes, and only then the signal. ArgumentError: a frame
        is none of the peer's next, or goes outside of this rank's regions."""
        header, number = bytearray(_HEADER.size), 0
        while read_into(connection, header):
            found, region, offset, nbytes, signal, value = _HEADER.unpack(header)
            if found != number:
                raise ArgumentError("frame", found, f"frame {number} of rank {peer}")
            if not read_into(connection, self.landing(region, offset, nbytes)):
                raise ConnectionError(f"the connection of rank {peer} ends within frame {number}")
            self.arrived(signal, value)
            number += 1

    def disconnect(self) -> None:
        """End every connection."""
        for each in self._sockets():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect, join the threads, and close the sockets."""
        super().close()
        for each in self._sockets():
            each.close()

    def _sockets(self) -> tuple[socket.socket, ...]:
        return (self._listener, *self._to.values(), *self._from.values())


def _hello(secret: bytes, rank: int) -> bytes:
    """Return the first bytes of a connection of a rank."""
    return _HELLO.pack(rank, hmac.digest(secret, b"mkernel tcp %d" % rank, "sha256"))


def _addresses(host: str) -> list[str]:
    """Return the IPv4 addresses of this host by its name."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        return [*dict.fromkeys(str(each[4][0]) for each in found)]
    return []


def _connected(addresses: list[str], port: int, peer: int) -> socket.socket:
    """Connect to the first of these addresses that answers. BackendUnavailable."""
    why = "its host's name has no address"
    for address in addresses:
        try:
            return socket.create_connection((address, port), _TIMEOUT_S)
        except OSError as error:  # noqa: PERF203 - the next one may answer
            why = f"{address}, port {port}: {error}"
    raise BackendUnavailable(f"tcp: rank {peer} cannot be reached ({why})")
