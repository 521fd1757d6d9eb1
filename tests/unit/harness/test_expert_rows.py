"""Rows of the experts' peers, on a CPU; ``tests/gpu/test_expert_rows_on_gpus.py`` has their kernels."""

from __future__ import annotations

import pytest
import torch
from expert_rows import TOKENS, TOP_K, check

from mkernel.harness.contenders import expert_rows


@pytest.mark.parametrize("capacity", [None, TOKENS * TOP_K, 250])
def test_rows_are_copied_and_added_as_the_routing_says(capacity: int | None) -> None:
    check("cpu", 40, capacity)


def test_slots_whose_row_had_no_room_add_nothing() -> None:
    rows, home = torch.ones(2, 4), torch.tensor([0, 2, 1, 5], dtype=torch.int32)
    found = expert_rows.summed(rows, torch.ones(2, 2), home, torch.tensor([3]))
    assert found.tolist() == [[1.0] * 4, [1.0] * 4]
