"""Placement of ranks: rank → node and accelerator, accelerator → NICs, proxy thread → CPUs.

The nearest NIC is the one on the best path. Path classes are as NCCL names them: ``LOC`` same device,
``PIX`` at most one PCIe switch between, ``PXB`` several, ``PHB`` through the host bridge, ``NODE``
between host bridges of one NUMA node, ``SYS`` across NUMA nodes. Scale-up links have classes of their
own (:data:`mkernel.topology.sources.kinds.FABRIC_CLASSES`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from pydantic import Field, model_validator

from mkernel.errors import ArgumentError
from mkernel.topology.defaults import defaults
from mkernel.topology.kinds import NodeKinds, Spans, node_kinds
from mkernel.topology.model import (
    FABRIC_SWITCH,
    Accelerator,
    FabricLink,
    Many,
    Model,
    Name,
    Nic,
    Node,
    Topology,
)
from mkernel.topology.sources import kinds

PathClass = str
_OVER_FABRIC = tuple(dict.fromkeys(kinds.FABRIC_CLASSES.values()))
CLASSES: tuple[PathClass, ...] = ("LOC", *_OVER_FABRIC, "PIX", "PXB", "PHB", "NODE", "SYS")
"""The known path classes, best first."""


class Hop(NamedTuple):
    """One part of a path: a link, or what joins two links (``gbs`` None: it sets no limit)."""

    name: str
    gbs: float | None
    latency_us: float


class DevicePath(NamedTuple):
    """The path between two devices of a node, in one direction.

    ``gbs`` in GB/s is the narrowest link of known rate; None if no rate is known. Hops of PCIe are
    named by the address of the function whose link it is, a NIC's port by the NIC's id.
    """

    kind: PathClass
    hops: tuple[Hop, ...]

    @property
    def gbs(self) -> float | None:
        return min((hop.gbs for hop in self.hops if hop.gbs is not None), default=None)

    @property
    def latency_us(self) -> float:
        return sum(hop.latency_us for hop in self.hops)


class NodePaths:
    """The paths between the devices of one node, NICs' ports included."""

    def __init__(self, node: Node) -> None:
        self._bridges = {bridge.id: bridge.pcie_gbs for bridge in node.bridges}
        self._fabric = {frozenset(link.ends): link for link in node.fabric}

    def between(self, one: Accelerator | Nic, other: Accelerator | Nic) -> DevicePath:
        """Return the best path of a pair. Bytes to or from a NIC cross its port, too."""
        kind = classify(one, other)
        fabric = self.fabric(one, other) if kind != "LOC" else ()
        if fabric:
            return DevicePath(
                kinds.fabric_class(fabric[0].kind),
                tuple(
                    Hop(f"{link.kind} {'-'.join(link.ends)}", link.gbs, defaults().paths.fabric_us)
                    for link in fabric
                ),
            )
        return DevicePath(
            kind,
            (*_port(one), *(self._over_pcie(one, other) if kind != "LOC" else ()), *_port(other)),
        )

    def fabric(self, one: Accelerator | Nic, other: Accelerator | Nic) -> tuple[FabricLink, ...]:
        """Return the scale-up links that the bytes of a pair cross: one, or two with a switch
        between. Empty if there are none; other accelerators do not pass bytes on."""
        if isinstance(one, Nic) or isinstance(other, Nic):
            return ()
        direct = self._fabric.get(frozenset((one.id, other.id)))
        if direct is not None:
            return (direct,)
        up, down = (self._fabric.get(frozenset((a.id, FABRIC_SWITCH))) for a in (one, other))
        return (up, down) if up and down and up.kind == down.kind else ()

    def _over_pcie(self, one: Accelerator | Nic, other: Accelerator | Nic) -> list[Hop]:
        shared = _shared(one, other)
        return [
            *self._links(one, shared),
            _turn(one, other, shared),
            *reversed(self._links(other, shared)),
        ]

    def _links(self, device: Accelerator | Nic, shared: int) -> list[Hop]:
        """Return the links from the device up to, but not including, those that it shares with the
        other."""
        if device.pci is None:
            return []
        pcie_us = defaults().paths.pcie_us
        first = max(shared, 1)  # host bridges have no link of their own
        return [
            Hop(device.pci, device.pcie_gbs, pcie_us),
            *(
                Hop(bridge, self._bridges.get(bridge), pcie_us)
                for bridge in reversed(device.pci_path[first:])
            ),
        ]


