"""The choice of a route for every ordered pair of ranks, made once for all pairs of equal ends.

Inside a node bytes go over the scale-up fabric, or through host memory if devices do not reach each
other. Between nodes they go by the NICs that placement gave the ranks, rail to rail: a rail is the
n-th RDMA NIC of every node. If that is slower, or impossible, they go by the NICs of a neighbour (a
relay, as NCCL's PXN), and if a NIC cannot read a device's memory, through the host's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Literal, NamedTuple

from mkernel.errors import NoRoute
from mkernel.topology.cost import LinkConstants, transfer_us
from mkernel.topology.defaults import defaults
from mkernel.topology.kinds import NodeKinds, node_kinds
from mkernel.topology.model import FABRIC_SWITCH, Accelerator, Nic, Node, Topology
from mkernel.topology.placement import CLASSES, NodePaths, WorldPlacement, classify, usable_nics
from mkernel.topology.routes import Crossed, Ends, Rail, RouteClass, RouteTable, Way, pair_classes
from mkernel.topology.sources.chips import is_card
from mkernel.topology.sources.kinds import protocol

REFERENCE_BYTES = 1 << 20
"""The size in bytes of the message by whose time ways are compared."""

_FARTHEST_DIRECT = CLASSES.index("PXB")
"""The farthest path class of GPUDirect, which crosses PCIe switches, but not the host bridge."""


def routes(
    world: Topology | NodeKinds,
    placement: WorldPlacement,
    constants: LinkConstants,
    *,
    group: bool = False,
    detours: bool = True,
) -> RouteTable:
    """Return the routes of all ordered pairs.

    Args:
        group: a process group carries everything: inside a node at the rate of the devices' own
            way, between nodes at the constants' rate, or that of a NIC.
        detours: use relays wherever they are fastest; otherwise only if ranks have no NICs of their
            own that meet, because no backend relays today.

    Raises:
        NoRoute: a pair has no path; the message names both ends and what is missing.
    """
    kinds = node_kinds(world) if isinstance(world, Topology) else world
    sides = [_Side(node, placement, site, constants) for site, node in enumerate(kinds.prototypes)]
    like = [next(s for s, one in enumerate(sides) if one.equals(side)) for side in sides]
    known: dict[Ends, Way] = {}
    made = []
    for ends, pairs in pair_classes(placement).items():
        key = ends._replace(src_site=like[ends.src_site], dst_site=like[ends.dst_site])
        if key not in known:
            src, dst = sides[ends.src_site], sides[ends.dst_site]
            i, j = ends.src_local, ends.dst_local
            way: Way | None
            if group:
                way = _by_group(constants, src.inside(i, j) if ends.within else None)
            elif ends.within:
                way = src.inside(i, j)
            else:
                way = _between(src, i, dst, j, constants, detours=detours)
            if way is None:
                raise NoRoute(_missing(ends, placement, src, dst))
            known[key] = way
        made.append(RouteClass(**ends._asdict(), pairs=pairs, **dict(known[key])))
    return RouteTable(classes=tuple(made), egress_gbs=tuple(side.egress_gbs for side in sides))


def nic_gbs(nic: Nic, constants: LinkConstants) -> float:
    """Return the bandwidth of a NIC in GB/s: its port speed / 8, or the constants' if it is
    unknown; no more than was measured."""
    rated = nic.speed_gbps / 8 if nic.speed_gbps else constants.nic_gbs
    return min(rated, constants.nic_most_gbs or rated)


def _by_group(constants: LinkConstants, inside: Way | None) -> Way:
    """Return a process group's way. ``inside``: the way of the devices themselves, if both are on
    one node."""
    if inside is not None:
        return Way(
            kind="group",
            crosses=inside.crosses,
            over_pcie=inside.over_pcie,
            bandwidth_gbs=inside.bandwidth_gbs,
            latency_us=inside.latency_us,
        )
    own = constants.group_latency_us
    return Way(
        kind="group",
        bandwidth_gbs=constants.group_gbs
        or min(constants.nic_gbs, constants.nic_most_gbs or constants.nic_gbs),
        latency_us=constants.nic_latency_us if own is None else own,
    )


class _Access(NamedTuple):
    """The access of one NIC to one device's memory."""

    gbs: float
    staged: bool


