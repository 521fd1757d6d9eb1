"""Worlds are made of the devices that a backend reports, not of all that the driver lists."""

from __future__ import annotations

from mkernel.machine import shown
from mkernel.topology.model import Accelerator, Node, NumaNode, Topology


def gpu(index: int, pci: str) -> Accelerator:
    return Accelerator(id=f"cuda{index}", kind="cuda", name="GPU", index=index, pci=pci)


def machine(*accelerators: Accelerator) -> Topology:
    numa = (NumaNode(id=0, cpus=(0, 1)),)
    return Topology(
        nodes=(Node(id=0, hostname="here", numa=numa, accelerators=accelerators, nics=()),)
    )


LISTED = tuple(gpu(i, f"0000:0{i}:00.0") for i in range(4))


def test_hidden_devices_are_left_out_and_indices_are_the_backends() -> None:
    other = Accelerator(id="npu0", kind="ascend", name="NPU", index=0, pci="0000:09:00.0")
    reported = (gpu(0, "0000:02:00.0"), gpu(1, "0000:03:00.0"))
    left = shown(machine(*LISTED, other), reported).nodes[0].accelerators
    assert [(each.id, each.index) for each in left] == [("cuda2", 0), ("cuda3", 1), ("npu0", 0)]


def test_nothing_is_left_out_where_the_backend_does_not_know_addresses() -> None:
    plain = Accelerator(id="cuda0", kind="cuda", name="GPU", index=0)
    made = machine(*LISTED)
    assert shown(made, (plain,)) == made
    assert shown(made, ()) == made
    prototype = plain.model_copy(update={"emulated": True, "pci": "0000:02:00.0"})
    assert shown(made, (prototype,)) == made
