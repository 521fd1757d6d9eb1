"""The accelerators that run everywhere pass the kit, in short: ``ascend``, ``streams`` as faults wrap
it, and nodes of both in one world, in CI by some checks alone. `make test-long` has the whole kit
judge them."""

from __future__ import annotations

import pytest
from kept_subject import IN_NEW_PROCESSES, Kept

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import run_check
from mkernel.conformance.checks import attention, moe

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = {check.name: check for check in accelerator_checks()}
UNLIKE = "ascend,streams"
SKIPPED = {
    "ascend": {"activations", "queued-calls", "documents", "scales"},
    "mkernel.conformance.faults:Fault": {"queued-calls"},
    UNLIKE: {
        "scales", "queued-calls", "chunk-invariance", "split-invariance", "sum-order",
        *(check.name for each in (attention, moe) for check in each.CHECKS),
    },
}  # fmt: skip
"""Backend → checks of what it does not claim."""
IN_CI = ("capabilities", "rank-order", "views", "mismatched-call")
"""The checks of unlike nodes in CI, beside what tests/multiprocess/test_unlike_nodes.py has."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(
            name, backend, marks=pytest.mark.long if backend == UNLIKE and name not in IN_CI else ()
        )
        for name in CHECKS
        for backend in SKIPPED
    ],
)
def test_promise(name: str, backend: str) -> None:
    check = CHECKS[name]
    kind = AcceleratorSubject if check.name in IN_NEW_PROCESSES else Kept
    result = run_check(check, kind(backend, quick=True))
    expected = "skipped" if check.name in SKIPPED[backend] else "passed"
    assert result.outcome == expected, f"{check.promise}\n{result.message}"
