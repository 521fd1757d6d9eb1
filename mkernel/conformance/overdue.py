"""Ends a rank process that is busy with one thing for far too long, so that a backend that hangs cannot
stop the kit. A part of a check that has many cases may take as long as the machine makes it."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

_armed: list[tuple[float, IO[str]]] = []


@contextmanager
def ends_when_overdue(seconds: float) -> Iterator[None]:
    """While this is entered, the process ends ``seconds`` after it has last said that it goes on."""
    with open(os.devnull, "w") as sink:
        _armed.append((seconds, sink))
        goes_on()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            _armed.pop()


def goes_on() -> None:
    """The process begins something new. Nothing where no limit is set."""
    if _armed:
        seconds, sink = _armed[-1]
        faulthandler.dump_traceback_later(seconds, exit=True, file=sink)  # needs no GIL
