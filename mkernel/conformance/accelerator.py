"""The accelerator half of the kit: its checks, and the subject that they judge."""

from __future__ import annotations

from mkernel.conformance.accelerator_subject import OPS, AcceleratorSubject, bounded
from mkernel.conformance.check import Check
from mkernel.conformance.checks import ALL

__all__ = ["OPS", "AcceleratorSubject", "accelerator_checks", "bounded"]


def accelerator_checks() -> tuple[Check, ...]:
    """Return all checks, to run with an :class:`AcceleratorSubject`; the cheap and basic ones first."""
    return ALL
