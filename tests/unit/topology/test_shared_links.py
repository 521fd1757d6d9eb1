"""The links that a message crosses: its rails, and an accelerator's own where that is the limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from devices import gpu, nic, node, world
from shipped import constants_of

from mkernel.topology.placement import place
from mkernel.topology.routes import _fabric, subflows
from mkernel.topology.routing import routes

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


@pytest.mark.parametrize("egress", [(), (None,), (100.0,)])
def test_of_a_switch_each_accelerators_ports_are_shared(egress: tuple[float | None, ...]) -> None:
    table: Any = SimpleNamespace(egress_gbs=egress)
    route: Any = SimpleNamespace(fabric_gbs=50.0, bandwidth_gbs=1.0)
    seats: Any = [SimpleNamespace(accelerator=name) for name in ("a", "b")]
    found = {link.name: gbs for link, gbs in _fabric(table, route, 0, seats, 0, 1)}
    ports = {"a egress": 100.0, "b ingress": 100.0}
    assert found == (ports if egress == (100.0,) else {"a → b": 50.0})
