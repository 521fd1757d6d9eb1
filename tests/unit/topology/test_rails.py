"""Which RDMA ports are rails: by kind, by rate; on machines that have others beside them."""

from __future__ import annotations

from pathlib import Path

import machines
import pytest
from machines import Device, Link, Machine, Socket, Switch

from mkernel.topology.model import KindName, Nic, Node, Topology
from mkernel.topology.placement import place
from mkernel.topology.rails import fast, keep_rails, most_served, rate_gbs, real_ports

KINDS: dict[str, tuple[KindName, ...]] = {
    "cx7": ("cx", "infiniband", "soft"),
    "efa": ("efa", "soft"),
}
FULL, SLIVER = Link(32.0, 16), Link(32.0, 1)
"""The rates of a rail and of a management port, a sixteenth of it."""


def nic(
    id_: str, kind: KindName = "cx", gbps: float | None = 400, pcie: float | None = None
) -> Nic:
    return Nic(id=id_, kind=kind, name=id_, speed_gbps=gbps, pcie_gbs=pcie)


def with_management_ports() -> Machine:
    """Eight GPUs, each with an EFA rail; two InfiniBand ports of a sixteenth of their PCIe rate, nearer
    to the first GPU of each socket than any rail is to another GPU."""
    pair = Switch((Device("gpu", FULL), Device("efa", FULL)))
    first = Switch((Device("gpu", FULL), Device("infiniband", SLIVER), Device("efa", FULL)))
    return Machine((Socket((first, pair, pair, pair), cpus=32),) * 2, nvlinks=18, rates=False)


def test_a_rate_is_the_narrower_of_port_and_pcie() -> None:
    assert rate_gbs(nic("a")) == 50
    assert rate_gbs(nic("a", pcie=16.0)) == 16
    assert rate_gbs(nic("a", gbps=None, pcie=63.0)) == 63
    assert rate_gbs(nic("a", gbps=None)) is None


@pytest.mark.parametrize(
    ("slow", "kept"),
    [(nic("s", gbps=99), False), (nic("s", gbps=100), True), (nic("s", gbps=None), True)],
)
def test_ports_far_below_the_fastest_are_left_out(slow: Nic, kept: bool) -> None:
    found = fast([nic("a"), nic("b"), slow])
    assert [each.id for each in found.kept] == ["a", "b", *["s"] * kept]
    assert list(found.left_out.values()) == ([] if kept else [("s",)])
    for reason in found.left_out:
        assert "12.375 GB/s, under 0.25 of the 50 GB/s of others" in reason


def test_slow_ports_alone_are_rails() -> None:
    assert len(fast([nic("a", gbps=10), nic("b", gbps=10)]).kept) == 2
    assert fast([]) == ((), {})


@pytest.mark.parametrize("how", ["nccl", "hwloc", "sysfs"])
def test_management_ports_are_nobodys_rails(how: str, tmp_path: Path) -> None:
    seen = machines.found(with_management_ports(), how, tmp_path)
    ports = real_ports(seen.topology.nodes[0])
    assert sorted(port.kind for port in ports) == ["efa"] * 8 + ["infiniband"] * 2
    assert most_served(ports, KINDS) == "efa"
    assert any(note.source == "rails" and "qib0, qib1" in note.message for note in seen.notes)
    world, said = keep_rails(seen.topology, "efa", KINDS["efa"])
    assert {nic.kind for nic in world.nodes[0].nics} == {"efa"}
    assert said == ("qib0, qib1: no rails: infiniband devices, which nic 'efa' does not drive",)
    (site,) = place(world, 8).sites
    assert [len(seat.nics) for seat in site.seats] == [1] * 8
    assert len({seat.nics for seat in site.seats}) == 8


def test_slow_ports_of_the_rails_own_kind_are_left_out() -> None:
    node = Node(
        id=0, hostname="h", numa=(),
        nics=(nic("m0", gbps=25), *(nic(f"r{i}") for i in range(4)), nic("e0", "ethernet", 100)),
    )  # fmt: skip
    world, said = keep_rails(Topology(nodes=(node,)), "cx7", KINDS["cx7"])
    assert [each.id for each in world.nodes[0].nics] == ["r0", "r1", "r2", "r3", "e0"]
    assert said == ("m0: no rails: 3.125 GB/s, under 0.25 of the 50 GB/s of others",)
    same, nothing = keep_rails(world, "cx7", KINDS["cx7"])
    assert (same, nothing) == (world, ())


def test_the_backend_follows_the_rails() -> None:
    assert most_served([nic("a", "cx")], KINDS) == "cx7"
    assert most_served([nic("a", "efa", None), nic("b", "cx", None)], KINDS) == "cx7", "by name"
    assert (
        most_served([nic("a", "efa", None), nic("b", "efa", None), nic("c", gbps=None)], KINDS)
        == "efa"
    )
    assert most_served([nic("a", "efa", 100), nic("b", "cx", 200)], KINDS) == "cx7"
    assert most_served([], KINDS) is None
    assert most_served([nic("a", "cx")], {"efa": ("efa",)}) is None
