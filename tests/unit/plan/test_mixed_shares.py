"""Uneven shares of unlike nodes: they are whole, and a node's time is that of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkernel.errors import ArgumentError
from mkernel.plan.mixed import shares

speeds = st.lists(st.floats(1, 1000), min_size=2, max_size=6)


@given(speeds, st.integers(1, 8), st.sampled_from([1, 8, 128]), st.integers(6, 500))
def test_shares_are_whole(rates: list[float], ranks: int, multiple: int, units: int) -> None:
    size = units * ranks * multiple
    found = shares(size, multiple, ranks, rates)
    assert ranks * sum(found) == size
    assert all(each >= multiple and each % multiple == 0 for each in found)


@given(speeds, st.integers(1, 8))
def test_the_work_of_each_rank_takes_as_long_as_its_speed_lets_expect(
    rates: list[float], ranks: int
) -> None:
    """The slowest rank ends within 10 % of the ideal time; with even shares only where speeds are
    alike."""
    size = ranks * 2**20
    ideal = size / ranks / sum(rates)

    def longest(parts: tuple[int, ...]) -> float:
        return max(part / rate for part, rate in zip(parts, rates, strict=True))

    assert longest(shares(size, 1, ranks, rates)) <= 1.1 * ideal
    even = longest(shares(size, 1, ranks, [1.0] * len(rates)))
    assert even >= 0.99 * sum(rates) / len(rates) / min(rates) * ideal


def test_equal_speeds_share_evenly() -> None:
    assert shares(96, 8, 2, [3.0, 3.0]) == (24, 24)
    assert shares(96, 8, 2, [2.0, 1.0]) == (32, 16)


@pytest.mark.parametrize("size", [0, 8, 40])
def test_what_cannot_be_shared_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="a multiple of 16"):
        shares(size, 8, 2, [1.0, 1.0])
