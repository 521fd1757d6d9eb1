"""Worlds made out of one machine: split into emulated nodes, repeated as equal nodes, or with
several ranks on each device.

A node has accelerators of one kind, and all have equally many ranks. Of machines with several kinds
each kind is a node of its own, or one kind is taken that all machines have, with messages about the
rest.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from mkernel.errors import ArgumentError, NoRoute, Unsupported
from mkernel.topology.kinds import spans
from mkernel.topology.model import (
    FABRIC_HOST,
    FABRIC_SWITCH,
    Accelerator,
    FabricLink,
    KindName,
    Nic,
    Node,
    NumaNode,
    Topology,
)
from mkernel.topology.rails import real_ports

_Device = TypeVar("_Device", Accelerator, Nic)
_NO_DEVICES = {FABRIC_SWITCH, FABRIC_HOST}


def split_into_nodes(
    topology: Topology,
    nodes: int,
    ranks_per_node: int,
    accelerator: Accelerator | None,
    nic: Nic | None,
) -> Topology:
    """Split one machine into ``nodes`` nodes of ``ranks_per_node`` accelerators and a NIC each.

    Args:
        topology: one machine, as :func:`mkernel.topology.discover.discover` returns it.
        nodes: number of nodes; marked ``emulated`` if there is more than one.
        ranks_per_node: accelerators of each node.
        accelerator: the device that the ranks run on. An *emulated* one is a prototype: each node
            gets copies with the ids ``<id>0``, ``<id>1``, …. A real one stands for its kind: the
            machine's devices of that kind are dealt out. None: the machine's real devices of any
            kind.
        nic: the same for NICs; real ones are shared if there are fewer than nodes. None: no NIC.

    CPUs are dealt out evenly, in NUMA order, if there is at least one for each rank; otherwise
    every node sees all of them, because pinning would only make ranks wait for each other.

    Raises:
        ArgumentError: not one machine, numbers below 1, or too few real accelerators.
    """
    if len(topology.nodes) != 1:
        raise ArgumentError("topology", f"{len(topology.nodes)} nodes", "one machine to split")
    for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
        if value < 1:
            raise ArgumentError(name, value, "1 or more")
    machine = topology.nodes[0]
    numa_shares = _deal_cpus(machine.numa, nodes, nodes * ranks_per_node)
    made = []
    for index in range(nodes):
        numa = numa_shares[index]
        own = _accelerators(machine, index, nodes, ranks_per_node, accelerator, numa)
        fabric, no_p2p = _links(machine, [one for one in own if not one.emulated])
        made.append(
            Node(
                id=index,
                hostname=machine.hostname,
                emulated=nodes > 1,
                numa=numa,
                accelerators=own,
                nics=_nics(machine, index, nodes, nic, numa),
                bridges=machine.bridges,
                fabric=fabric,
                fabric_known=machine.fabric_known,
                no_p2p=no_p2p,
            )
        )
    return Topology(nodes=tuple(made))


def replicate(topology: Topology, nodes: int) -> Topology:
    """Return ``nodes`` machines, each equal to the one of ``topology``. ArgumentError if it is not
    one machine."""
    if len(topology.nodes) != 1:
        raise ArgumentError("topology", f"{len(topology.nodes)} nodes", "one machine to repeat")
    if nodes < 1:
        raise ArgumentError("nodes", nodes, "1 or more")
    machine = topology.nodes[0]
    copies = tuple(
        machine.model_copy(update={"id": i, "hostname": f"{machine.hostname}-{i}"})
        for i in range(nodes)
    )
    return Topology(nodes=copies if nodes > 1 else (machine,))


def oversubscribe(topology: Topology, ranks_per_device: int) -> Topology:
    """Return the machine with each real accelerator listed ``ranks_per_device`` times, for as many
    ranks.

    All devices come once before any comes again, as ``<id>.1``, ``<id>.2``, … with the same index and
    address; every copy has the links of the device. ArgumentError if it is not one machine.
    """
    if ranks_per_device == 1:
        return topology
    if len(topology.nodes) != 1:
        raise ArgumentError("topology", f"{len(topology.nodes)} nodes", "one machine to share")
    machine = topology.nodes[0]
    real = [one for one in machine.accelerators if not one.emulated]
    turns = range(1, ranks_per_device)
    names = {one.id: (one.id, *(f"{one.id}.{turn}" for turn in turns)) for one in real}
    copies = (one.model_copy(update={"id": names[one.id][turn]}) for turn in turns for one in real)
    node = machine.model_copy(
        update={
            "accelerators": (*machine.accelerators, *copies),
            "fabric": tuple(
                link.model_copy(update={"ends": ends})
                for link in machine.fabric
                for ends in _pairs(link.ends, names)
            ),
            "no_p2p": tuple(ends for pair in machine.no_p2p for ends in _pairs(pair, names)),
        }
    )
    return Topology(nodes=(node,))


def reached_together(nodes: Sequence[Node], ranks: int) -> int:
    """Return how many ranks of a node, one after another, are on accelerators that reach each other's
    memory: the largest divisor of ``ranks`` such that this holds for every run of so many of them.
    ``ranks``: number of each node's, on its first accelerators."""

    def holds(node: Node, each: int) -> bool:
        ids = [one.id for one in node.accelerators[:ranks]]
        runs = (ids[first : first + each] for first in range(0, ranks, each))
        near = {frozenset(pair) for run in runs for pair in itertools.combinations(run, 2)}
        return near.isdisjoint(map(frozenset, node.no_p2p))

    return next(
        each
        for each in range(ranks, 0, -1)
        if ranks % each == 0 and all(holds(node, each) for node in nodes)
    )


