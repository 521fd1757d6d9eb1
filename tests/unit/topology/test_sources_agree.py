"""The same machine is the same, whoever describes it, and what is known of its shape is found."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import (
    Device,
    Link,
    Machine,
    Socket,
    Switch,
    devices,
    dgx,
    expected,
    found,
    nccl_xml,
)
from machines import machines as any_machine

from mkernel.probe.report import ProbeReport, report
from mkernel.topology.discover import load, read
from mkernel.topology.model import Accelerator, Nic, Node, Topology
from mkernel.topology.placement import NodePaths, assign_nics, usable_nics

FORMATS = ("nccl", "hwloc", "sysfs")


def node_of(machine: Machine, how: str) -> Node:
    with TemporaryDirectory() as folder:
        return found(machine, how, Path(folder)).topology.nodes[0]


def by_name(node: Node) -> dict[str, Accelerator | Nic]:
    return {device.id: device for device in (*node.accelerators, *node.nics)}


def without_rates(machine: Machine) -> Machine:
    return Machine(machine.sockets, machine.nvlinks, machine.numa, rates=False)


@settings(max_examples=25, deadline=None)
@given(any_machine, st.sampled_from(FORMATS))
def test_every_device_and_every_path_is_what_the_machine_was_made_of(
    machine: Machine, how: str
) -> None:
    if how == "hwloc":
        machine = without_rates(machine)  # the format has none
    node = node_of(machine, how)
    devices_found = by_name(node)
    made = devices(machine)
    assert set(devices_found) == set(made)
    between = NodePaths(node).between
    for one in node.accelerators:
        for other in devices_found.values():
            if one is not other:
                path = between(one, other)
                kind, gbs = expected(machine, one.id, other.id)
                assert path.kind == kind, (one.id, other.id)
                assert path.gbs == pytest.approx(gbs, abs=2e-3), (one.id, other.id)


@settings(max_examples=15, deadline=None)
@given(any_machine.map(without_rates))
def test_nccl_hwloc_and_sysfs_give_the_same_affinity_and_the_same_paths(machine: Machine) -> None:
    answers = []
    for how in FORMATS:
        node = node_of(machine, how)
        between = NodePaths(node).between
        affinity = assign_nics(node.accelerators, usable_nics(node))
        answers.append(
            (
                {name: (device.kind, device.pci) for name, device in by_name(node).items()},
                {name: [nic.id for nic in nics] for name, nics in affinity.items()},
                {
                    (one.id, other.id): (
                        between(one, other).kind,
                        between(one, other).gbs,
                        between(one, other).latency_us,
                        len(between(one, other).hops),
                    )
                    for one in node.accelerators
                    for other in by_name(node).values()
                },
            )
        )
    assert answers[0] == answers[1]
    assert answers[1] == answers[2]


@settings(max_examples=25, deadline=None)
@given(any_machine)
def test_paths_are_the_same_both_ways(machine: Machine) -> None:
    node = node_of(machine, "nccl")
    between = NodePaths(node).between
    for one in by_name(node).values():
        for other in by_name(node).values():
            there, back = between(one, other), between(other, one)
            assert (there.kind, there.gbs) == (back.kind, back.gbs)
            assert there.latency_us == pytest.approx(back.latency_us)
            assert [hop.gbs for hop in there.hops] == [hop.gbs for hop in reversed(back.hops)]


@settings(max_examples=25, deadline=None)
@given(any_machine, st.sampled_from(FORMATS))
def test_json_round_trips_exactly(machine: Machine, how: str) -> None:
    with TemporaryDirectory() as folder:
        there = found(machine, how, Path(folder))
        file = Path(folder) / "t.json"
        file.write_text(there.topology.model_dump_json())
        assert load(file) == there.topology
        printed = report(there).model_dump_json(indent=2, by_alias=True)
        file.write_text(printed)
        assert load(file) == there.topology
        again = ProbeReport.model_validate_json(printed)
        assert again == report(there)
        assert again.model_dump_json(indent=2, by_alias=True) == printed


@settings(max_examples=30, deadline=None)
@given(any_machine)
def test_several_sources_of_one_machine_are_one_machine(machine: Machine) -> None:
    machine = without_rates(machine)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for how in ("nccl", "hwloc"):
            found(machine, how, folder)
        files = [folder / "hwloc.xml", folder / "nccl.xml"]
        alone = read(files[0]).topology.nodes[0]
        both_ways = [read(*files), read(*reversed(files))]
    for whole in both_ways:
        (node,) = whole.topology.nodes
        assert [one.id for one in node.accelerators] == [one.id for one in alone.accelerators]
        assert [one.pci_path for one in node.nics] == [one.pci_path for one in alone.nics]
        assert [note.message for note in whole.notes if "earlier" in note.message] == []


def test_a_planted_difference_is_a_contradiction(tmp_path: Path) -> None:
    machine = Machine((Socket((Switch((Device("gpu"), Device("cx"))),)),))
    slower = Machine((Socket((Switch((Device("gpu", Link(8.0, 16)), Device("cx"))),)),))
    found(machine, "hwloc", tmp_path)
    found(slower, "nccl", tmp_path)
    whole = read(tmp_path / "hwloc.xml", tmp_path / "nccl.xml")
    assert [note.message for note in whole.notes if "earlier" in note.message] == [
        "cuda0: pcie_gbs is 15.754 here and 63.015 in an earlier source; the earlier is kept"
    ]
    assert whole.topology.nodes[0].accelerators[0].pcie_gbs == 63.015


def test_nvlink_is_nearer_than_any_pcie(tmp_path: Path) -> None:
    node = found(dgx(), "nccl", tmp_path).topology.nodes[0]
    path = NodePaths(node).between(node.accelerators[0], node.accelerators[7])
    assert (path.kind, path.gbs) == ("NVL", 450.0)
    assert [hop.name for hop in path.hops] == ["nvlink cuda0-switch", "nvlink cuda7-switch"]
    bare = found(dgx(nvlinks=0), "nccl", tmp_path).topology.nodes[0]
    assert NodePaths(bare).between(bare.accelerators[0], bare.accelerators[7]).kind == "SYS"


def test_a_topology_of_several_hosts_keeps_them_apart(tmp_path: Path) -> None:
    text = nccl_xml(dgx())
    body = text.removeprefix('<system version="1">').removesuffix("</system>")
    first, second = (body.replace("<cpu ", f'<cpu host_hash="0x{n}" ') for n in (1, 2))
    file = tmp_path / "two.xml"
    file.write_text(f'<system version="1">{first}{second}</system>')
    topology = load(file)
    assert [node.id for node in topology.nodes] == [0, 1]
    assert all(len(node.accelerators) == len(node.nics) == 8 for node in topology.nodes)
    assert Topology.model_validate_json(topology.model_dump_json()) == topology
