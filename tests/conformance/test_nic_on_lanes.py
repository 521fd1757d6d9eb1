"""The checks of what arrives, and when, with puts spread over several queue pairs or copied twice."""

from __future__ import annotations

import pytest

from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject, nic_checks
from mkernel.settings import NicSettings

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = {check.name: check for check in nic_checks()}
OF_BOTH = ["cx7", pytest.param("efa", marks=pytest.mark.long)]
"""In CI `efa` is judged over several queue pairs by `visibility` in test_nic; rings are the software
device's."""
LANES = NicSettings(qps=3, stripe_bytes=1000)


@pytest.mark.parametrize("name", ["visibility", "sizes", "in-flight", "flush", "churn"])
@pytest.mark.parametrize("nic", OF_BOTH)
def test_it_keeps_its_promises_over_several_lanes(nic: str, name: str) -> None:
    subject = NicSubject(nic, "soft", quick=True, settings=LANES)
    result = run_check(CHECKS[name], subject)
    assert result.outcome == "passed", result.message


@pytest.mark.parametrize("nic", ["cx7", "efa"])
def test_it_claims_no_order_over_several_lanes(nic: str) -> None:
    result = run_check(CHECKS["order"], NicSubject(nic, "soft", quick=True, settings=LANES))
    assert result.outcome == "skipped", result.message


@pytest.mark.parametrize("nic", OF_BOTH)
def test_it_keeps_its_promises_through_rings(nic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between processes that cannot map each other's memory."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_BY_REFERENCE", "0")
    result = run_check(CHECKS["visibility"], NicSubject(nic, "soft", quick=True))
    assert result.outcome == "passed", result.message
