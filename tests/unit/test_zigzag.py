"""The positions of a causal sequence that each rank holds."""

from __future__ import annotations

import pytest

from mkernel.errors import ShapeError
from mkernel.ops.zigzag import zigzag_positions


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_hold_one_early_and_one_late_piece(world_size: int) -> None:
    sequence = 4 * world_size
    held = [zigzag_positions(sequence, world_size, rank).tolist() for rank in range(world_size)]
    assert sorted(position for own in held for position in own) == list(range(sequence))
    for rank, own in enumerate(held):
        last = sequence - 2 * rank
        assert own == [2 * rank, 2 * rank + 1, last - 2, last - 1]


@pytest.mark.parametrize(("sequence", "world_size"), [(0, 1), (1, 1), (5, 3), (10, 3), (4, 4)])
def test_a_sequence_that_does_not_divide_is_refused(sequence: int, world_size: int) -> None:
    with pytest.raises(ShapeError, match=f"a multiple of {2 * world_size}"):
        zigzag_positions(sequence, world_size, 0)
