"""Machines of the clouds: as the project describes them, and as their vendors published them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from machine_files import machine_file

from mkernel.probe.report import PathEntry, ProbeReport, report
from mkernel.topology.discover import read
from mkernel.topology.model import Node

KINDS = ("efa", "ethernet")


def probed(name: str, folder: Path) -> tuple[Node, ProbeReport]:
    seen = read(machine_file(name, folder))
    return seen.topology.nodes[0], report(seen)


def classes(entries: dict[str, dict[str, object]]) -> Counter[object]:
    return Counter(
        getattr(entry, "kind", None) for row in entries.values() for entry in row.values()
    )


@pytest.mark.parametrize("name", ["p5.hwloc", "p5.nccl", "hwloc-aws-p5.xml"])
def test_p5_each_gpu_has_the_four_efa_below_its_switch(name: str, tmp_path: Path) -> None:
    node, seen = probed(name, tmp_path)
    assert len(node.accelerators) == 8
    assert Counter(nic.kind for nic in node.nics) == {"efa": 32, "ethernet": 32}
    assert [len(part.cpus) for part in node.numa] == [48, 48]
    nics = {nic.id: nic for nic in node.nics}
    for gpu in node.accelerators:
        own = seen.affinity[gpu.id]
        assert len(own) == 4
        for nic in own:
            assert nics[nic].kind == "efa"
            assert nics[nic].pci_path[:3] == gpu.pci_path[:3], "below one switch"
            assert seen.paths[gpu.id][nic].kind == "PIX"
            assert seen.paths[gpu.id][nic].bandwidth_gbps == pytest.approx(126.03, abs=0.01)
    assert len({nic for own in seen.affinity.values() for nic in own}) == 32
    # Below each of the eight switches there are 8 NICs, 4 of them without RDMA.
    assert classes(seen.paths) == {"PIX": 8 * 8, "NODE": 8 * 24, "SYS": 8 * 32}
    assert classes(seen.p2p) == {"NODE": 8 * 3, "SYS": 8 * 4}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("p4d.nccl", "PIX"),
        ("p4d.hwloc", "PIX"),
        ("p4d-guest.hwloc", "PHB"),
        ("nccl-aws-p4d.xml", "PIX"),
        ("hwloc-aws-p4d.xml", "PHB"),
    ],
)
def test_p4d_two_gpus_share_an_efa(name: str, near: str, tmp_path: Path) -> None:
    """The virtual machine shows no switches: only Amazon's own file knows of them."""
    node, seen = probed(name, tmp_path)
    assert len(node.accelerators) == 8
    efa = [nic.id for nic in node.nics if nic.kind == "efa"]
    assert len(efa) == 4
    for index, gpu in enumerate(node.accelerators):
        assert seen.affinity[gpu.id] == (efa[index // 2],)
        assert seen.paths[gpu.id][efa[index // 2]].kind == near
    assert classes(seen.p2p) == {near: 8, "NODE": 16, "SYS": 32}


@pytest.mark.parametrize(
    ("name", "efa", "other"),
    [
        *((name, "rdmap79s0", "enp71s0") for name in ("p5.hwloc", "hwloc-aws-p5.xml")),
        *((name, "rdmap16s27", "ens32") for name in ("p4d-guest.hwloc", "hwloc-aws-p4d.xml")),
    ],
)
def test_nics_have_the_names_that_hwloc_gives_them(
    name: str, efa: str, other: str, tmp_path: Path
) -> None:
    node, _ = probed(name, tmp_path)
    first = {kind: next(nic.id for nic in node.nics if nic.kind == kind) for kind in KINDS}
    assert first == {"efa": efa, "ethernet": other}


@pytest.mark.parametrize(
    "names", [("p4d.nccl", "p4d-guest.hwloc"), ("nccl-aws-p4d.xml", "hwloc-aws-p4d.xml")]
)
def test_p4d_seen_twice_is_one_machine(names: tuple[str, str], tmp_path: Path) -> None:
    seen = read(*(machine_file(name, tmp_path) for name in names))
    (node,) = seen.topology.nodes
    assert (len(node.accelerators), len(node.nics)) == (8, 8)
    assert {entry.kind for entry in report(seen).p2p["cuda0"].values()} == {"PIX", "NODE", "SYS"}
    contradictions = [note.message for note in seen.notes if "an earlier source" in note.message]
    assert any("pcie_gbs is 31.508 here and 15.754" in message for message in contradictions)
    assert any("pci_path is ('pci0000:10',) here" in message for message in contradictions)


@pytest.mark.parametrize("name", ["ndv4.nccl", "nccl-azure-ndv4.xml"])
def test_ndv4_eight_gpus_have_eight_nics(name: str, tmp_path: Path) -> None:
    node, seen = probed(name, tmp_path)
    assert [gpu.pci for gpu in node.accelerators][:3] == [
        "0001:00:00.0",
        "0002:00:00.0",
        "0003:00:00.0",
    ]
    assert {nic.kind for nic in node.nics} == {"infiniband"}
    assert [len(part.cpus) for part in node.numa] == [24] * 4
    own = [seen.affinity[gpu.id] for gpu in node.accelerators]
    assert all(len(nics) == 1 for nics in own)
    assert len({nics[0] for nics in own}) == 8
    for gpu in node.accelerators:
        assert seen.paths[gpu.id][seen.affinity[gpu.id][0]].kind == "PIX"
    assert classes(seen.paths) == {"PIX": 16, "SYS": 48}


@pytest.mark.parametrize(
    "name",
    [
        *("p5.hwloc", "p5.nccl", "p4d.nccl", "p4d-guest.hwloc", "ndv4.nccl"),
        *("hwloc-aws-p5.xml", "hwloc-aws-p4d.xml", "nccl-aws-p4d.xml", "nccl-azure-ndv4.xml"),
    ],
)
def test_reports_round_trip(name: str, tmp_path: Path) -> None:
    seen = read(machine_file(name, tmp_path))
    printed = report(seen).model_dump_json(by_alias=True)
    file = tmp_path / "report.json"
    file.write_text(printed)
    assert read(file).topology == seen.topology
    assert ProbeReport.model_validate_json(printed) == report(seen)


def stands(node: Node) -> dict[str, tuple[object, ...]]:
    """The place of each device, by bus id."""
    return {
        str(each.pci): (each.id, each.numa_node, each.pcie_gbs)
        for each in (*node.accelerators, *node.nics)
    }


def ways(entries: dict[str, dict[str, PathEntry]]) -> dict[tuple[str, str], PathEntry]:
    """Each pair's path, without the addresses of bridges, which files name as they like."""
    return {
        (one, other): entry.model_copy(update={"hops": len(entry.hops)})
        for one, row in entries.items()
        for other, entry in row.items()
    }


@pytest.mark.parametrize(
    ("described", "published"),
    [
        ("p5.hwloc", "hwloc-aws-p5.xml"),
        ("p4d.nccl", "nccl-aws-p4d.xml"),
        ("p4d-guest.hwloc", "hwloc-aws-p4d.xml"),
        ("ndv4.nccl", "nccl-azure-ndv4.xml"),
    ],
)
def test_a_description_is_true(described: str, published: str, tmp_path: Path) -> None:
    """The same devices in the same places, and the same path between any two of them."""
    ours, own = probed(described, tmp_path)
    theirs, other = probed(published, tmp_path)
    assert stands(ours) == stands(theirs)
    assert [(part.id, part.cpus) for part in ours.numa] == [
        (part.id, part.cpus) for part in theirs.numa
    ]
    assert (ways(own.p2p), ways(own.paths)) == (ways(other.p2p), ways(other.paths))
    assert own.affinity == other.affinity
