"""Places ranks: rank → node and accelerator, accelerator → NICs, proxy thread → CPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from mkernel.errors import ArgumentError
from mkernel.topology.model import Accelerator, Nic, Node, Placement, Topology
from mkernel.topology.paths import distance


def place(topology: Topology, ranks_per_node: int, *, nics: bool = True) -> tuple[Placement, ...]:
    """Places ``ranks_per_node`` ranks on each node, node by node.

    Local rank i gets the node's i-th accelerator. ``nics=False`` leaves NICs and proxies out, for
    worlds of one node.

    Raises:
        ArgumentError: a node has fewer accelerators than ranks.
    """
    if ranks_per_node < 1:
        raise ArgumentError("ranks_per_node", ranks_per_node, "1 or more")
    placements = []
    for node in topology.nodes:
        if len(node.accelerators) < ranks_per_node:
            raise ArgumentError(
                "ranks_per_node",
                ranks_per_node,
                f"at most {len(node.accelerators)}, the number of accelerators of node {node.id} "
                f"({node.hostname})",
            )
        used = node.accelerators[:ranks_per_node]
        affinity = assign_nics(used, usable_nics(node)) if nics else {}
        for local_rank, accelerator in enumerate(used):
            own = affinity.get(accelerator.id, ())
            placements.append(
                Placement(
                    rank=node.id * ranks_per_node + local_rank,
                    node=node.id,
                    local_rank=local_rank,
                    accelerator=accelerator.id,
                    nics=tuple(nic.id for nic in own),
                    proxy_cpus=cpus_near(node, own[0]) if own else (),
                )
            )
    return tuple(placements)


def usable_nics(node: Node) -> tuple[Nic, ...]:
    """The node's NICs that can carry RDMA now: active, and not plain Ethernet."""
    return tuple(nic for nic in node.nics if nic.active and nic.kind != "ethernet")


def cpus_near(node: Node, nic: Nic) -> tuple[int, ...]:
    """CPUs of the NIC's NUMA node; all of the node's where that is unknown or has none here."""
    for numa in node.numa:
        if numa.id == nic.numa_node and numa.cpus:
            return tuple(sorted(numa.cpus))
    return node.cpus


def assign_nics(
    accelerators: Sequence[Accelerator], nics: Sequence[Nic]
) -> dict[str, tuple[Nic, ...]]:
    """Accelerator id → its NICs, nearest first.

    Nearest path class first, and balanced within it: two accelerators share a NIC only when no
    equally near one is idle. With more NICs than accelerators every NIC is used; with fewer, each
    accelerator has one.
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
    # Every accelerator that has none yet (all of them, where NICs are not in excess) takes one.
    bare = [a for a, one in enumerate(accelerators) if not owned[one.id]]
    near = {a: _nearest(a, [gap[a, n] for n in range(len(nics))]) for a in bare}
    for a, n in balance(near).items():
        owned[accelerators[a].id].append(nics[n])

    return {
        one.id: tuple(sorted(owned[one.id], key=lambda nic: distance(one, nic)))
        for one in accelerators
    }


def _nearest(item: int, gaps: Sequence[int]) -> tuple[int, ...]:
    """Indices of the least gap, starting at ``item``'s own turn so that ties spread in order."""
    best = min(gaps)
    indices = [index for index, gap in enumerate(gaps) if gap == best]
    turn = item % len(indices)
    return tuple(indices[turn:] + indices[:turn])


def balance(options: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Gives each item one of its options so that the options' loads are as even as can be.

    Optimal semi-matching by cost-reducing paths (Harvey, Ladner, Lovász, Tamir, 2006): place each
    item, moving earlier ones along an alternating path to the least loaded option within reach.
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
