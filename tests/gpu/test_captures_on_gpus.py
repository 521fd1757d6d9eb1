"""CUDA graphs capture calls that have never run before, and again after a capture that broke off."""

from __future__ import annotations

import capture_ranks
import pytest
from device_buffers import needs_gpus, worlds
from hopper_ranks import OPS, Shape
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture(autouse=True, params=["fused", "library"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_PATH", request.param)


@worlds
def test_a_call_that_never_ran_is_captured(world: int) -> None:
    shapes = [Shape(op, 1024 + 8 * world, 520, 264) for op in OPS]
    right(world, capture_ranks.new_in_a_capture, shapes, 4)


@worlds
def test_a_capture_that_broke_off_is_made_again(world: int) -> None:
    shapes = [Shape(op, 768, 520, 264) for op in OPS]
    right(world, capture_ranks.broken_off, shapes, 4)
