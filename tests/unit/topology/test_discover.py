from __future__ import annotations

from pathlib import Path

import pytest
from devices import SIM, SOFT, node, world
from sysfs_tree import SysfsTree

from mkernel.errors import ArgumentError, InputFileError
from mkernel.topology.discover import discover, load
from mkernel.topology.model import Topology


def recorded(tmp_path: Path) -> SysfsTree:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0-3")
    tree.write("proc/sys/kernel/hostname", "node-a\n")
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:00:05.0", numa="0"))
    return tree


def test_a_recorded_machine(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = discover(tmp_path, accelerators=[SIM], nics=[SOFT])
    (one,) = found.topology.nodes
    assert (one.hostname, one.cpus) == ("node-a", (0, 1, 2, 3))
    assert [a.id for a in one.accelerators] == ["ascend-sim0"]
    assert [n.id for n in one.nics] == ["mlx5_0", "soft0"]
    assert Topology.model_validate_json(found.topology.model_dump_json()) == found.topology


def test_nothing_at_all_is_still_a_machine(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    found = discover(tmp_path)
    assert found.topology.nodes[0].hostname == "unknown"
    assert {note.source for note in found.notes} == {"sysfs cpu", "sysfs infiniband"}


def test_a_root_without_sys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="root"):
        discover(tmp_path)


def test_this_machine_does_not_crash() -> None:
    assert discover(accelerators=[SIM], nics=[SOFT]).topology.nodes[0].cpus


def test_load_takes_a_topology_or_a_probe_report(tmp_path: Path) -> None:
    topology = world(node((SIM,)))
    for text in (topology.model_dump_json(), f'{{"topology": {topology.model_dump_json()}}}'):
        (tmp_path / "t.json").write_text(text)
        assert load(tmp_path / "t.json") == topology


def test_load_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        load(tmp_path / "gone.json")
