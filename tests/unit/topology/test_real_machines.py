"""Machines as their vendors published them, where the files lie beside the project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mkernel.probe.report import ProbeReport, report
from mkernel.topology.discover import Discovery, read
from mkernel.topology.model import Node

FOLDER = Path(__file__).parents[4] / "shared/topologies"


def found(*names: str) -> Discovery:
    files = [FOLDER / name for name in names]
    for file in files:
        if not file.exists():
            pytest.skip(f"{file.name} is not here: published machines are not part of the project")
    return read(*files)


def probed(name: str) -> tuple[Node, ProbeReport]:
    seen = found(name)
    return seen.topology.nodes[0], report(seen)


def classes(entries: dict[str, dict[str, object]]) -> Counter[object]:
    return Counter(
        getattr(entry, "kind", None) for row in entries.values() for entry in row.values()
    )


def test_p5_each_gpu_has_the_four_efa_below_its_switch() -> None:
    node, seen = probed("hwloc-aws-p5.xml")
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
    ("name", "near"), [("nccl-aws-p4d.xml", "PIX"), ("hwloc-aws-p4d.xml", "PHB")]
)
def test_p4d_two_gpus_share_an_efa(name: str, near: str) -> None:
    """The virtual machine shows no switches: only Amazon's own file knows of them."""
    node, seen = probed(name)
    assert len(node.accelerators) == 8
    efa = [nic.id for nic in node.nics if nic.kind == "efa"]
    assert len(efa) == 4
    for index, gpu in enumerate(node.accelerators):
        assert seen.affinity[gpu.id] == (efa[index // 2],)
        assert seen.paths[gpu.id][efa[index // 2]].kind == near
    assert classes(seen.p2p) == {near: 8, "NODE": 16, "SYS": 32}


def test_p4d_seen_twice_is_one_machine() -> None:
    seen = found("nccl-aws-p4d.xml", "hwloc-aws-p4d.xml")
    (node,) = seen.topology.nodes
    assert (len(node.accelerators), len(node.nics)) == (8, 8)
    assert {entry.kind for entry in report(seen).p2p["cuda0"].values()} == {"PIX", "NODE", "SYS"}
    contradictions = [note.message for note in seen.notes if "an earlier source" in note.message]
    assert any("pcie_gbs is 31.508 here and 15.754" in message for message in contradictions)
    assert any("pci_path is ('pci0000:10',) here" in message for message in contradictions)


def test_ndv4_eight_gpus_have_eight_nics() -> None:
    node, seen = probed("nccl-azure-ndv4.xml")
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
    ["hwloc-aws-p5.xml", "hwloc-aws-p4d.xml", "nccl-aws-p4d.xml", "nccl-azure-ndv4.xml"],
)
def test_reports_round_trip(name: str, tmp_path: Path) -> None:
    seen = found(name)
    printed = report(seen).model_dump_json(by_alias=True)
    file = tmp_path / "report.json"
    file.write_text(printed)
    assert read(file).topology == seen.topology
    assert ProbeReport.model_validate_json(printed) == report(seen)
