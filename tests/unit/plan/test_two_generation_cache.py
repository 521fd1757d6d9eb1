"""What is kept of the shapes that a world has met."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mkernel.plan.two_generation_cache import TwoGenerationCache


@given(st.lists(st.integers(0, 12)), st.integers(1, 5))
def test_the_last_ones_are_kept_and_not_many_more(uses: list[int], most: int) -> None:
    recent: TwoGenerationCache[int, str] = TwoGenerationCache(most)
    for turn, key in enumerate(uses):
        lately = list(dict.fromkeys(reversed(uses[:turn])))[:most]  # different, the latest first
        found = recent[key]
        assert found in (None, str(key))
        assert found is not None or key not in lately
        if found is None:
            recent[key] = str(key)
        assert recent.kept() <= 2 * most


def test_a_new_value_for_a_kept_key_drops_nothing() -> None:
    recent: TwoGenerationCache[int, str] = TwoGenerationCache(2)
    for key in (1, 2, 2, 2):
        recent[key] = str(key)
    assert (recent[1], recent[2], recent.kept()) == ("1", "2", 2)


def test_a_look_at_a_key_is_no_use_of_it() -> None:
    recent: TwoGenerationCache[int, str] = TwoGenerationCache(2)
    for key in (1, 2, 3):
        recent[key] = str(key)
    assert [recent.peek(key) for key in (1, 2, 3, 4)] == ["1", "2", "3", None]
    recent[4] = "4"  # the younger generation has room
    assert [recent.peek(key) for key in (1, 2, 3, 4)] == ["1", "2", "3", "4"]
    recent[5] = "5"
    assert [recent.peek(key) for key in (1, 2, 3, 4, 5)] == [None, None, "3", "4", "5"]
