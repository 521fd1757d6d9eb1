"""The smallest NIC backend: puts over Unix sockets, between processes of one machine."""

import json
import secrets
import socket
import struct
from contextlib import suppress

from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_session import HostSession, read_into
from mkernel.errors import BackendUnavailable
from mkernel.topology.model import Nic

HEADER = struct.Struct("<5Q")  # region, offset, bytes, signal, value
TIMEOUT_S = 30


class TinyNic(NicBackend):
    name = "tinynic"
    providers = ("sockets",)

    def status(self, verbs):
        known = verbs in self.providers
        return Status(known, "Unix sockets" if known else f"no {verbs}", "use sockets")

    def probe(self, verbs):
        nic = Nic(id="tiny0", kind="soft", name="tiny0", emulated=True)
        return (nic,) if verbs in self.providers else ()

    def open(self, verbs, lanes, settings):
        names = [port.name for port in lanes.ports]
        known = [nic.name for nic in self.probe(verbs)]
        if names != known or lanes.schedule.queue_pairs != 1:
            raise BackendUnavailable(f"tinynic has {known} on {verbs!r}, once, not {names}")
        return TinySession("tiny0", settings)


class TinySession(HostSession):
    def __init__(self, port, settings):
        super().__init__(port, settings)
        self._secret = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(b"\0" + self._secret[:8].encode())
        self._listener.listen(128)
        self._to, self._from = {}, []

    def address(self, peer):
        self.expect(peer)
        return json.dumps(self._secret)

    def connect(self, peer, address):
        secret = json.loads(address)
        self._to[peer] = connection = socket.socket(socket.AF_UNIX)
        connection.connect(b"\0" + secret[:8].encode())
        connection.settimeout(TIMEOUT_S)
        connection.sendall(secret.encode())

    def start(self, pad, cpus):
        super().start(pad, cpus)
        self._listener.settimeout(TIMEOUT_S)
        while len(self._from) < len(self._to):
            connection, _ = self._listener.accept()
            told = bytearray(len(self._secret))
            if not read_into(connection, told) or told != self._secret.encode():
                connection.close()  # a stranger
                continue
            self._from.append(connection)
            self.spawn(self._receive, connection)

    def send(self, peer, region, offset, data, signal, value):
        self._to[peer].sendall(HEADER.pack(region, offset, len(data), signal, value))
        self._to[peer].sendall(data)

    def _receive(self, connection):
        """One peer's puts, in order: the bytes, and only then the signal."""
        header = bytearray(HEADER.size)
        while read_into(connection, header):
            region, offset, nbytes, signal, value = HEADER.unpack(header)
            if not read_into(connection, self.landing(region, offset, nbytes)):
                return
            self.arrived(signal, value)

    def disconnect(self):
        for each in self._sockets():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        super().close()
        for each in self._sockets():
            each.close()

    def _sockets(self):
        return [self._listener, *self._to.values(), *self._from]
