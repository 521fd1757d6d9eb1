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


CLASSES = {
    "gathers": ("all_gather_gemm",),
    "sums": ("gemm_reduce_scatter", "gemm_all_reduce", "all_reduce"),
    "experts": ("moe_dispatch", "moe_dispatch_gemm", "moe_combine", "moe_gemm_combine"),
    "attention": ("ring_attention",),
}
"""Ops that move bytes alike. CI plants each broad fault in one op of each class, in turn, so that it
plants something in every op; `make test-long` plants each fault in every op."""


def one_op_of_each_class() -> set[tuple[str, str]]:
    return {
        (fault, ops[number % len(ops)])
        for number, fault in enumerate(BROAD)
        for ops in CLASSES.values()
    }


IN_CI = one_op_of_each_class()


def test_ci_plants_a_fault_in_every_op() -> None:
    assert {op for ops in CLASSES.values() for op in ops} == set(OPS)
    assert {op for _, op in IN_CI} == set(OPS)
    assert {fault for fault, _ in IN_CI} == BROAD.keys()


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        pytest.param(
            fault, op, id=f"{fault}-{op}",
            marks=() if (fault, op) in IN_CI else pytest.mark.long,
        )
        for fault in BROAD
        for op in OPS
    ],
)  # fmt: skip
def test_a_fault_of_one_op_alone_is_caught(fault: str, op: str) -> None:
    (row,) = planted.judge_one(f"mkernel.conformance.faults:{fault}.{op}", [BROAD[fault]])
    assert row.caught, f"{row.check} lets {fault} of {op} pass"


@pytest.mark.parametrize("check", ["shapes", "dtypes", "accumulation"])
def test_partial_results_that_are_rounded_as_claimed_pass(check: str) -> None:
    (row,) = planted.judge_one("mkernel.conformance.faults:RoundsPartials", [check])
    assert not row.caught, row.message
