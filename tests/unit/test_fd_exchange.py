"""Descriptors from process to process: who gets them, who does not, and that nothing is left."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mkernel.backends.runtime import fd_exchange, threads
from mkernel.backends.runtime.fd_exchange import Offer, fetch, offer
from mkernel.errors import Timeout

TIMEOUT_S = 120.0


def _server_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mkernel-fds"]


def _sockets() -> list[str]:
    found = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in found if f"@mkernel-{os.getpid()}-" in line]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("mkernel-test", os.MFD_CLOEXEC)
    os.pwrite(fd, b"before", 0)
    yield fd
    os.close(fd)
    assert not _server_threads(), "the serving thread is left"
    assert not _sockets(), "a socket is left"


@pytest.fixture
def offered(memfd: int) -> Iterator[Offer]:
    made = offer(memfd)
    yield made
    made.close()


def _write_through(address: dict[str, Any], text: bytes) -> None:
    fd = fetch(address, TIMEOUT_S)
    assert os.pread(fd, 6, 0) == b"before"
    os.pwrite(fd, text, 0)
    os.close(fd)


def test_another_process_writes_to_the_same_memory(memfd: int, offered: Offer) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_write_through, args=(offered.address, b"after!"))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert os.pread(memfd, 6, 0) == b"after!"


def test_a_descriptor_is_never_a_childs(offered: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even between its arrival and a later call: another thread may start a program then."""
    monkeypatch.setattr(os, "set_inheritable", lambda fd, inheritable: None)
    fd = fetch(offered.address, TIMEOUT_S)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_server_without_a_free_descriptor_does_not_spin(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    accept = socket.socket.accept

    def exhausted(listener: socket.socket) -> Any:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", exhausted)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"\0{offered.address['socket']}")
            late = time.monotonic() + TIMEOUT_S
            while len(tried) < 10:
                assert time.monotonic() < late, tried
                time.sleep(0.01)
    assert all(again - before >= fd_exchange._PAUSE_S for before, again in pairwise(tried))
    assert socket.socket.accept is accept
    os.close(fetch(offered.address, TIMEOUT_S))


def test_every_offer_gives_its_own_descriptor(memfd: int) -> None:
    other = os.memfd_create("mkernel-test", os.MFD_CLOEXEC)
    offers = [offer(memfd), offer(other)]
    inodes = [os.fstat(fd).st_ino for fd in (memfd, other)]
    for offered, inode in zip(offers, inodes, strict=True):
        fd = fetch(offered.address, TIMEOUT_S)
        assert os.fstat(fd).st_ino == inode
        assert not os.get_inheritable(fd)
        os.close(fd)
    offers[0].close()
    with pytest.raises(OSError, match="no longer offers"):
        fetch(offers[0].address, TIMEOUT_S)
    os.close(fetch(offers[1].address, TIMEOUT_S))
    offers[1].close()
    os.close(other)


def test_the_last_close_ends_the_thread_and_fetches_are_refused(memfd: int) -> None:
    offered = offer(memfd)
    assert _server_threads()
    assert _sockets()
    offered.close()
    offered.close()
    assert not _server_threads()
    with pytest.raises(ConnectionRefusedError, match="nobody offers"):
        fetch(offered.address, TIMEOUT_S)


def test_a_server_that_does_not_end_is_waited_for_until_a_deadline(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the lock of offers, which this thread keeps from it."""
    monkeypatch.setattr(threads, "END_S", 0.2)
    offered = offer(memfd)
    (server,) = (each for each in threading.enumerate() if each.name == "mkernel-fds")
    raised: list[Exception] = []
    closed = threading.Event()

    def close() -> None:
        with fd_exchange._Process.lock:
            client.send(bytes.fromhex(offered.address["cookie"]))
            late = time.monotonic() + 50
            while "_serve" not in threads._place(server) and time.monotonic() < late:
                time.sleep(0.01)  # told before that it would end without an answer
            try:
                offered.close()
            except Timeout as error:
                raised.append(error)
        closed.set()

    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + offered.address["socket"])
        threading.Thread(target=close, daemon=True).start()
        assert closed.wait(60), "close waits for ever"
    server.join(60)
    assert "thread mkernel-fds did not end within 0.2 s" in str(raised[0])
    assert offered.address["socket"] in str(raised[0])


def test_a_wrong_cookie_gets_nothing(offered: Offer) -> None:
    with pytest.raises(OSError, match="no longer offers"):
        fetch({**offered.address, "cookie": "00" * 16}, TIMEOUT_S)


def _silent_clients(address: dict[str, Any]) -> list[socket.socket]:
    """Five that connect and never ask."""
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for client in silent:
        client.connect("\0" + address["socket"])
        client.settimeout(TIMEOUT_S)
    with contextlib.suppress(BrokenPipeError):  # it is dropped already, on a machine that is busy
        silent[0].send(b"abc")  # part of a cookie
    return silent


def test_clients_that_never_ask_delay_nobody(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_exchange, "_REQUEST_S", 10 * TIMEOUT_S)
    silent = _silent_clients(offered.address)
    os.close(fetch(offered.address, TIMEOUT_S))
    for client in silent:
        client.close()


def test_clients_that_never_ask_are_dropped(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_exchange, "_REQUEST_S", 0.2)
    for client in _silent_clients(offered.address):
        with contextlib.suppress(ConnectionResetError):  # dropped before what it sent was read
            assert client.recv(1) == b"", "not dropped"
        client.close()


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"mkernel-test-silent-{os.getpid()}"
        listener.bind("\0" + name)
        listener.listen()
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            fetch({"socket": name, "cookie": "00" * 16}, 0.3)
        assert time.monotonic() - start < TIMEOUT_S


def test_another_users_process_is_refused_on_both_sides(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, me = os.geteuid(), threading.get_ident()
    # This thread (the client) is someone else to itself, the server is not; then the other way.
    for stranger_is_me in (True, False):
        monkeypatch.setattr(
            os,
            "geteuid",
            lambda who=stranger_is_me: mine + ((threading.get_ident() == me) == who),
        )
        with pytest.raises(OSError, match="not user" if stranger_is_me else "no longer offers"):
            fetch(offered.address, TIMEOUT_S)
    monkeypatch.undo()
    os.close(fetch(offered.address, TIMEOUT_S))


def test_many_fetches_at_once(offered: Offer) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(fetch(offered.address, TIMEOUT_S)))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 40
    for fd in got:
        os.close(fd)


def test_a_forked_child_serves_its_own_offers(memfd: int, offered: Offer) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = offer(memfd)
            os.close(fetch(own.address, TIMEOUT_S))
            own.close()
            offered.close()  # the parent's: no effect
            code = 0 if own.address["socket"] != offered.address["socket"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(fetch(offered.address, TIMEOUT_S))


@pytest.mark.parametrize("with_descriptor", [False, True])
def test_half_an_answer_is_none(memfd: int, with_descriptor: bool) -> None:
    """It says that the offer is there and sends nothing, or sends something and says that it is not."""
    name = f"mkernel-test-{os.getpid()}-{with_descriptor}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(64)
                if with_descriptor:
                    socket.send_fds(client, [b"\xff"], [memfd])
                else:
                    client.send(fd_exchange._FOUND)

        thread = threading.Thread(target=answer)
        thread.start()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no longer offers"):
            fetch({"socket": name, "cookie": "00" * 16}, TIMEOUT_S)
        thread.join()
        assert len(os.listdir("/proc/self/fd")) <= before
