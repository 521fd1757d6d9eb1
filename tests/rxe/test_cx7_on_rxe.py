"""``cx7`` on the kernel's software RDMA device, through the system's libibverbs: the oracle of RC.

Runs in the guest of ``make test-rxe``; elsewhere there is no rxe device, and the tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject, nic_checks

DEVICE = "rxe0"
pytestmark = pytest.mark.skipif(
    not Path("/sys/class/infiniband", DEVICE).exists(), reason=f"no {DEVICE}; make test-rxe has one"
)
# A put takes a hundred times as long as on the software device, as each packet is the guest
# kernel's work and the guest is emulated.
SUBJECT = NicSubject("cx7", "system", quick=True, timeout_s=30.0, divisor=20, start="fork")
CHECKS = {check.name: check for check in nic_checks(quick=True)}


@pytest.mark.parametrize("name", CHECKS)
def test_cx7_keeps_its_promises(name: str) -> None:
    result = run_check(CHECKS[name], SUBJECT)
    assert result.outcome == "passed", result.message
