"""Threads of our own, whose start ends whatever the process has run out of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

START_S = 10.0
"""How long a new thread may take to begin."""


class _NotAwaited(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Thread(threading.Thread):
    """A daemon thread.

    ``threading.Thread.start`` waits without a deadline for the new thread's word that it runs. One that
    finds no memory dies before it says so, and its caller would wait for ever.
    """

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _NotAwaited()
        self._begun = threading.Event()
        self._claim = threading.Lock()  # taken by the thread as it begins, or by who gives it up

    def start(self) -> None:
        """RuntimeError: the process can have no more threads, or this one did not begin in time. Its
        target then never runs, and is no longer held."""
        super().start()
        if not self._begun.wait(START_S) and self._claim.acquire(blocking=False):
            # Python keeps a thread that died before it began in its list of those about to begin.
            del self._target, self._args, self._kwargs  # type: ignore[attr-defined]
            raise RuntimeError(
                f"thread {self.name} did not begin within {START_S:g} s: the process may have run out "
                "of memory; look at its limits (ulimit -v) and at what else it holds"
            )

    def run(self) -> None:
        """The target, unless ``start`` has given up."""
        if self._claim.acquire(blocking=False):
            self._begun.set()
            super().run()
