"""hwloc's own reading of the synthetic machines, where it is installed (`apt install hwloc-nox`)."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hwloc_tree import write_tree
from hypothesis import given, settings
from machines import Machine, devices, dgx
from machines import machines as any_machine

from mkernel.topology.discover import discover, read
from mkernel.topology.model import Accelerator, Nic, Node
from mkernel.topology.paths import NodePaths

LSTOPO = shutil.which("lstopo-no-graphics")
pytestmark = pytest.mark.skipif(LSTOPO is None, reason="lstopo is not installed")


def by_address(node: Node) -> dict[str | None, Accelerator | Nic]:
    return {device.pci: device for device in (*node.accelerators, *node.nics)}


def same(machine: Machine) -> None:
    """What hwloc writes of a tree, and what we read of it, is one machine."""
    assert LSTOPO is not None
    with TemporaryDirectory() as name:
        root, file = Path(name) / "tree", Path(name) / "machine.xml"
        write_tree(machine, root)
        every = ["--filter", "bridge:all", "--filter", "pci:all"]
        subprocess.run(
            [LSTOPO, "--input", root, "--if", "fsroot", "--of", "xml", *every, "-f", file],
            check=True,
            capture_output=True,
            timeout=120,
        )
        theirs, ours = read(file).topology.nodes[0], discover(root).topology.nodes[0]
    assert [part.id for part in theirs.numa] == [part.id for part in ours.numa]
    assert [part.cpus for part in theirs.numa] == [part.cpus for part in ours.numa]
    found, known = by_address(theirs), by_address(ours)
    assert len(found) == len(known) == len(devices(machine))
    their_paths, our_paths = NodePaths(theirs), NodePaths(ours)
    for one, device in known.items():
        for field in ("kind", "numa_node", "pci_path", "pcie_gbs"):
            assert getattr(found[one], field) == getattr(device, field), (one, field)
        for other in known:
            there = their_paths.between(found[one], found[other])
            here = our_paths.between(device, known[other])
            assert (there.kind, there.gbs) == (here.kind, here.gbs), (one, other)


def test_a_machine_of_switches() -> None:
    same(replace(dgx(), rates=False))


@settings(max_examples=10, deadline=None)
@given(any_machine)
def test_any_machine(machine: Machine) -> None:
    sockets = tuple(replace(socket, cpus=max(1, socket.cpus)) for socket in machine.sockets)
    same(replace(machine, sockets=sockets, rates=False, numa=True))
