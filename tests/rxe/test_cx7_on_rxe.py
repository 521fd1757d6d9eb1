"""``cx7`` on the kernel's software RDMA device, through the system's libibverbs: the oracle of RC."""

from __future__ import annotations

import sys

import pytest
from rxe_guest import only_in_guest

from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject, nic_checks
from mkernel.settings import NicSettings

pytestmark = only_in_guest
# A put takes a hundred times as long as on the software device, as each packet is the guest
# kernel's work and the guest is emulated; and a busy machine lets the guest stand still.
SUBJECT = NicSubject(
    "cx7",
    "system",
    quick=True,
    timeout_s=90.0,
    divisor=20,
    start="fork",
    settings=NicSettings(qp_timeout=16),
)
ONLY_SOFT = {"device-faults"}  # only the software device has faults to order
CHECKS = {each.name: each for each in nic_checks() if each.name not in ONLY_SOFT}


@pytest.mark.parametrize("name", CHECKS)
def test_cx7_keeps_its_promises(name: str) -> None:
    result = run_check(CHECKS[name], SUBJECT)
    assert result.outcome == ("skipped" if name == "device-faults" else "passed"), result.message


def test_nothing_here_needed_torch() -> None:
    assert "torch" not in sys.modules, "importing torch takes the guest 25 s"