def split_by(world: Topology, each: int, ranks: int, *, by_host: bool = False) -> Topology:
    """Return the world with each node split into nodes of ``each`` of its ``ranks`` ranks. ``by_host``:
    a software device, which copies in host memory, joins them instead of the node's own NICs."""
    made: list[Node] = []
    for node in world.nodes:
        nic = SOFTWARE_NIC if by_host else next(iter(node.nics), None)
        whole = Topology(nodes=(node.model_copy(update={"id": 0}),))
        made += split_into_nodes(whole, ranks // each, each, node.accelerators[0], nic).nodes
    return Topology(nodes=tuple(one.model_copy(update={"id": i}) for i, one in enumerate(made)))


SOFTWARE_NIC = Nic(id="soft0", kind="soft", name="soft0", emulated=True)
"""The software device of a host elsewhere, as plans need it."""


def keep_accelerators(node: Node, kept: Sequence[Accelerator]) -> Node:
    """Return the node with only these of its accelerators, and the links between them."""
    fabric, no_p2p = _links(node, kept)
    return node.model_copy(update={"accelerators": tuple(kept), "fabric": fabric, "no_p2p": no_p2p})


def _links(
    node: Node, kept: Sequence[Accelerator]
) -> tuple[tuple[FabricLink, ...], tuple[tuple[str, str], ...]]:
    """Return the links of these accelerators, to each other, to switches and to the host, and their
    pairs without p2p."""
    ids = {one.id for one in kept}
    fabric = tuple(link for link in node.fabric if ids | _NO_DEVICES >= {*link.ends})
    return fabric, tuple(pair for pair in node.no_p2p if ids >= {*pair})


def _pairs(
    ends: tuple[str, str], names: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, str]]:
    """Yield every copy of one end with every copy of the other. ``names``: the names of each
    device's copies."""
    one, other = (names.get(end, (end,)) for end in ends)
    return itertools.product(one, other)


def _accelerators(
    machine: Node,
    index: int,
    nodes: int,
    ranks: int,
    prototype: Accelerator | None,
    numa: tuple[NumaNode, ...],
) -> tuple[Accelerator, ...]:
    if prototype is not None and prototype.emulated:
        stem = re.sub(r"\d+$", "", prototype.id)
        return tuple(
            _near(prototype, numa).model_copy(update={"id": f"{stem}{i}", "index": i})
            for i in range(ranks)
        )
    kind = prototype.kind if prototype is not None else None
    real = [a for a in machine.accelerators if not a.emulated and kind in (None, a.kind)]
    if len(real) < nodes * ranks:
        raise ArgumentError(
            "ranks_per_node",
            ranks,
            f"nodes * ranks_per_node of at most {len(real)}, the number of {kind or 'real'} "
            f"accelerators of {machine.hostname}",
            why=f"{nodes} * {ranks} were asked for",
        )
    return tuple(real[index * ranks : (index + 1) * ranks])


