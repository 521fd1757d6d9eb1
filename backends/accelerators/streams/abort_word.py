"""The abort word of a world's calls, as the threads that run them see it.

On a CPU a thread that is blocked in a message to a dead peer outlives its world, but the word lies
in the world's memory. So nobody may read or write the word once the world has released that memory.
"""

from __future__ import annotations

import threading

from mkernel.backends.transport import _transport


class AbortWord:
    """A thread-safe view of the abort word. ``pad``: address of the rank's signal pad."""

    def __init__(self, pad: int) -> None:
        self._pad = pad
        self._lock = threading.Lock()
        self._gone = False

    def is_set(self) -> bool:
        """Return whether the world has ended its calls."""
        with self._lock:
            return self._gone or _transport.pad_aborted(self._pad)

    def set(self, code: _transport.AbortCode, who: _transport.Diagnosis) -> None:
        """Record a failure, unless there is one already or the world has ended."""
        with self._lock:
            if not self._gone:
                _transport.pad_abort(self._pad, code, who)

    def let_go(self) -> None:
        """Stop all use of the pad, which may be unmapped when this returns."""
        with self._lock:
            self._gone = True
