"""The deadline of a whole join, whatever its waits have for themselves.

Most waits of a join end when told to. A store that accepts a connection and never answers leaves torch
in a system call that nothing ends, so what only talks to the store runs on a thread of its own, which
can be left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mkernel.backends.runtime.threads import Thread
from mkernel.errors import Timeout

_T = TypeVar("_T")
_LATER_S = 2.0
"""Seconds after the deadline at which waits are given up that should have ended and reported by
themselves."""


class JoinDeadline:
    """The deadline by which a rank that joins a world gives up; its time begins with the object."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the seconds that are left; 0 once it has passed."""
        return max(0.0, self._until - time.monotonic())

    def wait_s(self, timeout_s: float) -> float:
        """Return how long, in seconds, a wait may take here that has ``timeout_s`` for itself."""
        return min(timeout_s, self.left_s())

    def passed(self) -> bool:
        """Return whether it passed so long ago that no wait of the join can still end by itself."""
        return time.monotonic() > self._until + _LATER_S

    def late(self, what: str) -> Timeout:
        """Return the error of a join that did not end in time. ``what``: the clause that begins its
        message."""
        return Timeout(
            f"{what} within {self._limit_s:g} s, which a rank has to join a world "
            "(MKERNEL_JOIN_TIMEOUT_S raises the limit)"
        )

    def within(self, what: str, action: Callable[[], _T]) -> _T:
        """Run ``action`` on a thread of its own; return what it returns, or raise what it raises.

        Raises:
            Timeout: it did not end by the deadline. Its thread is left behind.
        """
        ended = threading.Event()
        outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                outcome["result"] = action()
            except BaseException as error:  # raised below, on the thread that asked
                outcome["error"] = error
            finally:
                ended.set()

        try:
            Thread(run, name="mkernel-join").start()
        except RuntimeError:  # the limit of threads: the world says so once it can tell the others
            return action()
        if not ended.wait(self.left_s() + _LATER_S):
            raise self.late(what)
        if "error" in outcome:
            raise outcome["error"]
        found: _T = outcome["result"]
        return found