def classify(one: Accelerator | Nic, other: Accelerator | Nic) -> PathClass:
    """Return the path class of a pair in one node by PCIe and NUMA alone.

    If PCI positions are unknown, the NUMA nodes decide; if those are unknown too, the pair counts
    as ``NODE``: unknown devices are all equally near, so that sharing stays balanced.
    """
    if one.pci is not None and one.pci == other.pci:
        return "PIX" if _two_chips(one, other) else "LOC"
    if one == other:
        return "LOC"
    shared = _shared(one, other)
    if shared > 1:
        # A switch appears as one upstream bridge (shared) and one downstream bridge per device, so
        # one further bridge on each side is still the same switch.
        below = max(len(one.pci_path), len(other.pci_path)) - shared
        return "PIX" if below <= 1 else "PXB"
    if shared == 1:
        return "PHB"
    if one.numa_node is None or other.numa_node is None or one.numa_node == other.numa_node:
        return "NODE"
    return "SYS"


def _two_chips(one: Accelerator | Nic, other: Accelerator | Nic) -> bool:
    """Return whether these are different accelerators, rather than one that several ranks share."""
    if isinstance(one, Nic) or isinstance(other, Nic):
        return False
    return (one.kind, one.index) != (other.kind, other.index)


def distance(one: Accelerator | Nic, other: Accelerator | Nic) -> int:
    """Return the rank of the path class by PCIe and NUMA: 0 is nearest."""
    return CLASSES.index(classify(one, other))


def _shared(one: Accelerator | Nic, other: Accelerator | Nic) -> int:
    """Return the number of bridges, host bridge first, that both devices lie below."""
    count = 0
    for left, right in zip(one.pci_path, other.pci_path, strict=False):
        if left != right:
            break
        count += 1
    return count


def _turn(one: Accelerator | Nic, other: Accelerator | Nic, shared: int) -> Hop:
    """Return the hop at which the path stops going up and starts going down."""
    usual = defaults().paths
    if shared > 1:
        return Hop(one.pci_path[shared - 1], None, 0.0)
    if shared == 1:
        return Hop(one.pci_path[0], None, usual.host_bridge_us)
    if classify(one, other) == "SYS":
        return Hop(f"NUMA {one.numa_node}-{other.numa_node}", usual.sockets_gbs, usual.sockets_us)
    known = [d.numa_node for d in (one, other) if d.numa_node is not None]
    return Hop(f"NUMA {known[0]}" if known else "host", None, usual.host_bridge_us)


def _port(device: Accelerator | Nic) -> list[Hop]:
    if isinstance(device, Accelerator):
        return []
    rate = device.speed_gbps / 8 if device.speed_gbps else None
    return [Hop(device.id, rate, 0.0)]


class Pinning(Model):
    """The part of a placement that a user fixed; the rest is decided here. Ids are those that
    ``mkernel probe`` prints."""

    accelerators: Many[Name] = Field((), description="accelerator of each local rank")
    nics: dict[Name, Many[Name]] = Field({}, description="accelerator id → its NICs")

    def __hash__(self) -> int:
        return hash((self.accelerators, tuple(sorted(self.nics.items()))))


NOT_PINNED = Pinning()


class Seat(Model):
    """The resources of a local rank on every node of a kind: accelerator, NICs that it uses (best
    first), proxy CPUs."""

    accelerator: str
    nics: tuple[str, ...] = ()
    proxy_cpus: tuple[int, ...] = ()


class Placement(Seat):
    """The place of one rank: node, local rank, and its resources there."""

    rank: int = Field(ge=0)
    node: int = Field(ge=0)
    local_rank: int = Field(ge=0)


