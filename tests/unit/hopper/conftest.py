"""What plans of Hopper depend on beside their arguments, and the native module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.errors import BackendUnavailable
from mkernel.plan import planner


@pytest.fixture
def made() -> Any:
    """The native module. Without it the test is skipped."""
    try:
        return native.native()
    except BackendUnavailable as error:
        pytest.skip(f"this build has no kernels for Hopper: {error}")


@pytest.fixture(autouse=True)
def _ring_attention_by_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """But in tests that ask for something else. Plans are kept, whatever was asked for then."""
    planner._planned.cache_clear()
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "parts")
    yield
    planner._planned.cache_clear()
