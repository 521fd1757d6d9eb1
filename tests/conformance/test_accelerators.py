"""The accelerators that run everywhere pass the kit, in short: ``ascend``, and ``streams`` as faults
wrap it. `make test-long` has the whole kit judge them."""

from __future__ import annotations

import pytest
from kept_subject import IN_NEW_PROCESSES, Kept

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks()
SKIPPED = {
    "ascend": {"activations", "queued-calls", "documents", "scales"},
    "mkernel.conformance.faults:Fault": {"queued-calls"},
}
"""Backend → checks of what it does not claim."""


@pytest.mark.parametrize("backend", SKIPPED)
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(check: Check, backend: str) -> None:
    kind = AcceleratorSubject if check.name in IN_NEW_PROCESSES else Kept
    result = run_check(check, kind(backend, quick=True))
    expected = "skipped" if check.name in SKIPPED[backend] else "passed"
    assert result.outcome == expected, f"{check.promise}\n{result.message}"