class Site(Model):
    """Equal nodes, and the seats of their local ranks."""

    nodes: Spans
    seats: tuple[Seat, ...]

    @property
    def count(self) -> int:
        """The number of nodes."""
        return sum(last - first + 1 for first, last in self.nodes)


class WorldPlacement(Model):
    """The placement of every rank, by rank: a sequence of :class:`Placement`, kept by kind of node."""

    sites: tuple[Site, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _complete(self) -> WorldPlacement:
        following = 0
        for first, last, _ in self._spans:
            if first != following or last < first:
                raise ValueError(f"sites must hold every node once: look at node {following}")
            following = last + 1
        if len({len(site.seats) for site in self.sites}) != 1 or not self.sites[0].seats:
            raise ValueError("every node must have the same number of seats, at least one")
        return self

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """The (first node, last node, site) of each run of nodes, sorted."""
        return sorted((*span, s) for s, site in enumerate(self.sites) for span in site.nodes)

    @cached_property
    def _firsts(self) -> list[int]:
        return [first for first, _, _ in self._spans]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._spans[-1][1] + 1

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return len(self.sites[0].seats)

    def site_of(self, node: int) -> int:
        """Return the index of the node's site."""
        return self._spans[bisect_right(self._firsts, node) - 1][2]

    def __len__(self) -> int:
        return self.nodes * self.ranks_per_node

    def __getitem__(self, rank: int) -> Placement:
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} of a world of {len(self)}")
        node, local_rank = divmod(rank, self.ranks_per_node)
        seat = self.sites[self.site_of(node)].seats[local_rank]
        return Placement(rank=rank, node=node, local_rank=local_rank, **dict(seat))

    def __iter__(self) -> Iterator[Placement]:  # type: ignore[override]
        return map(self.__getitem__, range(len(self)))


def place(
    world: Topology | NodeKinds,
    ranks_per_node: int,
    *,
    nics: bool = True,
    pinning: Pinning = NOT_PINNED,
    most_rails: int | None = None,
) -> WorldPlacement:
    """Place ``ranks_per_node`` ranks on each node, node by node.

    Local rank i gets the node's i-th accelerator, or the one that ``pinning`` gives it, and those
    of its NICs that can share a put evenly, ``most_rails`` at most. ``nics=False`` omits NICs and
    proxies, for worlds of one node.

    Raises:
        ArgumentError: a node has fewer accelerators than ranks, or lacks what ``pinning`` names.
    """
    if ranks_per_node < 1:
        raise ArgumentError("ranks_per_node", ranks_per_node, "1 or more")
    kinds = node_kinds(world) if isinstance(world, Topology) else world
    return WorldPlacement(
        sites=tuple(
            Site(
                nodes=kinds.nodes(kind),
                seats=_seats(
                    node, kinds.nodes(kind)[0][0], ranks_per_node, nics, pinning, most_rails
                ),
            )
            for kind, node in enumerate(kinds.prototypes)
        )
    )


def _seats(
    node: Node,
    number: int,
    ranks_per_node: int,
    nics: bool,
    pinning: Pinning,
    most_rails: int | None,
) -> tuple[Seat, ...]:
    """Return the seats of a kind of node. ``number``: the first such node, for messages."""
    used = _pinned_accelerators(node, number, ranks_per_node, pinning)
    affinity = _affinity(node, number, used, pinning) if nics else {}
    return tuple(
        Seat(
            accelerator=one.id,
            nics=tuple(nic.id for nic in _alike(affinity.get(one.id, ()))[:most_rails]),
            proxy_cpus=cpus_near(node, affinity[one.id][0]) if affinity.get(one.id) else (),
        )
        for one in used
    )


