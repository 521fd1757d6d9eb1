"""torch.distributed's store for process groups, on sealed bootstrap messages.

Libraries exchange their addresses and ids through it (gloo's sockets, NCCL's unique id), which a
stranger who reaches the store must neither read nor replace.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store

from mkernel.errors import Unsupported
from mkernel.world.bootstrap import Bootstrap


class GroupStore(Store):
    """Keys of process groups as messages of a world. Torch calls it from C++, on any thread; whoever
    makes it keeps it for as long as a group may use it.

    Args:
        check: called between polls of a wait; raises to end it.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._check = check
        self._least_s = 0.0

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value."""
        raw = value.encode() if isinstance(value, str) else value
        self._bootstrap.publish(_name(key), base64.b64encode(raw).decode())

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value. Timeout, Untrusted, what ``check`` raises."""
        return base64.b64decode(self._collect([key], self._timeout_s)[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there. Untrusted."""
        return all(self._bootstrap.peek(_name(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Timeout, Untrusted, what ``check`` raises."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._collect(keys, max(limit_s, self._least_s))

    @contextlib.contextmanager
    def waiting_at_least(self, seconds: float) -> Iterator[None]:
        """Give every wait inside of it so much time, also where a caller asks for less."""
        self._least_s = seconds
        try:
            yield
        finally:
            self._least_s = 0.0

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Publish ``desired`` unless the key has a value, and return the value that it has now.
        Unsupported: ``expected`` is not empty. Untrusted."""
        if expected:
            raise Unsupported(f"key {key!r}: only a key without a value can be compared and set")
        raw = desired.encode() if isinstance(desired, str) else desired
        told = self._bootstrap.publish_first(_name(key), base64.b64encode(raw).decode())
        return base64.b64decode(told)

    def delete_key(self, key: str) -> bool:
        """Delete a key, if it is there."""
        self._bootstrap.forget(_name(key))
        return True

    deleteKey = delete_key  # the name by which torch's C++ calls it

    def _collect(self, keys: Sequence[str], limit_s: float) -> dict[str, Any]:
        return self._bootstrap.collect(
            "group",
            keys,
            limit_s,
            lambda missing: self._check(),
            late="no rank wrote {missing} for the process group",
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait by default."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Return how long ``get`` and ``wait`` wait by default."""
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> GroupStore:
        """Return this store, which is safe to use from several threads."""
        return self

    def add(self, key: str, amount: int) -> NoReturn:
        """Raise Unsupported: the store itself adds, so that the sum cannot be signed."""
        raise Unsupported(f"key {key!r}: a counter of the store cannot be signed")


def innermost(store: Store) -> Store:
    """Return the store below all prefixes. Torch does not keep a store alive that is written in
    Python: its user has to."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _name(key: str) -> str:
    return f"group/{key}"
