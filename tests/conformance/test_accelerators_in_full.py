"""Checks that take long, in full: every split of up to eight ranks, many random draws on two nodes,
hundreds of routings and of shapes of attention."""

from __future__ import annotations

import pytest

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import run_check

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("leaves_nothing"),
]

CHECKS = {check.name: check for check in accelerator_checks()}
BOTH = ("ascend", "mkernel.conformance.faults:Fault")  # the latter is streams, as faults wrap it
WHOLE = {
    "shapes": ("ascend",),
    "worlds": ("ascend",),
    "drawn-routings": BOTH,
    "drawn-attention": BOTH,
}
"""Check → the backends on which it runs in full."""


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, found in WHOLE.items() for backend in found]
)
def test_promise_in_full(name: str, backend: str) -> None:
    check = CHECKS[name]
    result = run_check(check, AcceleratorSubject(backend, quick=False))
    assert result.outcome == "passed", f"{check.promise}\n{result.message}"
