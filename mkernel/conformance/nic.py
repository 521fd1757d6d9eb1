"""The NIC half of the kit: its checks, and the subject that they judge."""

from __future__ import annotations

from mkernel.conformance.check import Check
from mkernel.conformance.nic_checks import DATA_CHECKS
from mkernel.conformance.nic_device_checks import DEVICE_FAULT_CHECKS
from mkernel.conformance.nic_life_checks import LIFE_CHECKS
from mkernel.conformance.nic_plan_checks import PLAN_CHECKS
from mkernel.conformance.nic_stranger_checks import STRANGER_CHECKS
from mkernel.harness.nic_ranks import NicSubject

__all__ = ["NicSubject", "nic_checks"]


def nic_checks() -> tuple[Check, ...]:
    """Return all checks, to run with a :class:`NicSubject`."""
    return (
        *LIFE_CHECKS[:1],
        *PLAN_CHECKS,
        *STRANGER_CHECKS,
        *DATA_CHECKS,
        *LIFE_CHECKS[1:],
        *DEVICE_FAULT_CHECKS,
    )
