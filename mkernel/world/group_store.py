"""torch.distributed's store for process groups, on sealed bootstrap messages.

Libraries exchange their addresses and ids through it (gloo's sockets, NCCL's unique id), which a
stranger who reaches the store must neither read nor replace.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store

from mkernel.errors import Timeout, Unsupported, Untrusted
from mkernel.world.bootstrap import Bootstrap

_POLL_FIRST_S = 0.0005
_POLL_MOST_S = 0.01


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

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value."""
        raw = value.encode() if isinstance(value, str) else value
        self._bootstrap.publish(_name(key), base64.b64encode(raw).decode())

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there. Timeout, Untrusted, what ``check`` raises."""
        self.wait([key])
        value: Any = self._peek(key)
        if value is None:
            raise Untrusted(
                f"bootstrap message {_name(key)!r} was deleted; keep strangers from the store's port"
            )
        return base64.b64decode(value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there. Untrusted."""
        return all(self._peek(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there. Timeout, Untrusted, what ``check`` raises."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        pause = _POLL_FIRST_S
        while not self.check(keys):
            self._check()
            if time.monotonic() > deadline:
                missing = [key for key in keys if self._peek(key) is None]
                raise Timeout(
                    f"no rank wrote {missing} for the process group within {limit_s:g} s; look at "
                    "what the other ranks do instead, or raise MKERNEL_TIMEOUT_S"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MOST_S)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long ``get`` and ``wait`` wait by default."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait by default."""
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> GroupStore:
        """This store: it is safe to use from several threads."""
        return self

    def add(self, key: str, amount: int) -> NoReturn:
        """Unsupported: the store itself adds, so that the sum cannot be signed."""
        raise Unsupported(f"key {key!r}: a counter of the store cannot be signed")

    def _peek(self, key: str) -> Any | None:
        return self._bootstrap.peek(_name(key))


def _name(key: str) -> str:
    return f"group/{key}"
