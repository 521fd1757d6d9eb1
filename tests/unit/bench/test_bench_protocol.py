"""How long a device is held back before a turn, without a device."""

from __future__ import annotations

from mkernel.bench.protocol import LONGEST_SPIN_S, SHORTEST_SPIN_S, SPARE, Spins


def test_a_spin_outlasts_what_the_host_needed_last() -> None:
    spins = Spins()
    spins.queued("slow", 0.003)
    assert spins.before("slow") == SPARE * 0.003
    assert spins.before("another") == SHORTEST_SPIN_S
    spins.queued("slow", 0.0001)
    assert spins.before("slow") == SHORTEST_SPIN_S


def test_a_first_turn_that_loads_libraries_does_not_hold_up_the_others() -> None:
    spins = Spins()
    spins.queued("first", 30.0)
    assert spins.before("first") == LONGEST_SPIN_S
    spins.queued("first", 0.001)
    assert spins.before("first") == SHORTEST_SPIN_S
