"""What a world keeps does not grow with the number of shapes that it has seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stranger import where
from torch.distributed import TCPStore

import mkernel
from mkernel.plan.recent import Recent

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def keys_after(shapes: tuple[int, ...]) -> list[int]:
    """Keys of the store after so many calls, each of a shape of its own, and a barrier."""
    port, _ = where()
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    world, counted, rows = mkernel.world(), [], 0
    for count in shapes:
        for _ in range(count):
            rows += world.size
            mkernel.all_gather_gemm(torch.ones(rows // world.size, 16), torch.ones(16, 16))
        for _ in range(count):
            world.barrier()
        # No rank deletes anything any more once all have come to one barrier and left the one before.
        counted.append(store.num_keys())
        world.barrier()
    return counted


@pytest.mark.parametrize(("accelerator", "nodes"), [("streams", 1), ("ascend", 2)])
def test_the_store_forgets_what_every_rank_has_read(accelerator: str, nodes: int) -> None:
    options: dict[str, Any] = {"nodes": nodes, "ranks_per_node": 2 // nodes}
    for few, many in mkernel.launch(keys_after, (5, 40), accelerator=accelerator, **options):
        assert many <= few + 4  # a rank may be about to delete what it told last


FEW = 8


def kept_after(shapes: int) -> tuple[list[int], float]:
    """How much a rank keeps after calls of so many shapes, twice each, and the largest error."""
    world = mkernel.world()
    recents: list[Recent[Any, Any]] = [
        world.planned, world.checked, world._calls._agreement._agreed,
        world._membership.heap._sharing,
    ]  # fmt: skip
    for recent in recents:
        recent.most = FEW
    wrong = 0.0
    for _ in range(2):
        for rows in range(1, shapes + 1):
            a = torch.full((world.size * rows, 16), float(rows))
            out = mkernel.gemm_all_reduce(a, torch.ones(16, 16))
            mkernel.synchronize()
            wrong = max(wrong, float((out - world.size * 16 * rows).abs().max()))
    assert not world._membership.heap._plans
    return [recent.kept() for recent in recents], wrong


@pytest.mark.parametrize("name", ["queueing_backend:Wordless", "streams"])
def test_a_world_keeps_the_last_shapes_only(name: str) -> None:
    """A shape that comes back is planned, agreed on and given its workspace again."""
    found = mkernel.launch(kept_after, 5 * FEW, accelerator=name, ranks_per_node=2)
    assert found == [([*kept], 0.0) for kept, _ in found]
    for kept, _ in found:
        assert max(kept) <= 2 * FEW
        assert min(kept) >= FEW
