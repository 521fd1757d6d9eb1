"""Calls whose clusters claim tiles make progress with any share of the multiprocessors."""

from __future__ import annotations

import claims_ranks
import pytest
from device_buffers import takes_ranks
from hopper_ranks import OPS, Shape

import mkernel

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

DEADLINE_S = 8.0
HELD = 100
"""Multiprocessors of 132 that something else has: 32 are left, 16 clusters."""


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one", "both"])
@pytest.mark.parametrize("op", OPS)
def test_a_call_goes_on_with_a_share_of_the_multiprocessors(
    op: str, ranks: tuple[int, ...]
) -> None:
    """By strides, all-reduces of several panels reach the deadline: a tile waits for one of a cluster
    that has no multiprocessor, and what has one waits for it."""
    found = mkernel.launch(
        claims_ranks.in_a_share, Shape(op, 8192, 8192, 2048, layout="column", path="fused"), True,
        HELD, ranks, 3, 4 * DEADLINE_S, ranks_per_node=2, accelerator="hopper", timeout_s=DEADLINE_S,
    )  # fmt: skip
    for error, seconds, failures in found:
        assert not error
        assert not failures
        assert seconds < DEADLINE_S
