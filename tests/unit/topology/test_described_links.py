"""Rates inside a node are those of its description: PCIe links, what shares them, bridges on pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import gpu, node, world
from shipped import constants_of

from mkernel.topology.cost import MachineConstants
from mkernel.topology.discover import read
from mkernel.topology.model import Bridge, FabricLink, Node, Topology
from mkernel.topology.reshape import keep_accelerators
from mkernel.topology.routes import SharedLinks
from mkernel.topology.world_map import WorldMap, world_map

HOPPER = constants_of("hopper")
X16, X8 = 63.015, 31.508
"""The rates of PCIe 5 slots, and below what copies reach on them: the documented model."""
SWITCHED = 0.79
BRIDGED = 0.79 * 0.83
SOCKETS = 16.0


def dump(tmp_path: Path, links: str = "", width: int = 16) -> Topology:
    """Return two sockets with two H100 PCIe each, as NCCL dumps them. ``links``: in a GPU."""
    cpus, bus = "", 16
    for numa in range(2):
        gpus = ""
        for _ in range(2):
            gpus += (
                f'<pci busid="0000:{bus:02x}:00.0" class="0x030200" vendor="0x10de" device="0x2331" '
                f'link_speed="32.0 GT/s PCIe" link_width="{width}">'
                f'<gpu dev="{bus // 16 - 1}" sm="90" rank="{bus // 16 - 1}" gdr="1">{links}</gpu></pci>'
            )
            bus += 16
        cpus += f'<cpu host_hash="0x1" numaid="{numa}" affinity="ffff">{gpus}</cpu>'
    (tmp_path / "dump.xml").write_text(f'<system version="1">{cpus}</system>')
    return read(tmp_path / "dump.xml").topology


def mapped(machine: Topology, constants: MachineConstants | None = HOPPER) -> WorldMap:
    return world_map(machine, len(machine.nodes[0].accelerators), constants)


def rate(found: WorldMap, src: int, dst: int) -> float:
    return found.links.table.route(found.placement, src, dst).bandwidth_gbs


def gbs_of_all(links: SharedLinks) -> float:
    """Return the GB/s that a rank sends to all others if all send alike, by the links' loads."""
    ranks = links.placement.ranks_per_node
    return (ranks - 1) / max(nbytes / gbs for nbytes, gbs, _ in links.loads(lambda _: 1.0))


@pytest.mark.parametrize("constants", [HOPPER, constants_of("streams-cuda"), None])
def test_without_nvlink_bytes_go_over_pcie(
    constants: MachineConstants | None, tmp_path: Path
) -> None:
    found = mapped(dump(tmp_path), constants)
    assert rate(found, 0, 1) == pytest.approx(X16 * BRIDGED, rel=1e-3)
    assert rate(found, 0, 2) == SOCKETS
    # Two ranks of a socket send to two of the other one through what joins the sockets.
    assert gbs_of_all(found.links) == pytest.approx(3 * SOCKETS / 4)
    assert found.links.egress_gbs == pytest.approx(3 * SOCKETS / 4)
    assert found.links.table.egress_gbs == (None,)


def test_a_narrow_slot_is_as_fast_as_it_is(tmp_path: Path) -> None:
    assert rate(mapped(dump(tmp_path, width=8)), 0, 1) == pytest.approx(X8 * BRIDGED, rel=1e-3)


def test_bridges_join_pairs_alone() -> None:
    """A pair's links are as many as there are, and others go over PCIe."""
    bridge = FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=12, gbs=300.0)
    devices = tuple(gpu(i, i, pcie_gbs=X16) for i in range(3))
    found = mapped(world(node(devices, fabric=(bridge,))))
    assert (rate(found, 0, 1), rate(found, 1, 0)) == (300.0, 300.0)
    assert rate(found, 0, 2) == pytest.approx(X16 * BRIDGED, rel=1e-3)
    names = {link.name: gbs for (link, gbs) in rates_of(found.links).items()}
    assert names["cuda0 → cuda1"] == 300.0
    # Into cuda2 from both: half each.
    assert gbs_of_all(found.links) == pytest.approx(X16 * BRIDGED, rel=1e-3)


def test_a_visible_pair_without_a_bridge_goes_over_pcie() -> None:
    """As with CUDA_VISIBLE_DEVICES=0,2 or 0,1 where a bridge joins 0 and 1."""
    bridge = FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=12, gbs=300.0)
    devices = tuple(gpu(i, i, pcie_gbs=X16) for i in range(3))
    machine = node(devices, fabric=(bridge,), fabric_known=True)
    for pair, gbs, over_pcie in (((0, 2), X16 * BRIDGED, True), ((0, 1), 300.0, False)):
        shown = keep_accelerators(machine, [devices[index] for index in pair])
        found = mapped(world(shown))
        (route, _) = found.links.table.classes
        assert (route.kind, route.over_pcie) == ("p2p", over_pcie)
        assert route.bandwidth_gbs == pytest.approx(gbs, rel=1e-3)
        assert found.links.egress_gbs == pytest.approx(gbs, rel=1e-3)


def rates_of(links: SharedLinks) -> dict[object, float]:
    return dict(links._rates)


def test_gpus_below_one_switch_share_its_upstream_link() -> None:
    """To a GPU elsewhere they have half of it each; to each other all of their own slots."""
    above = "0000:80:00.0"
    devices = tuple(
        gpu(
            i,
            pci=f"0000:{i:02x}:00.0",
            pci_path=("pci0000:00", "root", above) if i < 2 else ("pci0000:99",),
            pcie_gbs=X16,
        )
        for i in range(3)
    )
    machine = node(devices, bridges=(Bridge(id=above, pcie_gbs=X8),), fabric_known=True)
    found = mapped(world(machine))
    assert rate(found, 0, 1) == pytest.approx(X16 * SWITCHED, rel=1e-3)
    assert rate(found, 0, 2) == pytest.approx(X8 * BRIDGED, rel=1e-3)
    assert gbs_of_all(found.links) == pytest.approx(2 * X8 * BRIDGED / 2, rel=1e-3)


def test_cards_are_on_pcie_whoever_describes_them() -> None:
    """Where a source cannot see links, names of PCIe cards say enough; for others the constants'
    rate stands."""
    bridged = round(X16 * BRIDGED, 3)
    for name, expected in (
        ("NVIDIA H100 PCIe", bridged),
        ("NVIDIA A100-PCIE-80GB", bridged),
        ("NVIDIA L40S", bridged),
        ("10de:20b5", bridged),
        ("NVIDIA H100 80GB HBM3", HOPPER.p2p_gbs),
        ("10de:2330", HOPPER.p2p_gbs),
    ):
        devices = tuple(gpu(i, i, pcie_gbs=X16, name=name) for i in range(2))
        constants = HOPPER.model_copy(update={"architectures": ()})
        assert rate(mapped(world(node(devices)), constants), 0, 1) == expected, name


def test_what_is_not_told_is_not_assumed_to_be_fast() -> None:
    devices = tuple(gpu(i, i) for i in range(2))
    found = mapped(world(node(devices, fabric_known=True)))
    assert rate(found, 0, 1) < 40.0
    assert found.links.egress_gbs == rate(found, 0, 1)


def test_host_memory_is_reached_over_the_slot() -> None:
    devices = tuple(gpu(i, i, pcie_gbs=3.9) for i in range(2))
    made: Node = node(devices, no_p2p=(("cuda0", "cuda1"),))
    assert rate(mapped(world(made)), 0, 1) == pytest.approx(3.9 * BRIDGED, rel=1e-3)
