"""The accelerators that run everywhere pass the kit: ``ascend``, and ``streams`` as faults wrap it."""

from __future__ import annotations

import pytest

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks()
SKIPPED = {
    "ascend": {"queued-calls", "documents"},
    "mkernel.conformance.faults:Fault": {"queued-calls", "chunk-invariance", "split-invariance"},
}
"""Backend → checks of what it does not claim."""
WHOLE = {
    "shapes": {"ascend"},
    "worlds": {"ascend"},
    "drawn-routings": set(SKIPPED),
    "drawn-attention": set(SKIPPED),
}
"""Checks that run in full, and on which backends: every split of up to eight ranks, many random draws
on two nodes, hundreds of routings and of shapes of attention."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", SKIPPED)
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(check: Check, backend: str) -> None:
    quick = backend not in WHOLE.get(check.name, ())
    result = run_check(check, AcceleratorSubject(backend, quick))
    expected = "skipped" if check.name in SKIPPED[backend] else "passed"
    assert result.outcome == expected, f"{check.promise}\n{result.message}"
