"""The conformance kit on the hopper backend, one test a check."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from device_buffers import needs_gpus

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks(True)


@pytest.fixture(autouse=True, params=["fused", "library"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of one path: left to the planner, small calls would all take the same."""
    monkeypatch.setenv("MKERNEL_PATH", request.param)


@functools.cache
def subject() -> AcceleratorSubject:
    """The backend, if it can run here."""
    judged = AcceleratorSubject("hopper", True, 0)
    judged.require_usable()
    return judged


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(check: Check) -> None:
    result: Any = run_check(check, subject())
    if result.outcome == "skipped":
        pytest.skip(result.message)
    assert result.outcome == "passed", f"{check.promise}\n{result.message}"
