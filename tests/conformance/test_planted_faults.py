"""The kit fails on every planted fault, by the name of the check; and every check has one."""

from __future__ import annotations

import pytest

from mkernel.conformance import planted
from mkernel.conformance.accelerator import OPS, accelerator_checks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

FAULTS = planted.faults()


def test_every_check_has_a_planted_fault() -> None:
    tripped = {check for checks in FAULTS.values() for check in checks}
    assert {check.name for check in accelerator_checks()} == tripped


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.rpartition(":")[2])
def test_a_planted_fault_trips_its_checks(fault: str) -> None:
    for row in planted.judge_one(fault, FAULTS[fault]):
        print(f"{row.check} on {row.fault} ({row.breaks}): {row.message}")
        assert row.caught, f"{row.check} lets {row.fault} pass: {row.breaks}"


BROAD = {
    "OneWrongElement": "shapes",
    "KeepsSomeRows": "stale-data",
    "NoisyLastBit": "determinism",
    "SequentialIsWrong": "views",
}
"""Faults that break every op at once: a check that looks at one op only would catch them too."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fault", BROAD)
def test_a_fault_of_one_op_alone_is_caught(fault: str, op: str) -> None:
    (row,) = planted.judge_one(f"mkernel.conformance.faults:{fault}.{op}", [BROAD[fault]])
    assert row.caught, f"{row.check} lets {fault} of {op} pass"


@pytest.mark.parametrize("check", ["shapes", "dtypes", "accumulation"])
def test_partial_results_that_are_rounded_as_claimed_pass(check: str) -> None:
    (row,) = planted.judge_one("mkernel.conformance.faults:RoundsPartials", [check])
    assert not row.caught, row.message
