"""Worlds of unlike nodes: the part of them that one world can use, and messages about the rest.

A world has accelerators of one kind, equally many ranks on every node, and one NIC backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mkernel.errors import NoRoute, Unsupported
from mkernel.topology.kinds import spans
from mkernel.topology.model import FABRIC_SWITCH, KindName, Node, Topology
from mkernel.topology.rails import real_ports

_MOST_SHOWN = 4
_UNSUPPORTED = "worlds of several kinds of accelerators are not supported"


def of_one_kind(world: Topology) -> tuple[Topology, tuple[str, ...]]:
    """Return the nodes with accelerators of one kind, which all of them have, and a sentence about
    each other kind that is left out.

    The kind is the one of most devices; emulated devices count only if no real ones are listed.

    Raises:
        Unsupported: the nodes have no kind in common; names what each has.
    """
    emulated = all(one.emulated for node in world.nodes for one in node.accelerators)
    counts = [
        Counter(one.kind for one in node.accelerators if one.emulated == emulated)
        for node in world.nodes
    ]
    common = [kind for kind in counts[0] if all(kind in count for count in counts)]
    if not common:
        each = _by_node({node: _counted(count) for node, count in enumerate(counts)})
        raise Unsupported(
            f"the nodes have no kind of accelerator in common: {each}; {_UNSUPPORTED}, so give a file "
            "whose nodes all have one kind"
        )
    whole = sum(counts, Counter[KindName]())
    kind = max(common, key=lambda each: whole[each])
    left = {
        node: _counted(Counter({other: n for other, n in count.items() if other != kind}))
        for node, count in enumerate(counts)
        if len(count) > 1
    }
    notes = (f"left out beside {kind}: {_by_node(left)}: {_UNSUPPORTED}",) if left else ()
    kept = Topology(nodes=tuple(_only(node, kind, emulated) for node in world.nodes))
    return kept, notes


def ranks_on_each(world: Topology) -> tuple[int, tuple[str, ...]]:
    """Return how many ranks every node has accelerators for, and a note if some have more."""
    counts = [len(node.accelerators) for node in world.nodes]
    least = min(counts)
    if max(counts) == least:
        return least, ()
    each = _by_node({node: f"{count} accelerators" for node, count in enumerate(counts)})
    return least, (
        f"{least} ranks a node, because {each}: nodes of unlike numbers of ranks are not supported",
    )


def require_ports(world: Topology, kept: Topology, nic: str) -> None:
    """Check that a NIC backend drives ports of all nodes that have any.

    Args:
        world, kept: the world with all NICs, and with only those that the backend drives.

    Raises:
        NoRoute: it drives none of some nodes; names what each has.
    """
    bare = [
        node.id
        for node, left in zip(world.nodes, kept.nodes, strict=True)
        if real_ports(node) and not real_ports(left)
    ]
    if not bare:
        return
    ports = {node.id: Counter(port.kind for port in real_ports(node)) for node in world.nodes}
    each = _by_node({node: _counted(count, " NIC ports") for node, count in ports.items()})
    raise NoRoute(
        f"nic {nic!r} drives no RDMA port of {_nodes(bare)}: {each}; worlds whose nodes have NICs of "
        "unlike kinds are not supported, so leave nodes out, or --nic away where one backend drives all"
    )


def _only(node: Node, kind: KindName, emulated: bool) -> Node:
    kept = tuple(one for one in node.accelerators if one.kind == kind and one.emulated == emulated)
    ids = {one.id for one in kept} | {FABRIC_SWITCH}
    real = tuple(nic for nic in node.nics if not nic.emulated)
    return node.model_copy(
        update={
            "accelerators": kept,
            "nics": node.nics if emulated else real or node.nics,
            "fabric": tuple(link for link in node.fabric if ids >= set(link.ends)),
            "no_p2p": tuple(pair for pair in node.no_p2p if ids >= set(pair)),
        }
    )


def _counted(counts: Counter[KindName], what: str = "") -> str:
    """Return counts in words: ``8 cuda and 1 rocm``."""
    return " and ".join(f"{n} {kind}{what}" for kind, n in counts.items()) or f"no{what or 'ne'}"


def _by_node(said: Mapping[int, str]) -> str:
    """Return the text for each node, once for all nodes that share it."""
    nodes: dict[str, list[int]] = {}
    for node, text in said.items():
        nodes.setdefault(text, []).append(node)
    each = [
        f"{_nodes(where)} {'has' if len(where) == 1 else 'have'} {text}"
        for text, where in nodes.items()
    ]
    more = f", and {len(each) - _MOST_SHOWN} others" if len(each) > _MOST_SHOWN else ""
    return ", ".join(each[:_MOST_SHOWN]) + more


def _nodes(numbers: list[int]) -> str:
    """Return node numbers in words: ``node 3``, ``nodes 0 to 2, 5``."""
    runs = [str(one) if one == other else f"{one} to {other}" for one, other in spans(numbers)]
    more = ", …" if len(runs) > _MOST_SHOWN else ""
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(runs[:_MOST_SHOWN])}{more}"
