"""A machine as one JSON object with keys that other tools may rely on."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from mkernel.topology.discover import Discovery
from mkernel.topology.model import (
    Accelerator,
    KindName,
    Model,
    Nic,
    Note,
    Topology,
)
from mkernel.topology.placement import DevicePath, NodePaths, PathClass, assign_nics
from mkernel.topology.rails import rails


class AcceleratorEntry(Model):
    """An accelerator in the report."""

    id: str
    kind: KindName
    pci: str | None
    numa_node: int | None


class NicEntry(Model):
    """A NIC in the report. ``speed_gbps``: speed of its port, in Gb/s."""

    id: str
    kind: KindName
    pci: str | None
    numa_node: int | None
    speed_gbps: float | None


class PathEntry(Model):
    """The path between two devices: class, Gb/s of the narrowest link (null if no link's rate is
    known), microseconds (an estimate), and the links that bytes cross."""

    kind: PathClass = Field(alias="class")
    bandwidth_gbps: float | None
    latency_us: float
    hops: tuple[str, ...]


class ProbeReport(Model):
    """The object that ``mkernel probe --json`` prints: stable keys first, then the whole model.

    ``affinity``: accelerator id → ids of its rails, best first. ``paths``: accelerator id → NIC id →
    path. ``p2p``: accelerator id → id of another → path. All of these are of the first node, if
    there are several. ``topology`` alone can be saved and passed to ``mkernel plan --topology``,
    and so can the whole report.
    """

    accelerators: tuple[AcceleratorEntry, ...]
    nics: tuple[NicEntry, ...]
    affinity: dict[str, tuple[str, ...]]
    paths: dict[str, dict[str, PathEntry]]
    p2p: dict[str, dict[str, PathEntry]]
    notes: tuple[Note, ...]
    topology: Topology


def report(found: Discovery) -> ProbeReport:
    """Return the report of one machine, or of the first of several."""
    node = found.topology.nodes[0]
    between = NodePaths(node).between

    def paths(others: Iterable[Accelerator | Nic]) -> dict[str, dict[str, PathEntry]]:
        known = tuple(others)
        return {
            one.id: {other.id: _entry(between(one, other)) for other in known if other is not one}
            for one in node.accelerators
        }

    affinity = assign_nics(node.accelerators, rails(node))
    return ProbeReport(
        accelerators=tuple(
            AcceleratorEntry.model_validate(one, from_attributes=True) for one in node.accelerators
        ),
        nics=tuple(NicEntry.model_validate(one, from_attributes=True) for one in node.nics),
        affinity={key: tuple(nic.id for nic in nics) for key, nics in affinity.items()},
        paths=paths(node.nics),
        p2p=paths(node.accelerators),
        notes=found.notes + _others(found.topology),
        topology=found.topology,
    )


def _others(topology: Topology) -> tuple[Note, ...]:
    count = len(topology.nodes)
    if count == 1:
        return ()
    message = (
        f"{count} nodes are known; accelerators, nics, affinity and paths are those of the first"
    )
    return (Note(source="report", message=message),)


def _entry(path: DevicePath) -> PathEntry:
    return PathEntry.model_validate(
        {
            "class": path.kind,
            "bandwidth_gbps": None if path.gbs is None else round(path.gbs * 8, 3),
            "latency_us": round(path.latency_us, 3),
            "hops": tuple(hop.name for hop in path.hops),
        }
    )
