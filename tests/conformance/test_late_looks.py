"""Planted faults are caught though the machine is busy: here every rank gets the CPU late, just when a
faulty device would be caught if it were only slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mkernel.conformance import nic_checks, nic_life_checks
from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = {check.name: check for check in nic_checks.DATA_CHECKS + nic_life_checks.LIFE_CHECKS}
LOOK = (nic_checks, "require_equal", "before")
FLUSHED = (nic_checks, "_flush_in_slices", "after")
CLOSED = (nic_life_checks, "close_in_time", "after")


def late(function: Callable[..., Any], when: str, seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if when == "before":
            time.sleep(seconds)
        result = function(*arguments)
        if when == "after":
            time.sleep(seconds)
        return result

    return call


@pytest.mark.parametrize(
    ("fault", "name", "what", "seconds"),
    [
        ("SignalFirst", "visibility", LOOK, 0.02),
        ("SignalFirstAtTimes", "visibility", LOOK, 0.02),
        ("SignalBeforeTail", "visibility", LOOK, 0.02),
        ("RelaxedFlag", "visibility", LOOK, 0.02),
        ("SeparateFlag", "visibility", LOOK, 0.02),
        ("Reorders", "order", LOOK, 0.02),
        ("FlushAtOnce", "flush", FLUSHED, 0.1),
        ("CloseLater", "close", CLOSED, 0.5),
    ],
)
def test_a_fault_does_not_hide_behind_a_busy_machine(
    fault: str,
    name: str,
    what: tuple[ModuleType, str, str],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, function, when = what
    monkeypatch.setattr(module, function, late(getattr(module, function), when, seconds))
    # Forked ranks have what was patched here.
    faulty = f"mkernel.conformance.nic_faults:{fault}"
    subject = NicSubject(faulty, "soft", quick=True, timeout_s=2.0, start="fork")
    result = run_check(CHECKS[name], subject)
    assert result.outcome == "failed"
    assert not result.raised, result.message
    assert "Traceback" not in result.message, result.message  # the fault itself crashed
