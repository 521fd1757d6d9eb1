"""The thread that runs streams' calls."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mkernel.backends.accelerators.streams import worker


class Launch:
    """A call that does nothing."""

    inference = False
    stuck = False

    def __init__(self, *_: Any) -> None:
        self._ran = threading.Event()

    def run(self, scratch: Any) -> None:
        self._ran.set()

    def ended(self, timeout_s: float) -> bool:
        return self._ran.wait(timeout_s)


class SlowToFree:
    """What the thread holds until it ends."""

    def __del__(self) -> None:
        time.sleep(0.2)


def test_a_stopped_worker_has_freed_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a thread frees while the interpreter ends take the process down."""
    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    monkeypatch.setattr(worker, "Scratch", SlowToFree)
    made: Any = worker.Worker()
    made.start(None, None, None, None)
    assert made.idle(10)
    made.stop()
    assert "mkernel-streams" not in [thread.name for thread in threading.enumerate()]


def test_a_worker_whose_launch_lasts_is_stopped_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    goes_on = threading.Event()
    monkeypatch.setattr(Launch, "run", lambda self, scratch: goes_on.wait(60))
    made: Any = worker.Worker()
    made.start(None, None, None, None)
    began = time.monotonic()
    made.stop()
    assert time.monotonic() - began < 5
    goes_on.set()
