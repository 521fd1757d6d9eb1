"""A deadline on every step of a rank; what outlasts it is named to the launcher, which ends all ranks.

The rank itself cannot: it may be inside a library's wait that nothing interrupts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mkernel.backends.runtime.threads import Thread
from mkernel.errors import WorldError
from mkernel.launch import report


@dataclass(frozen=True)
class Hung:
    """A rank's report of a step that outlasted its deadline."""

    step: str
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Rank 0's report after each row."""

    done: str


class ContenderHung(WorldError, TimeoutError):
    """A contender did not end in time; every rank was ended."""


class Guard:
    """Watches the steps of one rank from a thread of its own, until :meth:`close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step: tuple[str, float, float] | None = None  # what, seconds, deadline
        self._closed = False
        Thread(self._watch, name="mkernel-guard").start()

    @contextmanager
    def step(self, what: str, seconds: float) -> Iterator[None]:
        """Watch over work that must end within ``seconds``. Not to be nested."""
        self._set((what, seconds, time.monotonic() + seconds))
        try:
            yield
        finally:
            self._set(None)

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _set(self, step: tuple[str, float, float] | None) -> None:
        with self._changed:
            self._step = step
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if self._step is None:
                    self._changed.wait()
                    continue
                what, seconds, deadline = self._step
                left = deadline - time.monotonic()
                if left <= 0:
                    report(Hung(what, seconds))
                    return
                self._changed.wait(left)
