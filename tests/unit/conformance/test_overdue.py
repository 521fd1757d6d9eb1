"""The kit ends a rank that hangs, not one that is slow with many things."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.conformance import overdue

SLOW = """
import time
from mkernel.conformance.overdue import ends_when_overdue, goes_on
goes_on()  # no limit is set
with ends_when_overdue({limit}):
    for _ in range(4):
        time.sleep({each})
        {said}
time.sleep({each})
print("ended")
"""


def run(limit: float, each: float, said: str) -> subprocess.CompletedProcess[str]:
    program = SLOW.format(limit=limit, each=each, said=said)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_what_goes_on_is_not_ended() -> None:
    done = run(limit=12.0, each=4.0, said="goes_on()")
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_what_hangs_is_ended() -> None:
    done = run(limit=0.5, each=30.0, said="pass")
    assert (done.returncode, done.stdout) == (1, "")


def test_timers_are_few_and_never_end_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limit = 100.0, 3.0
    ends: list[float] = []

    def later(seconds: float, **_: Any) -> None:
        ends.append(now + seconds)

    monkeypatch.setattr(overdue, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    with overdue.ends_when_overdue(limit):
        for _ in range(1000):
            now += 0.003
            overdue.goes_on()
            assert now + limit <= ends[-1] <= now + limit + 0.5
    assert 5 <= len(ends) <= 8
    with overdue.ends_when_overdue(limit):  # the one before was cancelled
        assert ends[-1] == now + limit + 0.5
        with overdue.ends_when_overdue(2 * limit):
            assert ends[-1] == now + 2 * limit + 0.5
        overdue.goes_on()  # the inner one's end cancelled the outer one's timer
        assert ends[-1] == now + limit + 0.5