class _Side:
    """Nodes of one site, as the ranks on them see their NICs and each other."""

    def __init__(
        self, node: Node, placement: WorldPlacement, site: int, constants: LinkConstants
    ) -> None:
        known = {one.id: one for one in node.accelerators}
        seats = placement.sites[site].seats
        self.node = node
        self._seats = [(seat.accelerator, seat.nics) for seat in seats]
        self.devices = [known[seat.accelerator] for seat in seats]
        self.usable = {nic.id: nic for nic in usable_nics(node)}
        self.nics = [[self.usable[name] for name in seat.nics] for seat in seats]
        self.rail = {
            nic.id: rail
            for rail, nic in enumerate(nic for nic in node.nics if nic.kind != "ethernet")
        }
        self._paths = NodePaths(node)
        self._constants = constants
        self._refused = {frozenset(pair) for pair in node.no_p2p}
        self._accesses: dict[tuple[int, str], _Access] = {}

    def equals(self, other: _Side) -> bool:
        """Return whether all routes from and to this side are the other's: nodes may differ in
        their CPUs."""
        mine, theirs = self.node, other.node
        return self._seats == other._seats and all(
            getattr(mine, name) == getattr(theirs, name)
            for name in ("accelerators", "nics", "bridges", "fabric", "fabric_known", "no_p2p")
        )

    def inside(self, i: int, j: int) -> Way:
        """Return the way between two local ranks."""
        constants = self._constants
        gbs = self.fabric_gbs(i, j)
        if gbs is None:
            return Way(
                kind="host",
                staged=("source", "destination"),
                bandwidth_gbs=min(constants.host_gbs, self._pcie_gbs(i, j) or constants.host_gbs),
                latency_us=constants.p2p_latency_us + constants.host_latency_us,
            )
        return Way(
            kind="p2p",
            crosses=tuple(self._crosses(i, j, gbs)),
            over_pcie=self._joined(self.devices[i], self.devices[j]) == "pcie",
            bandwidth_gbs=gbs,
            latency_us=constants.p2p_latency_us,
        )

    def fabric_gbs(self, i: int, j: int) -> float | None:
        """Return the rate between two local ranks' devices; None if they do not reach each other.

        Devices that no scale-up link joins reach each other over PCIe, at a modelled rate. If no
        source states what joins them, or how fast that is, the rate is the constants', or the
        default one.
        """
        one, other = self.devices[i], self.devices[j]
        if one.kind != other.kind or frozenset((one.id, other.id)) in self._refused:
            return None
        limits = [self._constants.p2p_gbs]
        usual, joined = defaults().fabric.gbs, self._joined(one, other)
        if joined == "pcie":
            limits = [self._pcie_gbs(i, j) or usual]
        elif joined != "unknown":
            limits += [link.gbs for link in self._paths.fabric(one, other)]
        if joined in ("switch", "unknown"):
            limits.append(self.egress_gbs)
        limits.append(self._constants.p2p_most_gbs)
        return min((gbs for gbs in limits if gbs), default=usual)

    def _joined(
        self, one: Accelerator, other: Accelerator
    ) -> Literal["link", "switch", "pcie", "unknown"]:
        """Return what joins two devices. PCIe does if a source that looked for scale-up links found
        none between them, or if both are cards, which have none without a bridge."""
        links = self._paths.fabric(one, other)
        if links:
            return "link" if len(links) == 1 else "switch"
        if one.emulated or other.emulated or classify(one, other) == "LOC":
            return "unknown"
        looked = bool(self.node.fabric) or self.node.fabric_known
        return "pcie" if looked or (is_card(one) and is_card(other)) else "unknown"

    def _crosses(self, i: int, j: int, gbs: float) -> Iterator[Crossed]:
        """Yield the links that the bytes of a pair cross, except the ports of a switch: the pair's
        own, or those of PCIe, each direction by itself."""
        one, other = self.devices[i], self.devices[j]
        joined = self._joined(one, other)
        if joined == "link":
            yield Crossed(name=f"{one.id} → {other.id}", gbs=gbs)
        if joined != "pcie":
            return
        found = self._over_pcie(i, j)
        if not found:
            yield Crossed(name=f"{one.id} PCIe up", gbs=gbs)
            yield Crossed(name=f"{other.id} PCIe down", gbs=gbs)
        yield from found

    def _over_pcie(self, i: int, j: int) -> tuple[Crossed, ...]:
        """Return the links of known rate that a pair crosses over PCIe, as fast as copies between
        devices are modelled on them: PCIe's own links carry a share of their rate."""
        one, other = self.devices[i], self.devices[j]
        path, usual = self._paths.between(one, other), defaults().paths
        through_host = CLASSES.index(path.kind) > _FARTHEST_DIRECT
        share = usual.pcie_share * (usual.host_bridge_share if through_host else 1.0)
        found = []
        for hop in path.hops:
            up, down = (hop.name in (device.pci, *device.pci_path) for device in (one, other))
            if hop.gbs is not None:
                way = " up" if up else " down" if down else ""
                gbs = round(hop.gbs * share, 3) if way else hop.gbs
                gbs = min(gbs, self._constants.p2p_most_gbs or gbs)
                found.append(Crossed(name=f"{hop.name}{way}", gbs=gbs))
        return tuple(found)

    def _pcie_gbs(self, i: int, j: int) -> float | None:
        """Return the rate of a pair over PCIe; None if no source states any."""
        return min((link.gbs for link in self._over_pcie(i, j)), default=None)

    @cached_property
    def egress_gbs(self) -> float | None:
        """The GB/s that a rank sends to all of its node together, if a switch joins some of them,
        or no source states what does."""
        pairs = combinations(self.devices, 2)
        if self.devices[1:] and all(self._joined(*pair) in ("link", "pcie") for pair in pairs):
            return None
        ports = [link.gbs for link in self.node.fabric if FABRIC_SWITCH in link.ends]
        limits = (*ports, self._constants.egress_gbs, self._constants.p2p_most_gbs)
        return min((gbs for gbs in limits if gbs), default=None)

    def access(self, i: int, nic: Nic) -> _Access:
        """Return how a NIC reaches the memory of a local rank's device."""
        key = (i, nic.id)
        if key not in self._accesses:
            gbs, staged = nic_gbs(nic, self._constants), _staged(self.devices[i], nic)
            path = self._paths.between(self.devices[i], nic).gbs
            limits = [gbs, *([path] if path else []), *([self._constants.host_gbs] * staged)]
            self._accesses[key] = _Access(min(limits), staged)
        return self._accesses[key]

    def supply(self, i: int) -> float:
        """Return what a local rank's own NICs carry together, at most."""
        return sum(self.access(i, nic).gbs for nic in self.nics[i])

    def neighbours(self, i: int) -> Iterator[int]:
        """Yield local ranks that can relay for ``i``: reached by the fabric, next to NICs of their
        own."""
        for q, own in enumerate(self.nics):
            if q != i and own and not self.access(q, own[0]).staged and self.fabric_gbs(i, q):
                yield q


