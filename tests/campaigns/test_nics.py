"""A few turns of the NICs' soak, and whether it catches what is planted."""

from __future__ import annotations

import pytest
from campaigns.nics import soak_nics

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SEED, TURNS, MOST_S = 1, 9, 6000.0
"""Turns end it, however busy the machine is."""


@pytest.mark.parametrize("nic", ["cx7", "efa"])
def test_turns_lose_nothing_and_leave_nothing(nic: str) -> None:
    found = soak_nics([nic], MOST_S, SEED, TURNS)
    assert found["wrong"] == []
    assert all(found["bars_held"].values())
    assert {rank["turns"] for rank in found[nic]} == {TURNS}


@pytest.mark.parametrize(
    ("fault", "said"),
    [("LeaksDescriptor", "more than before 9 turns"), ("AddsOne", "on signal ")],
)
def test_what_is_planted_is_caught(fault: str, said: str) -> None:
    faulty = f"mkernel.conformance.nic_faults:{fault}"
    # What never comes need not be awaited for long.
    (wrong,) = soak_nics([faulty], MOST_S, SEED, TURNS, timeout_s=2.0)["wrong"]
    assert "Traceback" not in wrong
    assert said in wrong
