"""By which words ranks know that they are about to make the same call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mkernel.world.agreement import _key

PLAN: Any = SimpleNamespace(digest=lambda: "d" * 64)


def test_where_symmetric_tensors_lie_is_part_of_a_call() -> None:
    """Peers write to them."""
    assert _key(PLAN, {}) == PLAN.digest()
    places = [{}, {"out": (0, 0)}, {"out": (1, 0)}, {"out": (0, 64)}, {"gathered": (0, 0)}]
    keys = [_key(PLAN, each) for each in places]
    assert len(set(keys)) == len(places)
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)
    assert keys == [_key(PLAN, each) for each in places]
