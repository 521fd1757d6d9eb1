"""What the NICs of a world do, of what is asked for."""

from __future__ import annotations

import pytest

from mkernel.topology.lanes import NicUse, nic_schedule


@pytest.mark.parametrize("several_rails", [False, True])
@pytest.mark.parametrize("queue_pairs", [1, 2])
def test_puts_are_cut_where_there_are_several_lanes(queue_pairs: int, several_rails: bool) -> None:
    use = NicUse(queue_pairs=queue_pairs, stripe_bytes=4096)
    made = nic_schedule(use, several_rails=several_rails)
    assert made.queue_pairs == queue_pairs
    assert made.stripe_bytes == (4096 if queue_pairs == 2 or several_rails else None)
