"""Turns of the campaign, as many however busy the machine is; `make chaos` plays others."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from campaigns.draw import draw
from campaigns.faults import DEVICE_FAULTS, KINDS
from campaigns.pinned import pinned
from campaigns.turns import campaign

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SEED, FIRST = 1, 1
TURNS, LONG_TURNS = 6, 29
"""Turn 0 exhausts memory, of which the C library itself may end a process: `make chaos` plays it."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("turns", [TURNS, pytest.param(LONG_TURNS, marks=pytest.mark.long)])
def test_turns_of_the_campaign(turns: int, tmp_path: Path) -> None:
    for result in islice(campaign(tmp_path, SEED, FIRST), turns):
        print(result.turn, result.outcome.summary())
        assert not result.wrong, "\n".join([result.turn.in_full(), *result.wrong])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pinned_turns(tmp_path: Path) -> None:
    """Those that found defects, and every fault of a device, on each NIC."""
    turns = [each.turn() for each in pinned()]
    assert any(turn.group_nodes > 1 for turn in turns)
    broken = {(turn.nic, turn.fault.kind) for turn in turns if turn.fault.device}
    assert broken == {(nic, kind) for nic in ("cx7", "efa") for kind in DEVICE_FAULTS}
    for result in islice(campaign(tmp_path, SEED, before=turns), len(turns)):
        print(result.turn, result.outcome.summary())
        assert not result.wrong, "\n".join([result.turn.in_full(), *result.wrong])


def test_a_turn_is_drawn_from_its_seed_and_number_alone() -> None:
    turns = [draw(7, number) for number in range(200)]
    assert [draw(7, number) for number in reversed(range(200))] == turns[::-1]
    assert {turn.fault.kind for turn in turns} >= KINDS.keys() - {
        "killed-joining",
        "stopped-joining",
    }
    assert draw(8, 0) != turns[0]
