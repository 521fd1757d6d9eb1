"""A limit on how long a rank process may work on one thing, so that a backend that hangs cannot stop
the kit. A check with many cases may take as long as it needs: each case starts the limit anew."""

from __future__ import annotations

import faulthandler
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

_GRACE_S = 0.5
"""A process may end later by this time, so that not every report starts a timer, which is a thread
and takes a millisecond."""


@dataclass
class _Armed:
    seconds: float
    sink: IO[str]
    at: float = -math.inf


_armed: list[_Armed] = []


@contextmanager
def process_timeout(seconds: float) -> Iterator[None]:
    """End the process ``seconds`` after its last :func:`report_progress`, or up to half a second later,
    while this is entered."""
    with open(os.devnull, "w") as sink:
        _armed.append(_Armed(seconds, sink))
        report_progress()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()  # that of an outer limit, too
            _armed.pop()
            if _armed:
                _armed[-1].at = -math.inf


def report_progress() -> None:
    """Start the limit anew, because the process begins something new. Without a limit it does
    nothing."""
    if _armed and time.monotonic() >= _armed[-1].at + _GRACE_S:
        last = _armed[-1]
        last.at = time.monotonic()
        after = last.seconds + _GRACE_S
        faulthandler.dump_traceback_later(after, exit=True, file=last.sink)  # needs no GIL
