"""AllReduce on GPUs, beside ``test_calls_on_gpus``: results in e4m3, and known calls."""

from __future__ import annotations

import hopper_ranks
import norm_ranks
import pytest
from device_buffers import needs_gpus, worlds
from families import ROWS
from kept_ranks import right

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


@worlds
def test_rows_in_e4m3_are_those_of_the_host(world: int) -> None:
    right(world, norm_ranks.quantised)


@worlds
def test_known_calls(world: int) -> None:
    """Native code starts them, whichever way they take."""
    right(world, hopper_ranks.known, [shape for shape in ROWS if shape.to == "own"], 24)