def _nics(
    machine: Node, index: int, nodes: int, prototype: Nic | None, numa: tuple[NumaNode, ...]
) -> tuple[Nic, ...]:
    if prototype is None:
        return ()
    if prototype.emulated:
        return (_near(prototype, numa),)
    real = [n for n in machine.nics if not n.emulated and n.kind == prototype.kind] or [prototype]
    if len(real) < nodes:
        return (real[index % len(real)],)
    return tuple(real[len(real) * index // nodes : len(real) * (index + 1) // nodes])


def _near(device: _Device, numa: tuple[NumaNode, ...]) -> _Device:
    """Return the device on the emulated node's first NUMA node, unless it already lies on one of
    its nodes."""
    here = [n.id for n in numa]
    if device.numa_node in here or not here:
        return device
    return device.model_copy(update={"numa_node": here[0]})


def _deal_cpus(
    numa: tuple[NumaNode, ...], nodes: int, ranks: int
) -> tuple[tuple[NumaNode, ...], ...]:
    cpus = [(part.id, cpu) for part in numa for cpu in part.cpus]
    if nodes == 1 or len(cpus) < ranks:
        return (numa,) * nodes
    shares = []
    for index in range(nodes):
        slice_ = cpus[len(cpus) * index // nodes : len(cpus) * (index + 1) // nodes]
        parts = []
        for part in numa:
            own = tuple(cpu for where, cpu in slice_ if where == part.id)
            if not own:
                continue
            memory = part.memory_bytes
            if memory is not None:
                memory = memory * len(own) // len(part.cpus)
            parts.append(NumaNode(id=part.id, cpus=own, memory_bytes=memory))
        shares.append(tuple(parts))
    return tuple(shares)


_MOST_SHOWN = 4
_ONE_KIND = (
    "a world takes one kind that all have; --accelerator a+b gives each kind a node of its own"
)


def _counts(world: Topology) -> tuple[bool, list[Counter[KindName]]]:
    """Return whether emulated devices count, because no real ones are listed, and how many of each
    kind each node has."""
    emulated = all(one.emulated for node in world.nodes for one in node.accelerators)
    return emulated, [
        Counter(one.kind for one in node.accelerators if one.emulated == emulated)
        for node in world.nodes
    ]


def common_kinds(world: Topology) -> list[KindName]:
    """Return the kinds of accelerators that all nodes have."""
    _, counts = _counts(world)
    return [kind for kind in counts[0] if all(kind in count for count in counts)]


def of_one_kind(world: Topology) -> tuple[Topology, tuple[str, ...]]:
    """Return the nodes with accelerators of one kind, which all of them have, and a sentence about
    each other kind that is left out.

    The kind is the one of most devices; emulated devices count only if no real ones are listed.

    Raises:
        Unsupported: the nodes have no kind in common; names what each has.
    """
    emulated, counts = _counts(world)
    common = common_kinds(world)
    if not common:
        each = _by_node({node: _counted(count) for node, count in enumerate(counts)})
        raise Unsupported(
            f"the nodes have no kind of accelerator in common: {each}; leave nodes without out"
        )
    whole = sum(counts, Counter[KindName]())
    kind = max(common, key=lambda each: whole[each])
    left = {
        node: _counted(Counter({other: n for other, n in count.items() if other != kind}))
        for node, count in enumerate(counts)
        if len(count) > 1
    }
    notes = (f"left out beside {kind}: {_by_node(left)}: {_ONE_KIND}",) if left else ()
    kept = Topology(nodes=tuple(_only(node, kind, emulated) for node in world.nodes))
    return kept, notes


def by_kind(world: Topology) -> Topology | None:
    """Return the world with a node for each kind of real accelerator of each of its nodes, which share
    the CPUs and NICs of their machine; None: a node has none, or all have one kind."""
    parts: list[Node] = []
    for node in world.nodes:
        real = [one for one in node.accelerators if not one.emulated]
        if not real:
            return None
        kinds = dict.fromkeys(one.kind for one in real)
        parts += [_only(node, kind, emulated=False) for kind in kinds]
    if len({part.accelerators[0].kind for part in parts}) == 1:
        return None
    return Topology(
        nodes=tuple(part.model_copy(update={"id": id_}) for id_, part in enumerate(parts))
    )


def repeat_each(world: Topology, nodes: int) -> Topology:
    """Return a world of ``nodes`` nodes in which each node comes equally often, equal ones one after
    another. ArgumentError."""
    count = len(world.nodes)
    if nodes % count:
        raise ArgumentError("nodes", nodes, f"a multiple of {count}, the machines that are given")
    times = nodes // count
    every = [(node, turn) for node in world.nodes for turn in range(times)]
    names = [node.hostname + (f"-{turn}" if times > 1 else "") for node, turn in every]
    return Topology(
        nodes=tuple(
            node.model_copy(update={"id": id_, "hostname": name})
            for id_, ((node, _), name) in enumerate(zip(every, names, strict=True))
        )
    )


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
        f"nic {nic!r} drives no RDMA port of {_nodes(bare)}: {each}; leave --nic away: one backend is "
        "taken that drives all, or TCP joins the nodes"
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
