"""Devices of sysfs' PCI tree: what drivers do not list, and what they must not add."""

from __future__ import annotations

from pathlib import Path

import pytest
from sysfs_tree import SysfsTree

from mkernel.topology import discover as discovery
from mkernel.topology.discover import discover
from mkernel.topology.model import Accelerator
from mkernel.topology.sources import nvml, pci
from mkernel.topology.sources.findings import Findings

SPEED = ("16.0 GT/s PCIe", "16")


def gpu(tree: SysfsTree, path: str, **more: str) -> Path:
    return tree.pci(path, vendor="0x10de\n", class_="0x030200\n", device="0x2330\n", **more)


def test_accelerators_with_bridges_and_rates(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    gpu(tree, "pci0000:40/0000:40:01.0/0000:41:00.0", link=SPEED)
    gpu(tree, "pci0000:38/0000:38:01.0/0000:39:00.0", link=("32.0 GT/s PCIe", "16"))
    found = pci.read_tree(tmp_path)
    assert [(a.id, a.pci, a.name, a.pcie_gbs) for a in found.accelerators] == [
        ("cuda0", "0000:39:00.0", "10de:2330", 63.015),
        ("cuda1", "0000:41:00.0", "10de:2330", 31.508),
    ]
    assert [(b.id, b.pcie_gbs) for b in found.bridges] == [
        ("0000:38:01.0", 63.015),
        ("0000:40:01.0", 31.508),
    ]


def test_links_of_gpus_that_idle_count_at_full_speed_and_those_of_nics_as_they_are(
    tmp_path: Path,
) -> None:
    tree = SysfsTree(tmp_path)
    idle = gpu(tree, "pci0000:40/0000:40:01.0/0000:41:00.0", link=SPEED)
    slow = tree.pci("pci0000:00/0000:00:05.0/0000:05:00.0", class_="0x020000\n", link=SPEED)
    (slow / "net/eth0").mkdir(parents=True)
    for function in (idle, slow):
        (function / "current_link_speed").write_text("2.5 GT/s PCIe\n")
    found = pci.read_tree(tmp_path)
    assert [one.pcie_gbs for one in found.accelerators] == [31.508]
    assert [one.pcie_gbs for one in found.nics] == [4.0]


@pytest.mark.parametrize("interfaces", ["net", "virtio1/net"])
def test_ethernet_with_its_rate(tmp_path: Path, interfaces: str) -> None:
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:05.0", class_="0x020000\n", vendor="0x1af4\n")
    for name, speed in (("eth0", "25000\n"), ("eth1", "-1\n")):
        (function / interfaces / name).mkdir(parents=True)
        (function / interfaces / name / "speed").write_text(speed)
    (function / interfaces / "eth2").mkdir()
    assert [(n.id, n.kind, n.speed_gbps) for n in pci.read_tree(tmp_path).nics] == [
        ("eth0", "ethernet", 25.0),
        ("eth1", "ethernet", None),
        ("eth2", "ethernet", None),
    ]


def test_a_card_with_rdma_is_listed_once(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:05.0", class_="0x020000\n")
    (function / "net/ens1").mkdir(parents=True)
    tree.rdma("mlx5_0", function)
    assert [n.id for n in discover(tmp_path).topology.nodes[0].nics] == ["mlx5_0"]


def test_odd_files_are_survived(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    for number, text in enumerate(["", "zzz", "-1", "0x", "9" * 5000, "\x00"]):
        tree.pci(
            f"pci0000:00/0000:00:0{number}.0", class_=text, vendor=text, device=text, numa=text
        )
    gpu(tree, "pci0000:00/0000:00:0a.0", numa="x")
    found = pci.read_tree(tmp_path)
    assert [(a.id, a.numa_node, a.pcie_gbs) for a in found.accelerators] == [("cuda0", None, None)]
    assert "numa_node holds 'x'" in found.notes[0].message


def test_on_a_live_machine_only_what_a_driver_reports_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, sysfs shows GPUs that belong to others."""
    tree = SysfsTree(tmp_path)
    gpu(tree, "pci0000:38/0000:38:01.0/0000:39:00.0", link=SPEED)
    gpu(tree, "pci0000:40/0000:40:01.0/0000:41:00.0", link=SPEED)
    own = Accelerator(id="cuda0", kind="cuda", name="H100", index=0, pci="0000:41:00.0")
    monkeypatch.setattr(discovery, "_REAL_ROOT", tmp_path)
    monkeypatch.setattr(nvml, "read", lambda _root: Findings("nvml", accelerators=(own,)))
    found = discover(tmp_path)
    (node,) = found.topology.nodes
    assert [(a.id, a.pci, a.pcie_gbs) for a in node.accelerators] == [
        ("cuda0", "0000:41:00.0", 31.508)
    ]
    assert "cuda device 0000:39:00.0 is there, but no driver reports it; left out" in [
        note.message for note in found.notes
    ]


def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.pci("pci0000:00/0000:00:05.0")
    tree.pci("pci0000:00/0000:00:06.0", vendor="0x1002\n", class_="0x030000\n", device="0x515e\n")
    tree.pci("pci0000:00/0000:00:07.0", vendor="0x1002\n", class_="0x030000\n", device="0x66a1\n")
    tree.pci("pci0000:00/0000:00:08.0", vendor="0x1a03\n", class_="0x030000\n", device="0x2000\n")
    found = pci.read_tree(tmp_path)
    assert [(one.kind, one.pci) for one in found.accelerators] == [("rocm", "0000:00:07.0")]
    assert [note.message.partition(", ")[0] for note in found.notes] == [
        "0000:00:06.0: 1002:515e",
        "1 PCI functions without a class",
    ]
