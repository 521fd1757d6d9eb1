"""A world finds its kinds of nodes, its placement and its routes once, whatever it plans."""

from __future__ import annotations

from typing import Any

import pytest
from counted import found
from in_world import DEADLINE_S, gathers, stores

import mkernel
from mkernel.errors import ArgumentError
from mkernel.launch import host_store
from mkernel.ops.common import plan_for
from mkernel.settings import Settings
from mkernel.topology.placement import Pinning
from mkernel.world import lifecycle

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def found_by_a_world(port: int) -> dict[str, int]:
    """What one more world like the default one finds until it has run three shapes and planned one."""
    first = mkernel.world()
    with found() as counts:
        world = lifecycle.join(
            first.identity, first.backends, first.settings, stores(port), "again"
        )
        try:
            for rows in (16, 32, 48):
                gathers(rows, rows=rows, group=world)
            sizes = {"m": 64, "n": 64, "k": 64}
            made = plan_for(world, "gemm_all_reduce", sizes, "float16", "float32")
            assert made.placement is world.map.placement
            group = world.accelerator.capabilities().process_group
            assert made.routes is (world.map.group_links if group else world.map.links).table
        finally:
            world.close()
    return dict(counts)


@pytest.mark.parametrize(("accelerator", "nodes"), [("ascend", 2), ("ascend", 1), ("streams", 2)])
def test_a_world_is_placed_once(accelerator: str, nodes: int) -> None:
    store, port = host_store(2 * nodes, 30)
    counts = mkernel.launch(
        found_by_a_world,
        port,
        nodes=nodes,
        ranks_per_node=2,
        accelerator=accelerator,
        timeout_s=DEADLINE_S,
    )
    assert counts == [{"kinds": 1, "place": 1, "routes": 1}] * (2 * nodes)
    del store


@pytest.mark.parametrize(
    ("pinning", "message"),
    [
        ({"accelerators": ("gone", "npu0")}, r"pinning.accelerators = gone, npu0"),
        ({"nics": {"ascend-sim0": ("gone",)}}, r"pinning.nics\[ascend-sim0\] = gone .*: soft0"),
    ],
)
def test_a_world_refuses_pins_that_do_not_fit(pinning: dict[str, Any], message: str) -> None:
    settings = Settings(pinning=Pinning(**pinning))
    with pytest.raises(ArgumentError, match=message):
        mkernel.launch(
            abs, 1, nodes=2, ranks_per_node=2, accelerator="ascend", nic="cx7", verbs="soft",
            settings=settings, timeout_s=DEADLINE_S,
        )  # fmt: skip
