"""The conformance kit on GPUs: hopper on each of its paths, and streams with NCCL. One test a check."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from device_buffers import needs_gpus

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks(True)


@functools.cache
def subject(name: str) -> AcceleratorSubject:
    """The backend, if it can run here."""
    judged = AcceleratorSubject(name, True, 0)
    judged.require_usable()
    assert judged.backend.device == "cuda"
    return judged


@pytest.mark.parametrize("backend", ["hopper-fused", "hopper-library", "streams"])
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(check: Check, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, path = backend.partition("-")
    if path:  # left to the planner, small calls would all take the same
        monkeypatch.setenv("MKERNEL_PATH", path)
    result: Any = run_check(check, subject(name))
    if result.outcome == "skipped":
        pytest.skip(result.message)
    assert result.outcome == "passed", f"{check.promise}\n{result.message}"
