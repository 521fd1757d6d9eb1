"""Ends a rank process that is busy with one thing for far too long, so that a backend that hangs cannot
stop the kit. A part of a check that has many cases may take as long as the machine makes it."""

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
"""By how much a process may end later, so that not every word of it starts a timer: that is a thread,
and takes a millisecond."""


@dataclass
class _Armed:
    seconds: float
    sink: IO[str]
    at: float = -math.inf


_armed: list[_Armed] = []


@contextmanager
def ends_when_overdue(seconds: float) -> Iterator[None]:
    """While this is entered, the process ends ``seconds`` after it has last said that it goes on, or up
    to half a second later."""
    with open(os.devnull, "w") as sink:
        _armed.append(_Armed(seconds, sink))
        goes_on()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()  # that of an outer limit, too
            _armed.pop()
            if _armed:
                _armed[-1].at = -math.inf


def goes_on() -> None:
    """The process begins something new. Nothing where no limit is set."""
    if _armed and time.monotonic() >= _armed[-1].at + _GRACE_S:
        last = _armed[-1]
        last.at = time.monotonic()
        after = last.seconds + _GRACE_S
        faulthandler.dump_traceback_later(after, exit=True, file=last.sink)  # needs no GIL
