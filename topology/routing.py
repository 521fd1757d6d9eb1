"""A route for every ordered pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from mkernel.errors import NoRoute
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Nic, Node, Placement, Route, Topology

_FAMILIES = {"cx": "ib-verbs", "infiniband": "ib-verbs", "efa": "srd", "soft": "soft"}


def routes(
    topology: Topology, placement: Sequence[Placement], constants: MachineConstants
) -> tuple[Route, ...]:
    """Routes of all ordered pairs, by source rank, then destination rank.

    Inside a node bytes go ``p2p``; between nodes they leave by the source's best NIC and arrive at
    the destination's best NIC (one rail a rank).

    Raises:
        NoRoute: a pair has no path; the message names both ends and what is missing.
    """
    nics = {(node.id, nic.id): nic for node in topology.nodes for nic in node.nics}
    found = []
    for src in placement:
        for dst in placement:
            if src.rank == dst.rank:
                continue
            if src.node == dst.node:
                found.append(
                    Route(
                        src=src.rank,
                        dst=dst.rank,
                        kind="p2p",
                        bandwidth_gbs=constants.p2p_gbs,
                        latency_us=constants.p2p_latency_us,
                    )
                )
                continue
            for end in (src, dst):
                if not end.nics:
                    raise NoRoute(f"{_pair(src, dst)}: {_why_no_nic(topology.nodes[end.node])}")
            out, into = nics[src.node, src.nics[0]], nics[dst.node, dst.nics[0]]
            mismatch = _mismatch(out, into)
            if mismatch:
                raise NoRoute(f"{_pair(src, dst)}: {mismatch}")
            found.append(
                Route(
                    src=src.rank,
                    dst=dst.rank,
                    kind="nic",
                    src_nic=out.id,
                    dst_nic=into.id,
                    bandwidth_gbs=min(nic_gbs(out, constants), nic_gbs(into, constants)),
                    latency_us=constants.nic_latency_us,
                )
            )
    return tuple(found)


def nic_gbs(nic: Nic, constants: MachineConstants) -> float:
    """Bandwidth of a NIC in GB/s: its port speed / 8, or the constants' where it is unknown."""
    return nic.speed_gbps / 8 if nic.speed_gbps else constants.nic_gbs


def _pair(src: Placement, dst: Placement) -> str:
    return (
        f"rank {src.rank} (node {src.node}, {src.accelerator}) has no route to "
        f"rank {dst.rank} (node {dst.node}, {dst.accelerator})"
    )


def _why_no_nic(node: Node) -> str:
    if not node.nics:
        return (
            f"node {node.id} has no NIC; choose a NIC that is usable there (`mkernel doctor` lists "
            "them), or put all ranks on one node"
        )
    listed = ", ".join(
        f"{nic.id} is {'down' if not nic.active else 'plain Ethernet, without RDMA'}"
        for nic in node.nics
    )
    return f"node {node.id} has no active RDMA NIC ({listed}); bring one up, or use another NIC"


def _mismatch(one: Nic, other: Nic) -> str | None:
    if _FAMILIES.get(one.kind) != _FAMILIES.get(other.kind):
        return (
            f"NIC {one.id} ({one.kind}) and NIC {other.id} ({other.kind}) speak no common protocol"
        )
    layers = {one.link_layer, other.link_layer} - {None, "Unspecified"}
    if len(layers) > 1:
        return (
            f"NIC {one.id} runs {one.link_layer} and NIC {other.id} runs {other.link_layer}; "
            "both ports must use the same link layer"
        )
    return None
