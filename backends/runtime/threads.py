"""Threads whose start and end are awaited with a deadline."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkernel.errors import Timeout

START_S = 10.0
"""Seconds that a new thread may take to begin."""
END_S = 10.0
"""Seconds that threads may take to end once they are told to."""
_LOOKS = 20
"""The number of slices in which the start is awaited. A process that is stopped meanwhile (SIGSTOP)
loses one slice, and its threads have the time of the others."""


class _NotAwaited(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Thread(threading.Thread):
    """A daemon thread whose start has a deadline.

    ``threading.Thread.start`` waits without a deadline for the new thread to report that it runs. A
    thread that gets no memory dies before it reports, and its caller would wait for ever.
    """

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _NotAwaited()
        self._begun = threading.Event()
        self._claim = threading.Lock()  # taken by the thread as it begins, or by who gives it up

    def start(self) -> None:
        """Start the thread. RuntimeError: the process can have no more threads, or this one did not
        begin in time; its target then never runs and is no longer referenced."""
        super().start()
        begun = any(self._begun.wait(START_S / _LOOKS) for _ in range(_LOOKS))
        if not begun and self._claim.acquire(blocking=False):
            # Python keeps a thread that died before it began in its list of those about to begin.
            del self._target, self._args, self._kwargs  # type: ignore[attr-defined]
            raise RuntimeError(
                f"thread {self.name} did not begin within {START_S:g} s: the process may have run out "
                "of memory; look at its limits (ulimit -v) and at what else it holds"
            )

    def run(self) -> None:
        """Run the target, unless ``start`` has given up."""
        if self._claim.acquire(blocking=False):
            self._begun.set()
            super().run()


def end(told: Iterable[threading.Thread], held: str) -> None:
    """Join threads that were told to end. Timeout: one of them did not; the message states where
    that thread is, and ``held``, a sentence about what stays held and what to do."""
    late = time.monotonic() + END_S
    for thread in told:
        thread.join(max(0.0, late - time.monotonic()))
        if thread.is_alive():
            raise Timeout(
                f"thread {thread.name} did not end within {END_S:g} s of being told to; it is at "
                f"{_place(thread)}. {held}"
            )


def _place(thread: threading.Thread) -> str:
    """Return the line that a thread runs, and the lines that called it."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame, limit=3) if frame else []
    lines = [f"{Path(each.filename).name}:{each.lineno} in {each.name}" for each in stack]
    return ", called from ".join(reversed(lines)) or "its end"
