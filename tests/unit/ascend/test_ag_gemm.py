"""AllGather+GEMM against float64: worlds, dtypes, layouts, ragged shapes, epochs, schedules."""

from __future__ import annotations

import pytest
import torch

from .rig import LIMIT, World, error, make_plan


def check(world: World, epochs: int = 1) -> list[torch.Tensor]:
    """Fresh inputs each epoch; outputs and staging start as NaN."""
    outputs: list[torch.Tensor] = []
    world.poison()
    for epoch in range(epochs):
        tensors = world.tensors(seed=1000 + epoch)
        outputs = world.call(tensors)
        for rank in range(world.plan.world_size):
            worst = error(tensors, rank)
            assert worst <= LIMIT[world.plan.out_dtype], f"rank {rank}, epoch {epoch + 1}: {worst}"
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_one_node(ranks: int) -> None:
    with World(make_plan(256 * ranks, 320, 512, ranks_per_node=ranks)) as world:
        check(world, epochs=5)
        assert not world.puts
