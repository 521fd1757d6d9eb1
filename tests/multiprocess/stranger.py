"""Another user of the machine, who reaches the port of a job's store, and the ranks he meets.

Where the tests run as root, a stranger is a process of user ``nobody``; else one of the same user.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
from in_world import gathers
from pydantic import SecretStr
from torch.distributed import PrefixStore, TCPStore

import mkernel
from mkernel import fork_server
from mkernel.backends.runtime import fd_exchange
from mkernel.errors import MkernelError
from mkernel.launch import report
from mkernel.world import lifecycle
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.handshake import _LABEL
from mkernel.world.sealing import Seal

NOBODY = 65534
PATIENCE_S = 120.0
OTHERS_SECRET = b"a secret that is not this job's"
Deed = Callable[..., Any]
"""Takes the store and its own arguments; what it returns is handed to the rank that asked for it."""


# ---- the stranger ---------------------------------------------------------------------------------


def connect(port: int) -> TCPStore:
    """A client of the store on this host."""
    return TCPStore(
        "127.0.0.1", port, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False
    )


def live(port: int, deed: Deed, arguments: tuple[Any, ...], told: Connection) -> None:
    """A stranger's process: become one, do the deed, say what came of it, and wait to be ended, so
    that what the deed holds open stays so."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        told.send(("done", deed(connect(port), *arguments)))
    except BaseException as error:
        told.send(("failed", repr(error)))
    time.sleep(10 * PATIENCE_S)


class Strangers:
    """Starts strangers when ranks ask for them; ends them with the context."""

    def __init__(self) -> None:
        self._context = fork_server.context()
        self._undo = contextlib.ExitStack()
        self.seen: list[Any] = []
        """What deeds returned, in their order."""

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def hear(self, _rank: int, payload: Any) -> None:
        """``launch``'s ``on_report``: do what a rank asks for in ``meet``, then answer in the store."""
        port, number, deed, arguments = payload
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=live, args=(port, deed, arguments, theirs), daemon=True
        )
        process.start()
        self._undo.callback(process.join)
        self._undo.callback(process.kill)
        assert ours.poll(PATIENCE_S), "the stranger's deed takes too long"
        how, what = ours.recv()
        assert how == "done", what
        self.seen.append(what)
        connect(port).set(f"answer/{number}", json.dumps(what if isinstance(what, str) else ""))


class _Held:
    """What a stranger keeps open."""

    things: ClassVar[list[Any]] = []


# ---- deeds ----------------------------------------------------------------------------------------


def read(store: TCPStore, *keys: str) -> list[bytes]:
    """The messages as they lie in the store."""
    return [bytes(store.get(key)) for key in keys]


def overwrite(store: TCPStore, key: str, how: str) -> None:
    """Put something in a message's place: rubbish, or what looks like an abort of rank 2."""
    name = key.split("/", 3)[3]
    lie = {"kind": "PeerFailure", "rank": 2, "message": "rank 2 died", "details": {}}
    made = {
        "rubbish": b"\xff\0 rubbish",
        "empty": b"",
        "unsigned": json.dumps(lie).encode(),
        "signed with no secret": Seal(b"").close(name, json.dumps(lie).encode()),
        "signed with another secret": Seal(OTHERS_SECRET).close(name, json.dumps(lie).encode()),
    }
    store.set(key, made[how])


def move(store: TCPStore, key: str, source: str) -> None:
    """Put the message ``source`` in the place of ``key``."""
    store.set(key, bytes(store.get(source)))


def delete(store: TCPStore, key: str) -> None:
    """Take a message away."""
    assert store.delete_key(key)


def repeatedly(store: TCPStore, key: str, how: str) -> None:
    """Put an earlier message back, or take the message away, whenever the rank writes a new one: until
    the job has noticed."""
    noticed = key.split("heartbeat", maxsplit=1)[0] + "abort"
    old = bytes(store.get(key))
    deadline = time.monotonic() + PATIENCE_S
    while bytes(store.get(key)) == old:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1.0)  # the others have seen a newer one
    while not store.check([noticed]):
        assert time.monotonic() < deadline, "nobody noticed"
        if how == "delete":
            store.delete_key(key)
        else:
            store.set(key, old)
        time.sleep(0.005)


def fill(store: TCPStore, megabytes: int) -> None:
    """Make the store hold much."""
    for number in range(megabytes):
        store.set(f"rubbish/{number}", b"x" * (1 << 20))


def disturb(store: TCPStore, *ports: int) -> None:
    """Hold many connections to the ports, else to the store's, and send on some what means nothing
    there."""
    for number in range(64):
        connection = socket.socket()
        connection.connect(("127.0.0.1", (ports or (store.port,))[number % max(1, len(ports))]))
        _Held.things.append(connection)
        with contextlib.suppress(ConnectionError):
            connection.sendall(bytes([number * 4]) * (number * 97))


def open_memory(store: TCPStore, pid: int, fds: list[int]) -> list[str]:
    """Try to open a process's descriptors; the errors' names."""

    def opened(fd: int) -> str:
        try:
            os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        except OSError as error:
            return type(error).__name__
        return "opened"

    return [opened(fd) for fd in fds]


