"""The matrix of path classes of every pair of devices, as drivers' tools print it, NICs included."""

from __future__ import annotations

import re

from mkernel.plan.render import ranges
from mkernel.topology.model import Accelerator, Nic, Node
from mkernel.topology.placement import NodePaths
from mkernel.topology.sources.kinds import COUNTED_CLASSES, FABRIC_LEGEND

_LEGEND = {
    "X": "self",
    "LOC": "the same device",
    **FABRIC_LEGEND,
    "PIX": "one PCIe switch at most",
    "PXB": "several PCIe switches",
    "PHB": "a host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
}


def matrix(node: Node) -> str:
    """Return the matrix of accelerators and the NICs that do RDMA, which are called ``NIC0``, … and
    named below it."""
    nics = [nic for nic in node.nics if nic.kind != "ethernet"]
    names = [one.id for one in node.accelerators] + [f"NIC{number}" for number in range(len(nics))]
    devices: list[Accelerator | Nic] = [*node.accelerators, *nics]
    if not devices:
        return "no accelerator and no RDMA NIC"
    paths = NodePaths(node)
    rows = [["", *names, "CPUs", "NUMA"]]
    for name, device in zip(names, devices, strict=True):
        row = [name, *(_cell(paths, device, other) for other in devices)]
        rows.append([*row, *_place(node, device)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    seen = {re.sub(r"\d+$", "#", text) for row in rows[1:] for text in row[1:-2]}
    lines += ["", *(f"{key:<5} {what}" for key, what in _LEGEND.items() if key in seen)]
    if nics:
        lines += ["", *(f"NIC{number}: {nic.id} ({nic.kind})" for number, nic in enumerate(nics))]
    return "\n".join(lines)


def _cell(paths: NodePaths, one: Accelerator | Nic, other: Accelerator | Nic) -> str:
    if one is other:
        return "X"
    kind = paths.between(one, other).kind
    counts = [link.count for link in paths.fabric(one, other) if link.count is not None]
    counted = COUNTED_CLASSES.get(kind)
    return f"{counted}{min(counts)}" if counted and counts else kind


def _place(node: Node, device: Accelerator | Nic) -> tuple[str, str]:
    for part in node.numa:
        if part.id == device.numa_node:
            return ranges(part.cpus), str(part.id)
    return "", "" if device.numa_node is None else str(device.numa_node)
