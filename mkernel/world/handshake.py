"""The handshake by which the ranks of a world come to share a key that nobody else has and that no
world had before."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed import Store

from mkernel.backends.runtime import fd_exchange
from mkernel.errors import ArgumentError, Timeout, Untrusted
from mkernel.settings import Settings
from mkernel.world.bootstrap import Bootstrap, late_error
from mkernel.world.watchdog import host_identity

_SECRET_BYTES = 32
_MIN_SECRET_CHARS = 16
_LABEL = b"mkernel job secret\0"
"""The first bytes of a descriptor with a secret: no other memory of this user is taken for it."""


def world_key(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str,
    one_host: bool | None,
    settings: Settings,
) -> bytes:
    """Return the key that seals all messages of a world. Collective.

    It is derived from the job's secret and a nonce of every rank, so that no message of another world
    can be replayed in this one, even where several jobs share a secret.

    Args:
        store: of this world only. name: the world's.
        one_host: whether all ranks run on this host, as their launcher says; None: they find out.

    Raises:
        ArgumentError: several hosts and no secret; a secret that is too short. Timeout: a rank did
        not come. Untrusted: a stranger wrote to the store, or ranks have different secrets.
    """
    meeting = _Meeting(store, size, name, settings)
    if one_host is None and not settings.job_secret.get_secret_value():
        one_host = _on_one_host(store, rank, size, meeting)
    with _job_secret(store, rank, size, bool(one_host), meeting, settings) as secret:
        greetings = Bootstrap(store, secret)
        own = secrets.token_hex(_SECRET_BYTES)
        greetings.publish(f"nonce/{rank}", own)
        found = meeting.collect(greetings, "nonce", range(size))
        meeting.conclude()
    # The own nonce is not taken from the store: if a stranger put an old one there, keys differ.
    nonces = [own if each == rank else found[each] for each in range(size)]
    return hmac.digest(secret, json.dumps(nonces).encode(), "sha256")


class _Meeting:
    """The meeting of a world's ranks, who all meet or all give up. The word of the first who has heard
    of all, or has waited for too long, counts for all: else one that came as the others left would
    wait for them.

    It is signed where the ranks were given a secret. Where they have yet to share one, a stranger who
    reaches the store could make them give up.
    """

    _KEY = "meeting"

    def __init__(self, store: Store, size: int, name: str, settings: Settings) -> None:
        self._said = Bootstrap(store, settings.job_secret.get_secret_value().encode())
        self._size = size
        self._timeout_s = settings.timeout_s
        shown = repr(name).replace("{", "{{").replace("}", "}}")
        self._late = (
            f"ranks {{missing}} did not come ({{key!r}}) to world {shown}, which its ranks make "
            "together, and several in one order,"
        )

    def collect(self, greetings: Bootstrap, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait as :meth:`Bootstrap.collect` does. Timeout: this rank gives up, or another one has."""
        missing: set[int] = set()

        def check(still: set[int]) -> None:
            missing.clear()
            missing.update(still)
            self.look()

        try:
            return greetings.collect(key, ranks, self._timeout_s, check, self._late)
        except Timeout:
            own = {"awaited": key, "missing": sorted(missing)}
            self._obey(self._said.publish_first(self._KEY, own))
            with contextlib.suppress(
                Timeout
            ):  # who has heard of all was first: they are there by now
                return greetings.collect(key, ranks, 0.0)
            raise

    def look(self) -> None:
        """Raise Timeout where another rank has given up."""
        self._obey(self._said.peek(self._KEY))

    def conclude(self) -> None:
        """Record that this rank has heard of all. Timeout: another one had given up."""
        self._obey(self._said.publish_first(self._KEY, True))

    def _obey(self, said: Any) -> None:
        match said:
            case None | True:  # nobody has spoken; all have come
                return
            case {"awaited": "greeting" | "secret" | "nonce" as key, "missing": [_, *_] as ranks}:
                if all(each in range(self._size) for each in ranks):
                    late = self._late.replace("{key!r}", repr(key))
                    raise late_error(late, ranks, self._timeout_s)
        raise Untrusted(
            f"bootstrap message {self._KEY!r} is none that a rank writes ({said!r:.100}); keep "
            "strangers from the store's port"
        )


def _on_one_host(store: Store, rank: int, size: int, meeting: _Meeting) -> bool:
    """Return whether all ranks say that they run on this host. Nobody signs that yet: a stranger
    could make them take the wrong way to a secret, on which they then find none."""
    greetings = Bootstrap(store)
    greetings.publish(f"greeting/{rank}", host_identity())
    found = meeting.collect(greetings, "greeting", range(size))
    return all(host == host_identity() for host in found.values())


@contextlib.contextmanager
def _job_secret(
    store: Store, rank: int, size: int, one_host: bool, meeting: _Meeting, settings: Settings
) -> Iterator[bytes]:
    """Yield the job's secret. Rank 0's offer of it stands until the context ends."""
    given = settings.job_secret.get_secret_value()
    if given:
        if len(given) < _MIN_SECRET_CHARS:
            raise ArgumentError(
                "MKERNEL_JOB_SECRET",
                f"{len(given)} characters",
                f"at least {_MIN_SECRET_CHARS}, such as `openssl rand -hex 32` prints: shorter ones "
                "can be guessed",
            )
        yield given.encode()
    elif one_host:
        with contextlib.ExitStack() as offer:
            yield (
                _make(store, size, offer)
                if rank == 0
                else _fetch(store, rank, meeting, settings.timeout_s)
            )
    elif settings.allow_unsigned:
        yield b""
    else:
        raise ArgumentError(
            "MKERNEL_JOB_SECRET",
            "''",
            "the same secret on every rank, such as `openssl rand -hex 32` prints; or "
            "MKERNEL_ALLOW_UNSIGNED=1, where nobody else reaches the store's port",
            why="the job runs on several hosts, and who reaches its store could steer it",
        )


def _make(store: Store, size: int, undo: contextlib.ExitStack) -> bytes:
    """Make a secret, on offer to this user's processes on this host until ``undo`` closes."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    if size > 1:
        memory = os.memfd_create("mkernel-secret", os.MFD_CLOEXEC)
        undo.callback(os.close, memory)
        os.pwrite(memory, _LABEL + secret, 0)
        offer = fd_exchange.offer(memory)
        undo.callback(offer.close)
        Bootstrap(store).publish("secret/0", offer.address)
    return secret


def _fetch(store: Store, rank: int, meeting: _Meeting, timeout_s: float) -> bytes:
    """Fetch rank 0's secret. A stranger can put another address into the store, but neither answer
    there as this user nor fetch the secret himself."""
    address: Any = meeting.collect(Bootstrap(store), "secret", [0])[0]
    try:
        memory = fd_exchange.fetch(address, timeout_s)
        try:
            found = os.pread(memory, len(_LABEL) + _SECRET_BYTES, 0)
        finally:
            os.close(memory)
        if len(found) != len(_LABEL) + _SECRET_BYTES or not found.startswith(_LABEL):
            raise OSError("it holds something else")
    except (OSError, LookupError, TypeError, ValueError) as error:
        meeting.look()  # rank 0 withdraws its offer when it has given up
        Bootstrap(store).publish(f"nonce/{rank}", None)  # rank 0 cannot open it, and gives up, too
        raise Untrusted(
            f"bootstrap message 'secret/0' does not lead to rank 0's offer of the job's secret "
            f"({error}); keep strangers from the store's port. Ranks on several hosts, or of several "
            "users, need the same MKERNEL_JOB_SECRET"
        ) from error
    return found[len(_LABEL) :]