def _staged(device: Accelerator, nic: Nic) -> bool:
    """Return whether bytes between them rest in host memory. Unknown positions count as near; an
    emulated NIC reaches host memory, and a device's only if it states that."""
    if device.kind == "cpu" or device.emulated:
        return False
    if nic.gpudirect is not None or nic.emulated:
        return not nic.gpudirect
    known = bool(device.pci_path and nic.pci_path)
    return known and CLASSES.index(classify(device, nic)) > _FARTHEST_DIRECT


def _between(
    src: _Side, i: int, dst: _Side, j: int, constants: LinkConstants, *, detours: bool
) -> Way | None:
    """Return the fastest way between two nodes, and among equally fast ones the first: own NICs, a
    relay at the source, a relay at the destination, and only if all of these fail, any NICs of the
    two nodes."""
    direct = _way(src, i, i, src.nics[i], dst, j, j, dst.nics[j], constants)
    if direct and not detours:
        return direct
    least_us = _time_us(direct) if direct else math.inf
    relay_us = constants.nic_latency_us + constants.p2p_latency_us + constants.signal_us
    relays = chain(
        ((q, j) for q in src.neighbours(i) if _rails(src, q) & _rails(dst, j)),
        ((i, q) for q in dst.neighbours(j) if _rails(src, i) & _rails(dst, q)),
    )
    found = [direct] if direct else []
    found += [
        way
        for via, to in relays
        if transfer_us(REFERENCE_BYTES, min(src.supply(via), dst.supply(to)), relay_us) < least_us
        and (way := _way(src, i, via, src.nics[via], dst, j, to, dst.nics[to], constants))
    ]
    found = found or list(_any_nics(src, i, dst, j, constants))
    return min(found, key=_time_us, default=None)


def _time_us(way: Way) -> float:
    return transfer_us(REFERENCE_BYTES, way.bandwidth_gbs, way.latency_us)


def _any_nics(src: _Side, i: int, dst: _Side, j: int, constants: LinkConstants) -> Iterator[Way]:
    for via in (i, *src.neighbours(i)):
        for to in (j, *dst.neighbours(j)):
            leaving = src.usable.values() if via == i else src.nics[via]
            arriving = dst.usable.values() if to == j else dst.nics[to]
            for out in leaving:
                for into in arriving:
                    way = _way(src, i, via, [out], dst, j, to, [into], constants)
                    if way is not None:
                        yield way


def _rails(side: _Side, local: int) -> set[int]:
    return {side.rail[nic.id] for nic in side.nics[local]}


