"""Exchange of file descriptors between processes of a user, for memory that has no other name.

The owner *offers* a descriptor and sends the offer's address (JSON-safe) to its peers over any
channel; a peer *fetches* a duplicate. A daemon thread serves the offers of a process over a unix
socket in the abstract namespace, so that nothing lies on a file system. It starts with the first
offer and ends with the last. Both sides check that the other is a process of the same user, and a
fetch must name the offer's random cookie. Everything has a deadline.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from mkernel.backends.runtime import threads
from mkernel.backends.runtime.threads import Thread

_COOKIE_BYTES = 16
_PAUSE_S = 0.02
"""Seconds to wait for a descriptor to become free."""
_REQUEST_S = 5.0
"""Seconds after which a client that has not sent its request is dropped."""
_BACKLOG = 128
_FOUND, _UNKNOWN = b"\1", b"\0"
_UCRED = struct.Struct("3i")


class Offer:
    """A descriptor on offer until ``close``. The owner keeps the descriptor and must keep it open
    that long."""

    def __init__(self, server: _Server, cookie: bytes) -> None:
        self._server = server
        self._cookie = cookie

    @property
    def address(self) -> dict[str, Any]:
        """The argument of :func:`fetch`; JSON-safe."""
        return {"socket": self._server.name, "cookie": self._cookie.hex()}

    def close(self) -> None:
        """Withdraw the offer: fetches fail from now on. Calling it twice is harmless; in a forked
        child it does nothing. Timeout: the thread that served the last offer does not end."""
        _withdraw(self._server, self._cookie)


def offer(fd: int) -> Offer:
    """Offer ``fd`` to other processes of this user on this host. OSError."""
    cookie = secrets.token_bytes(_COOKIE_BYTES)
    with _Process.lock:
        server = _Process.server
        if server is None or server.pid != os.getpid():
            server = _Process.server = _Server()
        server.offers[cookie] = fd
    return Offer(server, cookie)


def fetch(address: dict[str, Any], timeout_s: float) -> int:
    """Return a duplicate of the offered descriptor; the caller closes it.

    Raises:
        OSError: the owner is gone, has withdrawn the offer, belongs to another user, or did not
            answer within ``timeout_s`` (TimeoutError).
    """
    name, cookie = str(address["socket"]), bytes.fromhex(address["cookie"])
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(f"\0{name}")
        except ConnectionRefusedError:
            raise ConnectionRefusedError(
                f"nobody offers descriptors at {name!r}; has its process ended, or closed the memory?"
            ) from None
        _check_user(client)
        answer = b""
        fds: list[int] = []
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it refuses to answer
            client.sendall(cookie)
            client.settimeout(max(1e-3, deadline - time.monotonic()))
            answer, fds = _received(client)
    if answer != _FOUND or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise OSError(
            f"{name!r} no longer offers that descriptor to this user; was the memory closed there?"
        )
    return fds[0]


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a byte and a descriptor. The descriptor is close-on-exec from the start, so that a
    program which another thread starts meanwhile does not inherit it; ``socket.recv_fds`` does not
    pass its flags on."""
    fds = array.array("i")
    answer, told, _, _ = connection.recvmsg(
        1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return answer, list(fds)


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError unless the other end is a process of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(told)
    if uid != os.geteuid():
        raise PermissionError(f"process {pid} is user {uid}'s, not user {os.geteuid()}'s")


@dataclass
class _Asking:
    """A connected client: its deadline, and the bytes of the cookie received so far."""

    deadline: float
    cookie: bytes = field(default=b"")


class _Server:
    """The server of one process: a thread that answers fetches until :meth:`stop`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = f"mkernel-{self.pid}-{secrets.token_hex(8)}"
        self.offers: dict[bytes, int] = {}  # guarded by _Process.lock
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._clients: dict[socket.socket, _Asking] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(_BACKLOG)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = Thread(self._run, name="mkernel-fds")
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """End the thread and close every socket. Timeout: the thread goes on."""
        self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            threads.end(
                [self._thread],
                f"Socket '@{self.name}' stays open, on which nothing is offered any more, until the "
                "process ends",
            )

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._close()

    def _turn(self) -> bool:
        """Serve every ready socket once; return False after :meth:`stop`."""
        first = min((asking.deadline for asking in self._clients.values()), default=None)
        wait = None if first is None else max(0.0, first - time.monotonic())
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._woken:
                self._woken.recv(1)  # who sent it has the other end no longer in use
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj)
        now = time.monotonic()
        for client in [c for c, asking in self._clients.items() if asking.deadline <= now]:
            self._drop(client)
        return True

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:  # gone again, or no descriptor left: the next turn tries again
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_PAUSE_S)  # who waits stays ready, and the selector would say so at once
            return
        try:
            _check_user(client)
        except OSError:
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = _Asking(time.monotonic() + _REQUEST_S)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        asking = self._clients[client]
        try:
            more = client.recv(_COOKIE_BYTES - len(asking.cookie))
            asking.cookie += more
            if more and len(asking.cookie) < _COOKIE_BYTES:
                return
            with _Process.lock:  # an offer's descriptor is open as long as it is listed
                fd = self.offers.get(asking.cookie)
                if fd is None:
                    client.send(_UNKNOWN)
                else:
                    socket.send_fds(client, [_FOUND], [fd])
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._selector.unregister(client)
        client.close()

    def _close(self) -> None:
        for each in (*self._clients, self._listener, self._wake, self._woken):
            with contextlib.suppress(OSError):
                each.close()
        self._selector.close()


class _Process:
    """The server of this process, if it has offers."""

    lock = threading.RLock()  # a collected memory object may close its offer on any thread
    server: _Server | None = None


def _withdraw(server: _Server, cookie: bytes) -> None:
    if server.pid != os.getpid():
        return
    with _Process.lock:
        if server.offers.pop(cookie, None) is None or server.offers:
            return
        if _Process.server is server:
            _Process.server = None
    server.stop()