def fetch(store: TCPStore, address: dict[str, Any]) -> str:
    """Ask for a descriptor that a rank offers; the error's words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fd_exchange, "_check_user", lambda connection: None
        )  # does not care whose it is
        try:
            os.close(fd_exchange.fetch(address, PATIENCE_S))
        except OSError as error:
            return str(error)
    return "fetched"


def fetch_secret(store: TCPStore, key: str) -> str:
    """Ask rank 0 for the job's secret, as a rank does."""
    there = PrefixStore(key.rpartition("/secret/0")[0], store)
    return fetch(store, Bootstrap(there).peek("secret/0"))


def offer_secret(store: TCPStore, key: str) -> None:
    """Offer the ranks a secret that the stranger knows."""
    memory = os.memfd_create("stranger")
    os.pwrite(memory, _LABEL + bytes(32), 0)
    address = fd_exchange.offer(memory).address
    Bootstrap(PrefixStore(key.rpartition("/secret/0")[0], store)).publish("secret/0", address)


def host(store: TCPStore) -> str:
    """Host a store of one's own; its port."""
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _Held.things.append(theirs)
    store.set("strangers port", str(theirs.port))
    return str(theirs.port)


# ---- the ranks ------------------------------------------------------------------------------------


class _Met:
    count = 0


def meet(port: int, deed: Deed, *arguments: Any) -> str:
    """On a rank: have a stranger do a deed, and return when it is done."""
    _Met.count += 1
    number = f"{os.environ['RANK']}/{_Met.count}"
    report((port, number, deed, arguments))
    answer = json.loads(connect(port).get(f"answer/{number}"))
    assert isinstance(answer, str)
    return answer


def where() -> tuple[int, str]:
    """Port and prefix of this rank's world in its store."""
    store = mkernel.world()._failure.bootstrap._store
    assert isinstance(store, PrefixStore)
    inner = store.underlying_store
    assert isinstance(inner, TCPStore)
    return inner.port, f"mkernel/0/{lifecycle.generations[lifecycle.STARTED]}"


def works() -> float:
    """The largest relative error of a few calls."""
    return max(gathers(seed) for seed in range(3))


Outcome = tuple[str, str]
"""An error's type and message; "" and the error of results where there was none."""


def outcome(body: Callable[[], Any]) -> Outcome:
    """What a rank's part comes to."""
    try:
        return "", str(body())
    except MkernelError as error:
        return type(error).__name__, str(error)


def looked_around() -> None:
    """Return when the watchdog has looked at every message of its own a few times more."""
    watchdog = mkernel.world()._failure._watchdog
    assert watchdog is not None
    goal = watchdog._heartbeat.beat + 5
    deadline = time.monotonic() + PATIENCE_S
    while watchdog._heartbeat.beat < goal and watchdog._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def met(port: int, victim: int, name: str, deed: Deed, *arguments: Any) -> Iterator[None]:
    """A stranger does his deed when rank ``victim`` has published its message ``name``, and no other
    rank looks at that message before: so the outcome does not depend on who is faster."""
    publish, peek = Bootstrap.publish, Bootstrap.peek
    rank = int(os.environ["RANK"])
    done = connect(port)

    def published(self: Bootstrap, key: str, value: Any) -> None:
        publish(self, key, value)
        if key == name and rank == victim:
            raw = f"mkernel/0/{lifecycle.generations[lifecycle.STARTED]}/{key}"
            meet(port, deed, raw, *arguments)

    def peeked(self: Bootstrap, key: str) -> Any:
        if key == name and rank != victim:
            done.get(f"answer/{victim}/1")
        return peek(self, key)

    def each_peeked(self: Bootstrap, keys: list[str]) -> dict[str, Any]:
        told = {each: self.peek(each) for each in keys}
        return {each: value for each, value in told.items() if value is not None}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bootstrap, "publish", published)
        patch.setattr(Bootstrap, "peek", peeked)
        patch.setattr(Bootstrap, "peek_all", each_peeked)
        yield


def join(port: int, **options: Any) -> None:
    """Leave the world and join the next one of the same ranks."""
    settings = mkernel.world().settings
    options.setdefault("accelerator", mkernel.world().backends.accelerator)
    mkernel.finalize()
    secret = SecretStr(options.pop("secret", settings.job_secret.get_secret_value()))
    changes = {"job_secret": secret, **options.pop("changes", {})}
    options.setdefault("ranks_per_node", int(os.environ["WORLD_SIZE"]) // options.get("nodes", 1))
    mkernel.init(
        settings=settings.model_copy(update=changes),
        stores=(connect(port), connect(port)),
        **options,
    )


def memfds() -> list[int]:
    """This process's descriptors of symmetric memory."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:mkernel" in os.readlink(entry):
                found.append(int(entry.name))
    return found


def listening() -> list[int]:
    """Ports that this process listens on."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listeners = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return [int(row[1].rpartition(":")[2], 16) for row in listeners]
