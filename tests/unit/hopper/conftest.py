"""What plans of Hopper depend on beside their arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkernel.plan import planner


@pytest.fixture(autouse=True)
def _ring_attention_by_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """But in tests that ask for something else. Plans are kept, whatever was asked for then."""
    planner._planned.cache_clear()
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "parts")
    yield
    planner._planned.cache_clear()
