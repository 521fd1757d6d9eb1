"""The links that a message crosses: its rails, and an accelerator's own where that is the limit."""

from __future__ import annotations

import pytest
from devices import gpu, nic, node, world
from shipped import constants_of

from mkernel.topology.placement import place
from mkernel.topology.routing import routes
from mkernel.topology.shared_links import subflows

CONSTANTS = constants_of("hopper")


@pytest.mark.parametrize(("pcie_gbs", "own"), [(8.0, True), (400.0, False), (None, False)])
def test_an_accelerator_slower_than_its_rails_is_a_link_of_its_own(
    pcie_gbs: float | None, own: bool
) -> None:
    here, there = (node((gpu(0, 0, pcie_gbs=pcie_gbs),), (nic(0, 0), nic(1, 0))) for _ in range(2))
    machine = world(here, there)
    placement = place(machine, 1)
    table = routes(machine, placement, CONSTANTS)
    names = [
        [link.name for link, _ in subflow.links]
        for route in table.classes
        if route.kind == "nic"
        for subflow in subflows(route, table, placement)
    ]
    rails = [["mlx5_0 out", "mlx5_0 in"], ["mlx5_1 out", "mlx5_1 in"]]
    assert {route.bandwidth_gbs for route in table.classes} == {8.0 if own else 100.0}
    assert names == [["cuda0 out", *rail, "cuda0 in"] if own else rail for rail in rails]
