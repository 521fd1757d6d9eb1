"""A machine as a readable tree: NUMA nodes, switches, and the devices on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.text import Text
from rich.tree import Tree

from mkernel.plan.render import accelerator_name, ranges
from mkernel.probe.layout import Branch, Leaf, layout
from mkernel.topology.model import FABRIC_SWITCH, Accelerator, Nic, Node, Topology
from mkernel.topology.sources.kinds import fabric_name

_MOST_NODES = 4


def tree(topology: Topology) -> Tree:
    """Return a tree of every device of the first nodes; equal ones side by side share a line."""
    count = len(topology.nodes)
    if count == 1:
        return _node(topology.nodes[0])
    top = Tree(_line(f"{count} nodes", "bold"))
    for node in topology.nodes[:_MOST_NODES]:
        top.add(_node(node))
    if count > _MOST_NODES:
        top.add(_line(f"… and {count - _MOST_NODES} more nodes"))
    return top


def _node(node: Node) -> Tree:
    top = Tree(_line(f"host {node.hostname}{' · emulated' if node.emulated else ''}", "bold"))
    emulated = () if node.emulated else _emulated(node)
    if emulated:
        node = _real(node)
    numa = {part.id: part for part in node.numa}
    for branch in layout(node):
        title = branch.name
        part = numa.get(branch.numa) if branch.numa is not None else None
        if part is not None:
            title += f" · CPUs {ranges(part.cpus) or 'none'}"
            if part.memory_bytes:
                title += f" · {part.memory_bytes / 2**30:.1f} GiB"
        _fill(top.add(_line(title)), branch)
    for text in _fabric(node):
        top.add(_line(text))
    for one, other in node.no_p2p:
        top.add(_line(f"{one} and {other} have no access to each other's memory"))
    for what, devices in (("accelerator", node.accelerators), ("NIC", node.nics)):
        if not devices:
            top.add(_line(f"no {what}"))
    if emulated:
        top.add(_line(f"emulated by backends on the CPU: {'; '.join(emulated)}"))
    return top


def _emulated(node: Node) -> tuple[str, ...]:
    """Return the devices that backends emulate."""
    found = [f"{one.id}, {_accelerator(one)}" for one in node.accelerators if one.emulated]
    return (*found, *(f"{one.id}, {_nic(one)}" for one in node.nics if one.emulated))


def _real(node: Node) -> Node:
    return node.model_copy(
        update={
            "accelerators": tuple(one for one in node.accelerators if not one.emulated),
            "nics": tuple(one for one in node.nics if not one.emulated),
        }
    )


def _fill(at: Tree, branch: Branch) -> None:
    for text in _grouped(branch.leaves):
        at.add(_line(text))
    for below in branch.branches:
        up = "" if below.gbs is None else f" · {below.gbs:.1f} GB/s upwards"
        _fill(at.add(_line(f"PCIe {below.name}{up}")), below)


def _grouped(leaves: Iterable[Leaf]) -> list[str]:
    """Return one line for all devices of the same description."""
    groups: dict[str, list[str]] = {}
    for leaf in leaves:
        groups.setdefault(_describe(leaf), []).append(leaf.device.id)
    return [f"{', '.join(ids)}: {what}" for what, ids in groups.items()]


def _describe(leaf: Leaf) -> str:
    device = leaf.device
    what = _accelerator(device) if isinstance(device, Accelerator) else _nic(device)
    return what if leaf.gbs is None else f"{what} · PCIe {leaf.gbs:.1f} GB/s"


def _accelerator(device: Accelerator) -> str:
    memory = f" {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""
    return accelerator_name(device) + memory


def _nic(device: Nic) -> str:
    speed = f" {device.speed_gbps:g} Gb/s" if device.speed_gbps else ""
    layer = f" {device.link_layer}" if device.link_layer else ""
    direct = " without GPUDirect" if device.gpudirect is False else ""
    state = "" if device.active else " DOWN"
    return (
        f"NIC ({device.kind}{', emulated' if device.emulated else ''}){speed}{layer}{direct}{state}"
    )


def _fabric(node: Node) -> list[str]:
    """Return lines such as ``18 NVLink to switches, 450 GB/s: cuda0, cuda1``, or the pairs if there
    is no switch."""
    links = Counter(
        (
            link.kind,
            link.ends[1] if link.ends[1] not in _ids(node) else "each other",
            link.count,
            link.gbs,
        )
        for link in node.fabric
    )
    lines = []
    for (kind, end, count, gbs), times in links.items():
        rate = f", {gbs:g} GB/s" if gbs else ""
        where = "switches" if end == FABRIC_SWITCH else end
        what = ("pair" if end == "each other" else "accelerator") + ("s" if times > 1 else "")
        lines.append(
            f"{times} {what} with {f'{count} ' if count else ''}{fabric_name(kind)} to {where}{rate}"
        )
    return lines


def _ids(node: Node) -> set[str]:
    return {one.id for one in node.accelerators}


def _line(text: str, style: str = "") -> Text:
    """Return plain text without markup, because names come from devices and files."""
    return Text(text, style=style, overflow="fold")
