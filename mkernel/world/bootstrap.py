"""Small messages between ranks before and beside the data path, over torch.distributed's store.

Messages are JSON, sealed with a secret of the ranks (``mkernel.world.sealing``): a stranger who
reaches the store cannot read them or put others in their place. Every wait has a deadline and polls a
``check`` callback, through which a broken world interrupts it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, TypeVar

from torch.distributed import Store

from mkernel.errors import NotInitialized, PeerFailure, Timeout, Untrusted, WorldError
from mkernel.world.sealing import Seal

_Name = TypeVar("_Name", int, str)
_Value = TypeVar("_Value")

_POLL_FIRST_S = 0.0005
_POLL_MOST_S = 0.01
STORES_HOST = 0
"""The rank that is blamed where the store is lost: it hosts it, unless a launcher does."""
LATE = "ranks {missing} did not reach {key!r}"
"""The text of a Timeout, with the missing ranks and the key that all were to set."""


def _tell_nobody(error: WorldError) -> None:
    pass


class Bootstrap:
    """Keys of one world in a store. Thread-safe: one lock serialises this client's requests.

    Args:
        store: a client of its own (a blocking request of another user would hold up this one).
        secret: what messages are sealed with; empty: whoever reaches the store is trusted.
        tell: called with an Untrusted, and with a PeerFailure of the store, before it is raised, on the
            thread that asks.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes = b"",
        tell: Callable[[WorldError], None] = _tell_nobody,
    ) -> None:
        self._store: Store | None = store
        self._sealing = Seal(secret)
        self._tell = tell
        self._lock = threading.Lock()

    def shared(self) -> Bootstrap:
        """Return another bootstrap on the same client of the store, which stays open when this one
        is closed."""
        return copy(self)

    def close(self) -> None:
        """Let go of the store, whose connection ends with its last user."""
        self._store, self._tell = None, _tell_nobody

    def _seal(self, key: str, value: Any) -> bytes:
        return self._sealing.close(key, json.dumps(value).encode())

    def _open(self, key: str, sealed: bytes) -> Any:
        try:
            return self._read(key, sealed)
        except Untrusted as error:
            self._tell(error)
            raise

    def _read(self, key: str, sealed: bytes) -> Any:
        body = self._sealing.open(key, sealed)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Untrusted(
                f"bootstrap message {key!r} is not JSON ({error}); another program writes to this "
                "job's store"
            ) from error

    def _request(self, action: Callable[[Store], Any]) -> Any:
        """Run ``action`` on the store. NotInitialized: it is closed. PeerFailure: the store is lost."""
        store = self._store
        if store is None:
            raise NotInitialized("the world of this store has ended; make a new one")
        try:
            with self._lock:
                return action(store)
        except RuntimeError as error:  # torch raises DistStoreError and kin, all RuntimeErrors
            lost = PeerFailure(
                f"the bootstrap store does not answer ({str(error).splitlines()[0]}); the process "
                "that hosts it is gone",
                STORES_HOST,
            )
            self._tell(lost)
            try:
                raise lost from error
            finally:
                del lost  # or it and this frame would hold each other

    def publish(self, key: str, value: Any) -> None:
        """Set ``key`` to a JSON-safe value. PeerFailure."""
        sealed: Any = self._seal(key, value)  # torch takes bytes too, but its annotations say str
        self._request(lambda store: store.set(key, sealed))

    def publish_first(self, key: str, value: Any) -> Any:
        """Set ``key`` unless it is set, and return what it holds now. PeerFailure, Untrusted."""
        return self.replace(key, None, value)

    def replace(self, key: str, known: Any | None, value: Any) -> Any | None:
        """Set ``key`` where it holds ``known`` (None: it is not set), and return what it holds now:
        ``value``, what another rank has set, or None where ``known`` was deleted. PeerFailure,
        Untrusted."""
        old: Any = "" if known is None else self._seal(key, known)
        new: Any = self._seal(key, value)
        found = self._request(lambda store: store.compare_set(key, old, new))
        if found == old:  # the store says so of a key that is not set
            return None
        return self._open(key, found)

    def peek(self, key: str) -> Any | None:
        """Return the value of ``key`` or None where it is not set. Does not wait. PeerFailure,
        Untrusted."""
        sealed = self._request(lambda store: store.get(key) if store.check([key]) else None)
        return None if sealed is None else self._open(key, sealed)

    def peek_all(self, keys: list[str]) -> dict[str, Any]:
        """Return the values of those of the keys that are set. Does not wait. Two requests do where all
        are set, if the store takes several keys at once. PeerFailure, Untrusted."""

        def ask(store: Any) -> list[bytes] | None:  # torch's annotations lack has_extended_api
            several = store.has_extended_api() and store.check(keys)
            return store.multi_get(keys) if several else None

        sealed = self._request(ask) if len(keys) > 1 else None
        if sealed is not None:
            return {key: self._open(key, each) for key, each in zip(keys, sealed, strict=True)}
        told = {key: self.peek(key) for key in keys}
        return {key: value for key, value in told.items() if value is not None}

    def forget(self, key: str) -> None:
        """Delete ``key``, if it is set. PeerFailure."""
        self._request(lambda store: store.delete_key(key))

    def collect(
        self,
        key: str,
        ranks: Iterable[_Name],
        timeout_s: float,
        check: Callable[[set[_Name]], None] = lambda missing: None,
        late: str = LATE,
    ) -> dict[_Name, Any]:
        """Wait for the values of ``key/<rank>`` of all ranks (or other names), and return them.

        Args:
            check: called with the ranks still missing between polls; raises to end the wait.
            late: what a Timeout says of the missing ones.

        Raises:
            Timeout: names the ranks that did not publish within ``timeout_s``.
        """

        def look(missing: set[_Name]) -> dict[_Name, Any]:
            names: dict[str, _Name] = {f"{key}/{rank}": rank for rank in sorted(missing)}
            return {names[each]: value for each, value in self.peek_all([*names]).items()}

        return wait_for(look, ranks, timeout_s, check, late.replace("{key!r}", repr(key)))


def wait_for(
    look: Callable[[set[_Name]], dict[_Name, _Value]],
    names: Iterable[_Name],
    timeout_s: float,
    check: Callable[[set[_Name]], None],
    late: str,
    rest: Callable[[float], object] = time.sleep,
) -> dict[_Name, _Value]:
    """Wait until ``look`` has found all of the ranks (or other names), and return what it found.

    Args:
        look: returns what is there of the missing ones.
        rest: called between looks with seconds to pause.
        check, late: as :meth:`Bootstrap.collect` has them.

    Raises:
        Timeout: names those that were not there within ``timeout_s``.
    """
    missing = set(names)
    found: dict[_Name, _Value] = {}
    deadline = time.monotonic() + timeout_s
    pause = _POLL_FIRST_S
    while True:
        found |= look(missing)
        missing -= found.keys()
        if not missing:
            return found
        try:
            check(missing)
        except PeerFailure:
            # A rank that left may have told since it was looked for: then it was not too early, and
            # its word counts.
            if look(missing).keys() != missing:
                raise
        if time.monotonic() > deadline:
            raise late_error(late, missing, timeout_s)
        rest(pause)
        pause = min(2 * pause, _POLL_MOST_S)


def late_error(late: str, missing: Iterable[_Name], timeout_s: float) -> Timeout:
    """Return the error that ends a wait for these. ``late``: as :func:`wait_for` has it."""
    return Timeout(
        f"{late.format(missing=sorted(missing))} within {timeout_s:g} s; look at what they do "
        "instead, or raise MKERNEL_TIMEOUT_S"
    )