def _pinned_accelerators(
    node: Node, number: int, ranks_per_node: int, pinning: Pinning
) -> tuple[Accelerator, ...]:
    if len(node.accelerators) < ranks_per_node:
        raise ArgumentError(
            "ranks_per_node",
            ranks_per_node,
            f"at most {len(node.accelerators)}, the number of accelerators of node {number}"
            + (f" ({node.hostname})" if node.hostname else ""),
        )
    if not pinning.accelerators:
        return node.accelerators[:ranks_per_node]
    known = {one.id: one for one in node.accelerators}
    wanted = pinning.accelerators[:ranks_per_node]
    if len(set(wanted)) < ranks_per_node or not known.keys() >= set(wanted):
        raise ArgumentError(
            "pinning.accelerators",
            ", ".join(pinning.accelerators),
            f"{ranks_per_node} different ones of node {number}: {', '.join(known)}",
        )
    return tuple(known[name] for name in wanted)


def _affinity(
    node: Node, number: int, used: Sequence[Accelerator], pinning: Pinning
) -> dict[str, tuple[Nic, ...]]:
    """Return the NICs of the accelerators that ranks use. NICs of pinned accelerators go to others
    only if none is left."""
    usable = {nic.id: nic for nic in usable_nics(node)}
    pinned = {}
    for one in used:
        if one.id in pinning.nics:
            names = pinning.nics[one.id]
            if not names or not usable.keys() >= set(names):
                raise ArgumentError(
                    f"pinning.nics[{one.id}]",
                    ", ".join(names) or "none",
                    f"active RDMA NICs of node {number}: {', '.join(usable) or 'it has none'}",
                )
            pinned[one.id] = tuple(usable[name] for name in dict.fromkeys(names))
    taken = {nic.id for own in pinned.values() for nic in own}
    free = [nic for name, nic in usable.items() if name not in taken] or list(usable.values())
    rest = [one for one in used if one.id not in pinned]
    others = [one for one in node.accelerators if one not in used]
    return assign_nics(rest, _not_nearer_to(others, used, free)) | pinned


def _not_nearer_to(
    others: Sequence[Accelerator], used: Sequence[Accelerator], nics: Sequence[Nic]
) -> tuple[Nic, ...]:
    """Return the NICs that lie as near to an accelerator in use as to any other; all if there are
    none."""
    kept = tuple(
        nic
        for nic in nics
        if min(distance(one, nic) for one in used)
        <= min((distance(one, nic) for one in others), default=len(CLASSES))
    )
    return kept or tuple(nics)


def visible(
    accelerators: Sequence[Accelerator],
    environment: Mapping[str, str],
    variables: Mapping[str, str],
) -> tuple[Accelerator, ...]:
    """Return the accelerators that the environment leaves visible, in its order; other kinds, and
    simulated ones, are kept. ``variables``: by kind of device, the variable that lists the devices
    that may be used.

    Variables are read as the drivers read them: a list of indices, cut at the first that names no
    device. A list with UUIDs is ignored, because no accelerator here carries one.
    """
    shown = tuple(accelerators)
    for kind, variable in variables.items():
        wanted = environment.get(variable)
        if wanted is None or not set(wanted) <= set("0123456789,- "):
            continue
        of_kind = {one.index: one for one in shown if one.kind == kind and not one.emulated}
        listed = []
        for text in wanted.split(","):
            one = of_kind.pop(int(text), None) if text.strip().isdecimal() else None
            if one is None:
                break
            listed.append(one)
        rest = [one for one in shown if one.kind != kind or one.emulated]
        shown = (*listed, *rest)
    return shown


def usable_nics(node: Node) -> tuple[Nic, ...]:
    """Return the node's NICs that can carry RDMA now: active, and not plain Ethernet."""
    return tuple(nic for nic in node.nics if nic.active and nic.kind != "ethernet")


