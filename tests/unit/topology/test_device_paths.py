"""Paths: class, hops, the narrowest link."""

from __future__ import annotations

import devices
import pytest
from pydantic import ValidationError

from mkernel.topology.model import Accelerator, Bridge, FabricLink, Nic, Node
from mkernel.topology.placement import CLASSES, NodePaths

UP, DOWN = "0000:39:00.0", "0000:3a:00.0"
BELOW = ("pci0000:38", "0000:38:01.0", UP)


def gpu(
    index: int, *, port: str = "", numa: int | None = 0, gbs: float | None = 63.0
) -> Accelerator:
    path = (*BELOW, port) if port else ("pci0000:60", f"0000:60:0{index}.0")
    address = f"0000:{0x40 + index:02x}:00.0"
    return devices.gpu(index, pci=address, pci_path=path, pcie_gbs=gbs, numa_node=numa)


def nic(port: str = "", speed: float | None = 400.0, numa: int | None = 0) -> Nic:
    path = (*BELOW, port) if port else ("pci0000:70", "0000:70:01.0")
    more = {"pci_path": path, "pcie_gbs": 63.0, "numa_node": numa, "speed_gbps": speed}
    return devices.nic(0, pci="0000:50:00.0", **more)


def node(*gpus: Accelerator, nics: tuple[Nic, ...] = (), **more: object) -> Node:
    bridges = (
        Bridge(id=DOWN, pcie_gbs=31.5),
        Bridge(id="0000:70:01.0", pcie_gbs=7.9),
        Bridge(id=UP),
    )
    return devices.node(gpus, nics, **{"bridges": bridges, **more})


def link(one: str, other: str, gbs: float | None = 450.0, kind: str = "nvlink") -> FabricLink:
    return FabricLink.model_validate({"kind": kind, "ends": (one, other), "count": 18, "gbs": gbs})


def test_hops_go_up_to_the_common_switch_and_down_again() -> None:
    near, card = gpu(0, port=DOWN), nic("0000:3a:01.0")
    path = NodePaths(node(near, nics=(card,))).between(near, card)
    assert path.kind == "PIX"
    assert [(hop.name, hop.gbs) for hop in path.hops] == [
        ("0000:40:00.0", 63.0),
        (DOWN, 31.5),
        (UP, None),
        ("0000:3a:01.0", None),
        ("0000:50:00.0", 63.0),
        ("mlx5_0", 50.0),
    ]
    assert path.gbs == 31.5, "the narrowest link: the port above the GPU"
    assert path.latency_us == pytest.approx(sum(hop.latency_us for hop in path.hops))


def test_a_slow_port_is_the_narrowest_link() -> None:
    near, card = gpu(0, port=DOWN), nic("0000:3a:01.0", speed=100.0)
    assert NodePaths(node(near)).between(near, card).gbs == 12.5


def test_further_is_never_faster_nor_nearer() -> None:
    near, card = gpu(0, port=DOWN), nic()
    paths = NodePaths(node(near, nics=(card,)))
    across = paths.between(near, nic(numa=1))
    inside = paths.between(near, card)
    assert (inside.kind, across.kind) == ("NODE", "SYS")
    assert across.gbs is not None
    assert inside.gbs is not None
    assert across.gbs <= inside.gbs == 7.9
    assert CLASSES.index(inside.kind) < CLASSES.index(across.kind)
    assert inside.latency_us < across.latency_us


def test_a_device_is_at_itself() -> None:
    one = gpu(0)
    path = NodePaths(node(one)).between(one, one)
    assert (path.kind, path.hops, path.gbs, path.latency_us) == ("LOC", (), None, 0)


@pytest.mark.parametrize(("kind", "wanted"), [("nvlink", "NVL"), ("xgmi", "NVL"), ("hccs", "HCCS")])
def test_direct_links(kind: str, wanted: str) -> None:
    gpus = (gpu(0), gpu(1))
    paths = NodePaths(node(*gpus, fabric=(link("cuda1", "cuda0", 100.0, kind),)))
    for one, other in (gpus, gpus[::-1]):
        path = paths.between(one, other)
        assert (path.kind, path.gbs, len(path.hops)) == (wanted, 100.0, 1)


def test_through_a_switch_the_lesser_side_counts() -> None:
    gpus = (gpu(0), gpu(1), gpu(2))
    links = (link("cuda0", "switch"), link("cuda1", "switch", 225.0))
    paths = NodePaths(node(*gpus, fabric=links))
    path = paths.between(gpus[0], gpus[1])
    assert (path.kind, path.gbs, len(path.hops)) == ("NVL", 225.0, 2)
    assert paths.between(gpus[0], gpus[2]).kind == "PHB", "which has no link"
    assert paths.fabric(gpus[0], gpus[2]) == ()


def test_other_ends_join_nobody() -> None:
    gpus = (gpu(0), gpu(1))
    to_host = (link("cuda0", "host", kind="c2c"), link("cuda1", "host", kind="c2c"))
    assert NodePaths(node(*gpus, fabric=to_host)).between(*gpus).kind == "PHB"
    mixed = (link("cuda0", "switch"), link("cuda1", "switch", kind="hccs"))
    assert NodePaths(node(*gpus, fabric=mixed)).between(*gpus).kind == "PHB"


def test_unknown_rates_leave_the_bandwidth_open() -> None:
    gpus = (gpu(0, gbs=None), gpu(1, gbs=None))
    assert NodePaths(node(*gpus)).between(*gpus).gbs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"fabric": (link("cuda0", "cuda9"),)},
        {"fabric": (link("cuda0", "cuda0"),)},
        {"no_p2p": (("cuda0", "switch"),)},
        {"bridges": (Bridge(id=UP), Bridge(id=UP))},
    ],
)
def test_a_node_knows_the_ends_of_its_links(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"node 0: .*(cuda|switch|twice)"):
        node(gpu(0), **fields)
