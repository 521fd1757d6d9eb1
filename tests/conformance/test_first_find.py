"""Where one find is enough, ranks leave off together, whoever found it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.grid import typical_of_each
from mkernel.conformance.ranks import each_case
from mkernel.launch import report

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

FOUND = 1
"""Number of the case that one rank finds wrong."""


def wrong_on_the_last_rank(case: Case, all_of_them: list[str]) -> Iterator[str]:
    report(str(case))
    world = mkernel.world()
    if world.rank == world.size - 1 and str(case) == all_of_them[FOUND]:
        yield "wrong"


@pytest.mark.parametrize("first_find", [False, True])
def test_ranks_leave_off_after_the_same_case(first_find: bool) -> None:
    subject = AcceleratorSubject("streams", quick=True, first_find=first_find)
    cases = typical_of_each(subject, (1, 3))
    names = [str(case) for case in cases]
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    found = subject.launch(
        each_case, wrong_on_the_last_rank, cases, names,
        world=(1, 3), on_report=lambda rank, case: seen[rank].append(case),
    )  # fmt: skip
    assert found == [[], [], ["wrong"]]
    judged = names[: FOUND + 1] if first_find else names
    assert seen == {0: judged, 1: judged, 2: judged}
