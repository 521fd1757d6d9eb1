"""Worlds are made of the devices that a backend reports, not of all that the driver lists."""

from __future__ import annotations

from devices import gpu, node, world

from mkernel.machine import shown
from mkernel.topology.model import FabricLink
from mkernel.topology.reshape import oversubscribe

LISTED = tuple(gpu(i, pci=f"0000:0{i}:00.0") for i in range(4))


def test_hidden_devices_are_left_out_and_indices_are_the_backends() -> None:
    other = gpu(0, id="npu0", kind="ascend", pci="0000:09:00.0")
    reported = (gpu(0, pci="0000:02:00.0"), gpu(1, pci="0000:03:00.0"))
    left = shown(world(node((*LISTED, other))), reported).nodes[0].accelerators
    assert [(each.id, each.index) for each in left] == [("cuda2", 0), ("cuda3", 1), ("npu0", 0)]


def test_links_of_hidden_devices_are_left_out_so_that_ranks_can_share_the_others() -> None:
    fabric = tuple(
        FabricLink(kind="nvlink", ends=(one.id, "switch"), count=18, gbs=450) for one in LISTED
    )
    more = {"fabric": fabric, "no_p2p": (("cuda0", "cuda1"), ("cuda2", "cuda3"))}
    machine = world(node(LISTED).model_copy(update=more))
    left = shown(machine, (gpu(0, pci="0000:02:00.0"), gpu(1, pci="0000:03:00.0")))
    (shared,) = oversubscribe(left, 2).nodes
    assert {link.ends[0] for link in shared.fabric} == {"cuda2", "cuda3", "cuda2.1", "cuda3.1"}
    assert all({"cuda0", "cuda1"}.isdisjoint(pair) for pair in shared.no_p2p)


def test_nothing_is_left_out_where_the_backend_does_not_know_addresses() -> None:
    made = world(node(LISTED))
    assert shown(made, (gpu(0),)) == made
    assert shown(made, ()) == made
    assert shown(made, (gpu(0, emulated=True, pci="0000:02:00.0"),)) == made
