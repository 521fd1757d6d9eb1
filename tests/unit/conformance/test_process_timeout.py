"""The kit ends a rank that hangs, not one that is slow with many things."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.conformance import process_timeout as module

HANGS = """
import time
from mkernel.conformance.process_timeout import process_timeout, report_progress
report_progress()  # no limit is set
with process_timeout(0.5):
    time.sleep(100)
print("ended")
"""


def test_what_hangs_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_timers_are_few_and_never_end_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limit = 100.0, 3.0
    ends: list[float] = []

    def later(seconds: float, **_: Any) -> None:
        ends.append(now + seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    with module.process_timeout(limit):
        for _ in range(1000):
            now += 0.003
            module.report_progress()
            assert now + limit <= ends[-1] <= now + limit + 0.5
    assert 5 <= len(ends) <= 8
    with module.process_timeout(limit):  # the one before was cancelled
        assert ends[-1] == now + limit + 0.5
        with module.process_timeout(2 * limit):
            assert ends[-1] == now + 2 * limit + 0.5
        module.report_progress()  # the inner one's end cancelled the outer one's timer
        assert ends[-1] == now + limit + 0.5
