"""A machine as tree, matrix, picture and report."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import commands
import pytest
from devices import SOFT, bridges, gpu, nic, node, rails, world
from rich.console import Console

from mkernel.cli import probe
from mkernel.errors import ArgumentError, Unsupported
from mkernel.probe import picture
from mkernel.probe.layout import Branch, layout
from mkernel.probe.matrix import matrix
from mkernel.probe.tree import tree
from mkernel.topology.model import Bridge, FabricLink, Node, NumaNode, Topology


def machine(nvlink: bool = True) -> Node:
    """Two sockets; below the switch of each a GPU, an RDMA NIC and an Ethernet one."""
    gpus, nics, ports = [], [], []
    for s in range(2):
        link: dict[str, Any] = {"numa_node": s, "pcie_gbs": 63.015}
        gpus.append(gpu(s, s, name="H200", **link))
        nics.append(nic(s, s, active=s == 0, **link))
        nics.append(nic(8 + s, s, id=f"eth{s}", kind="ethernet", **link))
        ports += [Bridge(id=each, pcie_gbs=31.508) for each in bridges(s, 16 + s)[1:]]
    links = [FabricLink(kind="nvlink", ends=(g.id, "switch"), count=18, gbs=450.0) for g in gpus]
    return node(
        tuple(gpus),
        tuple(nics),
        hostname="host-a",
        numa=(NumaNode(id=0, cpus=(0, 1), memory_bytes=1 << 34), NumaNode(id=1, cpus=(2, 3))),
        bridges=tuple(ports),
        fabric=tuple(links) if nvlink else (),
    )


def shown(topology: Topology) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(tree(topology))
    return console.export_text()


def names(branches: list[Branch]) -> list[Any]:
    return [
        [b.name, b.gbs, [leaf.device.id for leaf in b.leaves], names(b.branches)] for b in branches
    ]


def test_bridges_without_a_fork_are_left_out() -> None:
    assert names(layout(machine())) == [
        ["NUMA 0", None, [], [["0001:00:00.0", 31.508, ["cuda0", "mlx5_0", "eth0"], []]]],
        ["NUMA 1", None, [], [["0001:01:00.0", 31.508, ["cuda1", "mlx5_1", "eth1"], []]]],
    ]


def test_a_lone_device_hangs_on_its_numa_node_by_its_narrowest_link() -> None:
    whole = machine()
    alone = whole.model_copy(
        update={"nics": (), "accelerators": whole.accelerators[:1], "fabric": ()}
    )
    (first, second) = layout(alone)
    assert (first.branches, second.leaves, second.branches) == ([], [], [])
    assert [(leaf.device.id, leaf.gbs) for leaf in first.leaves] == [("cuda0", 31.508)]


def test_devices_of_unknown_place_have_a_branch() -> None:
    made = machine().model_copy(update={"nics": (SOFT,)})
    assert names(layout(made))[-1] == ["NUMA unknown", None, ["soft0"], []]
    assert names(layout(made, ethernet=False)) == names(layout(made))


def test_the_tree_names_everything_once() -> None:
    text = shown(Topology(nodes=(machine(),)))
    for wanted in (
        "host host-a",
        "NUMA 0 · CPUs 0-1 · 16.0 GiB",
        "PCIe 0001:00:00.0 · 31.5 GB/s upwards",
        "cuda0: H200 (cuda) · PCIe 63.0 GB/s",
        "mlx5_0: NIC (cx) 400 Gb/s · PCIe",
        "mlx5_1: NIC (cx) 400 Gb/s DOWN",
        "2 accelerators with 18 NVLink to switches, 450 GB/s",
    ):
        assert text.count(wanted) == 1, wanted


def test_the_tree_of_direct_links_and_refused_pairs() -> None:
    made = machine().model_copy(
        update={
            "fabric": (FabricLink(kind="hccs", ends=("cuda0", "cuda1"), count=1, gbs=28.0),),
            "no_p2p": (("cuda0", "cuda1"),),
        }
    )
    text = shown(Topology(nodes=(made,)))
    assert "1 pair with 1 HCCS to each other, 28 GB/s" in text
    assert "cuda0 and cuda1 have no access to each other's memory" in text


def test_many_nodes_are_counted() -> None:
    nodes = tuple(machine().model_copy(update={"id": i}) for i in range(7))
    text = shown(Topology(nodes=nodes))
    assert text.count("host host-a") == 4
    assert "7 nodes" in text
    assert "… and 3 more nodes" in text


def test_names_are_no_markup() -> None:
    made = machine().model_copy(update={"hostname": "[bold]h[/nothing]"})
    assert "[bold]h[/nothing]" in shown(Topology(nodes=(made,)))


def test_the_matrix_is_as_nvidia_smis() -> None:
    rows = [line.split() for line in matrix(machine()).splitlines()]
    assert rows[:5] == [
        ["cuda0", "cuda1", "NIC0", "NIC1", "CPUs", "NUMA"],
        ["cuda0", "X", "NV18", "PIX", "SYS", "0-1", "0"],
        ["cuda1", "NV18", "X", "SYS", "PIX", "2-3", "1"],
        ["NIC0", "PIX", "SYS", "X", "SYS", "0-1", "0"],
        ["NIC1", "SYS", "PIX", "SYS", "X", "2-3", "1"],
    ]
    legend = matrix(machine())
    assert "NV#   # NVLinks" in legend
    assert "PXB" not in legend
    assert "NIC1: mlx5_1 (cx)" in legend
    assert "NIC2" not in legend, "Ethernet is left out"
    assert "NV" not in matrix(machine(nvlink=False))


def test_links_that_nobody_counted() -> None:
    links = tuple(
        FabricLink(kind="nvlink", ends=(f"cuda{i}", "switch"), gbs=450.0) for i in range(2)
    )
    made = machine().model_copy(update={"fabric": links})
    text = matrix(made)
    assert text.splitlines()[1].split()[:3] == ["cuda0", "X", "NVL"]
    assert "NVL   NVLinks, nobody knows how many" in text
    assert "2 accelerators with NVLink to switches, 450 GB/s" in shown(Topology(nodes=(made,)))


def test_the_matrix_of_nothing() -> None:
    assert matrix(node(numa=())) == "no accelerator and no RDMA NIC"


@pytest.mark.parametrize("nvlink", [True, False])
def test_the_picture_names_devices_and_colours_links(tmp_path: Path, nvlink: bool) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "topo.svg"
    picture.write(machine(nvlink), file)
    text = file.read_text()
    ElementTree.fromstring(text)
    for wanted in ("cuda0", "cuda1", "mlx5_0", "mlx5_1", "NUMA 0", "0001:01:00.0", "host-a"):
        assert f"<!-- {wanted} -->" in text, wanted
    assert "eth0" not in text
    assert ("scale-up switches" in text) is nvlink
    assert ("<!-- 450 -->" in text) is nvlink, "a tick of the scale of bandwidths"
    assert "<!-- 31.5 -->" in text


@pytest.mark.parametrize(
    "odd",
    [
        node(numa=()),
        node(),
        machine().model_copy(
            update={"fabric": (FabricLink(kind="hccs", ends=("cuda0", "cuda1"), count=1),)}
        ),
    ],
    ids=["nothing", "no device", "a bow"],
)
def test_odd_machines_can_be_drawn(tmp_path: Path, odd: Node) -> None:
    pytest.importorskip("matplotlib")
    picture.write(odd, tmp_path / "topo.png")
    assert (tmp_path / "topo.png").read_bytes().startswith(b"\x89PNG")


def run(*arguments: str) -> str:
    return commands.run(probe.command, *arguments)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    file = tmp_path / "t.json"
    file.write_text(Topology(nodes=(machine(),)).model_dump_json())
    return file


def test_json_of_a_file_has_the_keys_that_tools_rely_on(dump: Path) -> None:
    data = json.loads(run("--from", str(dump), "--json"))
    assert [a["id"] for a in data["accelerators"]] == ["cuda0", "cuda1"]
    assert [n["speed_gbps"] for n in data["nics"]] == [400.0] * 4
    assert data["affinity"]["cuda0"] == ["mlx5_0"]
    assert data["paths"]["cuda0"]["mlx5_0"]["class"] == "PIX"
    assert data["paths"]["cuda0"]["mlx5_0"]["bandwidth_gbps"] == 252.064
    assert data["paths"]["cuda1"]["mlx5_0"]["class"] == "SYS"
    assert data["p2p"] == {
        "cuda0": {
            "cuda1": {**data["p2p"]["cuda0"]["cuda1"], "class": "NVL", "bandwidth_gbps": 3600.0}
        },
        "cuda1": {
            "cuda0": {**data["p2p"]["cuda1"]["cuda0"], "class": "NVL", "bandwidth_gbps": 3600.0}
        },
    }


def test_ports_that_are_no_rails_are_nobodys(tmp_path: Path) -> None:
    """Two management ports, nearer to a GPU than any rail is to another one."""
    management = tuple(nic(8 + i, i, pcie_gbs=3.9, speed_gbps=None) for i in range(2))
    one = rails(8)
    file = tmp_path / "t.json"
    file.write_text(
        world(one.model_copy(update={"nics": (*management, *one.nics)})).model_dump_json()
    )
    data = json.loads(run("--from", str(file), "--json"))
    assert data["affinity"] == {f"cuda{i}": [f"mlx5_{i}"] for i in range(8)}


def test_matrix_and_tree_of_a_file(dump: Path) -> None:
    assert run("--from", str(dump), "--matrix").startswith("       cuda0  cuda1")
    assert "cuda0: H200" in run("--from", str(dump))


def test_a_plot_is_written_beside_the_report(dump: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json.loads(run("--from", str(dump), "--json", "--plot", str(tmp_path / "topo.svg")))
    assert (tmp_path / "topo.svg").stat().st_size > 1000


def test_what_cannot_be_asked_for(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="nothing beside --from"):
        run("--from", str(dump), "--sysfs-root", str(tmp_path))
    for name in ("topo.nonsense", "no/such/folder.svg"):
        with pytest.raises(ArgumentError, match=r"a file that can be written, \.svg"):
            run("--from", str(dump), "--plot", str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="pip install"):
        run("--from", str(dump), "--plot", str(tmp_path / "topo.svg"))


def test_several_nodes_are_not_merged_with_others(dump: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.json"
    nodes = tuple(machine().model_copy(update={"id": i}) for i in range(2))
    two.write_text(Topology(nodes=nodes).model_dump_json())
    with pytest.raises(ArgumentError, match="one node, to merge it with others"):
        run("--from", str(dump), "--from", str(two))
    data = json.loads(run("--from", str(two), "--json"))
    assert len(data["topology"]["nodes"]) == 2
    assert len(data["accelerators"]) == 2
    assert data["notes"][0]["message"].startswith("2 nodes are known; accelerators, nics")
