"""The smallest NIC backend: puts over Unix sockets, between processes of one machine."""

import ctypes
import json
import secrets
import socket
import struct
import threading
from contextlib import suppress

from mkernel.backends.contracts.nic import (
    NO_SIGNAL,
    SELF,
    LaneStatistics,
    NicBackend,
    NicCapabilities,
    NicSession,
    NicStatistics,
)
from mkernel.backends.contracts.status import Status
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, BackendUnavailable, MkernelError, NicError
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
        return TinySession(lanes.rank)


class TinySession(NicSession):
    def __init__(self, rank):
        self._rank, self._secret = rank, secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(b"\0" + self._secret[:8].encode())
        self._listener.listen(128)
        self._to, self._sent, self._from, self._threads = {}, {}, [], []
        self._regions, self._bound = {}, {}
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._count = dict.fromkeys(("puts", "put_bytes", "signals_sent", "signals_raised"), 0)
        self._pad, self._failure, self._closed = 0, None, False

    def capabilities(self):
        return NicCapabilities(
            ordered=True,
            max_message_bytes=1 << 40,
            max_inline_bytes=0,
            immediate_data=True,
            max_sge=1,
            atomics=False,
            dmabuf=False,
        )

    def address(self, peer):
        self._sent[peer] = [0, 0]
        return json.dumps(self._secret)

    def connect(self, peer, address):
        secret = json.loads(address)
        self._to[peer] = connection = socket.socket(socket.AF_UNIX)
        connection.connect(b"\0" + secret[:8].encode())
        connection.settimeout(TIMEOUT_S)
        connection.sendall(secret.encode())

    def start(self, pad, cpus):
        self._pad = pad
        self._listener.settimeout(TIMEOUT_S)
        while len(self._from) < len(self._to):
            connection, _ = self._listener.accept()
            told = bytearray(len(self._secret))
            if not read(connection, told) or told != self._secret.encode():
                connection.close()  # a stranger
                continue
            thread = threading.Thread(target=self._receive, args=(connection,), daemon=True)
            self._from.append(connection)
            self._threads.append(thread)
            thread.start()

    def register(self, region, address, nbytes):
        self._regions[region] = address, nbytes
        return json.dumps(nbytes)

    def bind(self, region, peer, key):
        self._bound[region, peer] = json.loads(key)

    @property
    def fifo(self):
        return 0  # puts come from the host, not from kernels

    def put(self, peer, region, local, remote, nbytes, signal, value):
        if self._closed or self._failure is not None:
            raise self._failure or MkernelError("this session is closed")
        if peer == SELF:  # a completion: the kernel has a copy of all that was sent
            _transport.pad_add(self._pad, signal, value)
            return
        address, size = self._regions.get(region, (0, -1))
        if local + nbytes > size or remote + nbytes > self._bound.get((region, peer), -1):
            raise ArgumentError("put", (peer, region, local, remote, nbytes), "what is bound")
        data = (ctypes.c_char * nbytes).from_address(address + local)
        with self._sending:  # never held while receiving: two ranks may send at once
            try:
                self._to[peer].sendall(HEADER.pack(region, remote, nbytes, signal, value))
                self._to[peer].sendall(data)
            except OSError as error:
                raise self._fail(peer, error) from error
            self._count["puts"] += 1
            self._count["put_bytes"] += nbytes
            self._sent[peer][:] = self._sent[peer][0] + 1, self._sent[peer][1] + nbytes
            self._count["signals_sent"] += signal != NO_SIGNAL

    def _receive(self, connection):
        """One peer's puts, in order: the bytes, and only then the signal."""
        header = bytearray(HEADER.size)
        while read(connection, header):
            region, offset, nbytes, signal, value = HEADER.unpack(header)
            address, size = self._regions.get(region, (0, 0))
            if offset + nbytes > size:
                self._fail(-1, ValueError(f"a put beyond region {region}"))
                return
            if not read(connection, (ctypes.c_char * nbytes).from_address(address + offset)):
                return
            if signal != NO_SIGNAL:
                with self._counting:
                    self._count["signals_raised"] += 1
                _transport.pad_add(self._pad, signal, value)

    def _fail(self, peer, error):
        if self._failure is None:
            self._failure = NicError(f"put to rank {peer}: {error}", status="SOCKET", peer=peer)
            _transport.pad_abort(self._pad, _transport.AbortCode.nic_error)
        return self._failure

    def flush(self, timeout_s):
        return self._failure is None  # the kernel has a copy of all that was sent

    def statistics(self):
        lanes = (LaneStatistics(to, "tiny0", *sent) for to, sent in self._sent.items())
        return NicStatistics(**self._count, queue_depth=0, stalls=0, lanes=tuple(lanes))

    def failure(self):
        return self._failure

    def close(self):
        self._closed = True
        every = [self._listener, *self._to.values(), *self._from]
        for each in every:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in every:
            each.close()


def read(connection, target):
    """Fill ``target``; False where the peer is gone or has closed."""
    view = memoryview(target).cast("B")
    with suppress(OSError):
        while view:
            got = connection.recv_into(view)
            if not got:
                return False
            view = view[got:]
        return True
    return False
