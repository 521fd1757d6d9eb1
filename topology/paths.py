"""Paths between two devices of one node: path classes as NCCL names them, and the links that bytes
cross.

``LOC`` same device, ``PIX`` at most one PCIe switch between, ``PXB`` several, ``PHB`` through the host
bridge, ``NODE`` between host bridges of one NUMA node, ``SYS`` across NUMA nodes. Scale-up links have
classes of their own (:data:`mkernel.topology.sources.kinds.FABRIC_CLASSES`).
"""

from __future__ import annotations

from typing import NamedTuple

from mkernel.topology.defaults import defaults
from mkernel.topology.model import FABRIC_SWITCH, Accelerator, FabricLink, Nic, Node
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