def _alike(nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """Return the NICs that can share a rank's puts evenly. ``nics`` come best first: the result is
    the first one, and all that have its kind, link layer and speed."""
    return tuple(
        nic
        for nic in nics
        if (nic.kind, nic.link_layer, nic.speed_gbps)
        == (nics[0].kind, nics[0].link_layer, nics[0].speed_gbps)
    )


def cpus_near(node: Node, nic: Nic) -> tuple[int, ...]:
    """Return the CPUs of the NIC's NUMA node; all of the node's if that is unknown or has none
    here."""
    for numa in node.numa:
        if numa.id == nic.numa_node and numa.cpus:
            return tuple(sorted(numa.cpus))
    return node.cpus


def assign_nics(
    accelerators: Sequence[Accelerator], nics: Sequence[Nic]
) -> dict[str, tuple[Nic, ...]]:
    """Return a map from accelerator id to its NICs, nearest first.

    The nearest path class is preferred, and NICs are balanced within it: two accelerators share a
    NIC only if no equally near one is idle. With more NICs than accelerators every NIC is used, and
    an accelerator that is no NIC's nearest takes one over from a neighbour with several; with
    fewer, each has one.
    """
    owned: dict[str, list[Nic]] = {a.id: [] for a in accelerators}
    if not accelerators or not nics:
        return dict.fromkeys(owned, ())
    gap = {
        (a, n): distance(one, nic)
        for a, one in enumerate(accelerators)
        for n, nic in enumerate(nics)
    }

    if len(nics) > len(accelerators):
        near = {
            n: _nearest(n, [gap[a, n] for a in range(len(accelerators))]) for n in range(len(nics))
        }
        for n, a in balance(near).items():
            owned[accelerators[a].id].append(nics[n])
        for a, one in enumerate(accelerators):
            if not owned[one.id]:
                _take_over(one, [gap[a, n] for n in range(len(nics))], nics, owned)
    # Every accelerator that has none yet (all of them, where NICs are not in excess) takes one.
    bare = [a for a, one in enumerate(accelerators) if not owned[one.id]]
    near = {a: _nearest(a, [gap[a, n] for n in range(len(nics))]) for a in bare}
    for a, n in balance(near).items():
        owned[accelerators[a].id].append(nics[n])

    return {
        one.id: tuple(sorted(owned[one.id], key=lambda nic: distance(one, nic)))
        for one in accelerators
    }


def _take_over(
    bare: Accelerator, gaps: Sequence[int], nics: Sequence[Nic], owned: dict[str, list[Nic]]
) -> None:
    """Give ``bare`` one of its nearest NICs, from the accelerator that has most, if that has two."""
    nearest = {nics[n].id for n in _nearest(0, gaps)}
    owners = [name for name, own in owned.items() if any(nic.id in nearest for nic in own)]
    richest = max(owners, key=lambda name: len(owned[name]))
    if len(owned[richest]) > 1:
        nic = [nic for nic in owned[richest] if nic.id in nearest][-1]
        owned[richest].remove(nic)
        owned[bare.id].append(nic)


def _nearest(item: int, gaps: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the least gap, starting at ``item``'s own turn so that ties spread in
    order."""
    best = min(gaps)
    indices = [index for index, gap in enumerate(gaps) if gap == best]
    turn = item % len(indices)
    return tuple(indices[turn:] + indices[:turn])


def balance(options: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Give each item one of its options so that the options' loads are as even as possible.

    The algorithm is optimal semi-matching by cost-reducing paths (Harvey, Ladner, Lovász, Tamir,
    2006): place each item, moving earlier ones along an alternating path to the least loaded option
    within reach.
    """
    chosen: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    for item, reach in options.items():
        came_from: dict[int, tuple[int, int | None]] = {}
        queue: deque[int] = deque()
        for option in reach:
            if option not in came_from:
                came_from[option] = (item, None)
                queue.append(option)
        order = []
        while queue:
            option = queue.popleft()
            order.append(option)
            for user in sorted(users.get(option, ())):
                for other in options[user]:
                    if other not in came_from:
                        came_from[other] = (user, option)
                        queue.append(other)
        target: int | None = min(order, key=lambda option: len(users.get(option, ())))
        while target is not None:
            mover, source = came_from[target]
            if source is not None:
                users[source].discard(mover)
            users.setdefault(target, set()).add(mover)
            chosen[mover] = target
            target = source
    return chosen
