"""The RDMA ports of a machine that are rails: those of the NIC backend's kind, without slow ones.

A big machine has more RDMA ports than rails: a management port, one for storage. Such a port as a
rail would hold up every message that is spread over it, and devices that speak another protocol
cannot reach the rails of other nodes at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mkernel.topology.defaults import defaults
from mkernel.topology.model import KindName, Nic, Node, Topology
from mkernel.topology.placement import usable_nics


class Rails(NamedTuple):
    """The rails, and the ids of the other usable ports by the reason why they are none."""

    kept: tuple[Nic, ...]
    left_out: Mapping[str, tuple[str, ...]]


def rate_gbs(nic: Nic) -> float | None:
    """Return what a port carries at most, as far as it is known: the lesser of its own rate and its
    PCIe link's."""
    known = [nic.speed_gbps / 8 if nic.speed_gbps else None, nic.pcie_gbs]
    return min((rate for rate in known if rate), default=None)


def fast(nics: Sequence[Nic]) -> Rails:
    """Leave out ports far below the fastest one; a port of unknown rate stays."""
    fastest = max((rate_gbs(nic) or 0.0 for nic in nics), default=0.0)
    least = defaults().rails.least_share
    slow = [nic for nic in nics if (rate_gbs(nic) or fastest) < least * fastest]
    left_out: dict[str, tuple[str, ...]] = {}
    for nic in slow:
        reason = f"{rate_gbs(nic):g} GB/s, under {least:g} of the {fastest:g} GB/s of others"
        left_out[reason] = (*left_out.get(reason, ()), nic.id)
    return Rails(tuple(nic for nic in nics if nic not in slow), left_out)


def of_kinds(nics: Sequence[Nic], backend: str, kinds: Collection[KindName]) -> Rails:
    """Return the ports that a NIC backend, which drives devices of these kinds, uses as rails."""
    left_out: dict[str, tuple[str, ...]] = {}
    for nic in nics:
        if nic.kind not in kinds:
            reason = f"{nic.kind} devices, which nic {backend!r} does not drive"
            left_out[reason] = (*left_out.get(reason, ()), nic.id)
    found = fast([nic for nic in nics if nic.kind in kinds])
    return Rails(found.kept, {**left_out, **found.left_out})


def most_served(nics: Sequence[Nic], kinds: Mapping[str, Collection[KindName]]) -> str | None:
    """Return the NIC backend that drives the machine's rails: most of their rate, then most ports,
    then the first by name. None: no backend drives any rail.

    Args:
        nics: usable ports. kinds: by backend, the kinds of devices that it drives.
    """
    rails = fast(nics).kept

    def served(name: str) -> tuple[float, int]:
        own = [nic for nic in rails if nic.kind in kinds[name]]
        return sum(rate_gbs(nic) or 0.0 for nic in own), len(own)

    best = max(sorted(kinds), key=served, default=None)
    return best if best is not None and served(best)[1] else None


def keep_rails(
    world: Topology, backend: str, kinds: Collection[KindName]
) -> tuple[Topology, tuple[str, ...]]:
    """Return the world whose nodes have a NIC backend's rails and no other real RDMA ports, and a
    sentence about each group of ports that were left out, once for all equal nodes. Ports that are
    down, plain Ethernet and emulated devices stay: they are never rails, and messages name them."""
    nodes: list[Node] = []
    said: dict[str, None] = {}
    for node in world.nodes:
        found = of_kinds(real_ports(node), backend, kinds)
        gone = {id_ for ids in found.left_out.values() for id_ in ids}
        nics = tuple(nic for nic in node.nics if nic.id not in gone)
        nodes.append(node.model_copy(update={"nics": nics}) if gone else node)
        said |= {
            f"{', '.join(ids)}: no rails: {reason}": None for reason, ids in found.left_out.items()
        }
    return Topology(nodes=tuple(nodes)), tuple(said)


def by_tcp(world: Topology) -> Topology:
    """Return the world with one port of TCP on each node in the place of its NICs: as fast as the
    fastest of those that run Ethernet, if any says so, and apart from devices' memory."""
    nodes = []
    for node in world.nodes:
        ethernet = [
            nic.speed_gbps
            for nic in node.nics
            if nic.active and (nic.kind == "ethernet" or nic.link_layer == "Ethernet")
        ]
        speed = max((each for each in ethernet if each), default=None)
        port = Nic(id="tcp0", kind="tcp", name="tcp0", speed_gbps=speed, gpudirect=False)
        nodes.append(node.model_copy(update={"nics": (port,)}))
    return Topology(nodes=tuple(nodes))


def rails(node: Node) -> tuple[Nic, ...]:
    """Return the node's usable NICs without those that cannot be rails for any backend."""
    slow = {id_ for ids in fast(real_ports(node)).left_out.values() for id_ in ids}
    return tuple(nic for nic in usable_nics(node) if nic.id not in slow)


def real_ports(node: Node) -> tuple[Nic, ...]:
    """Return the node's RDMA ports that are up, without emulated ones."""
    return tuple(nic for nic in usable_nics(node) if not nic.emulated)