def _way(
    src: _Side,
    i: int,
    via: int,
    leaving: Sequence[Nic],
    dst: _Side,
    j: int,
    to: int,
    arriving: Sequence[Nic],
    constants: LinkConstants,
) -> Way | None:
    """Return the way from ``i`` to ``j`` by NICs next to ``via`` and ``to``; None: these do not
    meet."""
    rails, crossed = [], False
    accesses = []
    for out, into in _matched(src, leaving, dst, arriving):
        cross = src.rail[out.id] != dst.rail[into.id]
        if _mismatch(out, into) or (cross and not constants.cross_rail_share):
            continue
        near, far = src.access(via, out), dst.access(to, into)
        gbs = min(near.gbs, far.gbs) * (constants.cross_rail_share if cross else 1.0)
        rails.append(Rail(src_nic=out.id, dst_nic=into.id, bandwidth_gbs=gbs))
        accesses.append((near, far))
        crossed |= cross
    if not rails:
        return None
    sides = (("source", 0), ("destination", 1))
    staged = tuple(name for name, end in sides if any(pair[end].staged for pair in accesses))
    hops = [
        side.fabric_gbs(*pair)
        for side, pair in ((src, (i, via)), (dst, (to, j)))
        if pair[0] != pair[1]
    ]
    if None in hops:
        return None
    fabric = min((gbs for gbs in hops if gbs), default=None)
    limits = [sum(rail.bandwidth_gbs for rail in rails)]
    for name, end in (("source", src.devices[via]), ("destination", dst.devices[to])):
        share = defaults().paths.pcie_share if name in staged else 1.0
        limits += [end.pcie_gbs * share] if end.pcie_gbs else []
    limits += [constants.host_gbs] * bool(staged) + ([fabric] if fabric else [])
    latency = constants.nic_latency_us + constants.cross_rail_latency_us * crossed
    latency += constants.host_latency_us * len(staged)
    latency += (constants.p2p_latency_us + constants.signal_us) * len(hops)
    fields: dict[str, Any] = {
        "kind": "relay" if hops else "nic",
        "rails": tuple(rails),
        "src_relay": via if via != i else None,
        "dst_relay": to if to != j else None,
        "staged": staged,
        "fabric_gbs": fabric,
        "bandwidth_gbs": min(limits),
        "latency_us": latency,
    }
    return Way(**fields)


def _matched(
    src: _Side, leaving: Sequence[Nic], dst: _Side, arriving: Sequence[Nic]
) -> Iterator[tuple[Nic, Nic]]:
    """Yield pairs of the same rail first, then the others in order, as far as both sides have NICs."""
    by_rail = {dst.rail[nic.id]: nic for nic in arriving}
    same = [(nic, by_rail[src.rail[nic.id]]) for nic in leaving if src.rail[nic.id] in by_rail]
    yield from same
    taken = {nic.id for _, nic in same}
    out = [nic for nic in leaving if src.rail[nic.id] not in by_rail]
    into = [nic for nic in arriving if nic.id not in taken]
    yield from zip(out, into, strict=False)


def _missing(ends: Ends, placement: WorldPlacement, src: _Side, dst: _Side) -> str:
    """Return a message that names both ends, by the first such pair, and what is missing."""
    here = placement.sites[ends.src_site].nodes[0][0]
    there = next(
        node
        for first, last in placement.sites[ends.dst_site].nodes
        for node in range(first, last + 1)
        if node != here
    )
    each = placement.ranks_per_node
    text = (
        f"rank {here * each + ends.src_local} (node {here}, {src.devices[ends.src_local].id}) has "
        f"no route to rank {there * each + ends.dst_local} (node {there}, "
        f"{dst.devices[ends.dst_local].id}): "
    )
    for number, side in ((here, src), (there, dst)):
        if not side.usable:
            return text + _why_no_nic(number, side.node)
    return text + (
        _mismatch(next(iter(src.usable.values())), next(iter(dst.usable.values())))
        or "no two of their NICs are on one rail, and the constants say that rails are not joined "
        "(cross_rail_share 0); use the same NICs on all nodes"
    )


def _why_no_nic(number: int, node: Node) -> str:
    if not node.nics:
        return (
            f"node {number} has no NIC; choose a NIC that is usable there (`mkernel doctor` lists "
            "them), or put all ranks on one node"
        )
    listed = ", ".join(
        f"{nic.id} is {'down' if not nic.active else 'plain Ethernet, without RDMA'}"
        for nic in node.nics
    )
    return f"node {number} has no active RDMA NIC ({listed}); bring one up, or use another NIC"


def _mismatch(one: Nic, other: Nic) -> str | None:
    if protocol(one.kind) != protocol(other.kind):
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
