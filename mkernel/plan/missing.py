"""Sentences that say what is missing before a call can be launched, and the what-if made of them.

``mkernel plan`` uses these functions to distinguish a what-if from a plan, :class:`mkernel.World`
refuses worlds, and the ops refuse calls, so that they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import CommonPart
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.topology.kinds import NodeKinds
from mkernel.topology.placement import WorldPlacement
from mkernel.topology.routes import RouteClass, RouteTable


class WhatIf(CommonPart):
    """A prediction of a call that cannot be launched on a machine: it has chips without kernels of
    the backend, nodes between which the backend has no path, or an exchange or ways that it does
    not take.

    The functions that make plans make it too, with the same predictions. It is no plan: it has no
    schedule and no digest, no launch reads it, and ops refuse it with the sentences of ``missing``.
    """

    exchange: Exchange = Field("direct", description="between nodes, that the prediction is of")
    missing: tuple[str, ...] = Field(min_length=1, description="what is missing to launch it")


def of_world(
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    world: NodeKinds,
    ranks_per_node: int,
) -> tuple[str, ...]:
    """Return why no world of this accelerator can be made of these nodes.

    Args:
        accelerator, capabilities: the backend's name, and its claims on such devices.
        world: its kinds of nodes, with the devices that ranks would use.
        ranks_per_node: ranks on each.
    """
    found: dict[str, None] = {}
    for node in world.prototypes:
        for device in node.accelerators:
            misfit = capabilities.misfit(device)
            if misfit is not None:
                found[f"accelerator {accelerator!r} {misfit}"] = None
    if len(world.of) > 1 and not capabilities.between_nodes:
        found[
            f"accelerator {accelerator!r} has no path between nodes (it claims "
            f"{', '.join(capabilities.transfer_paths)}); make a world of one node, or use another "
            "accelerator"
        ] = None
    crowd = capabilities.too_many(len(world.of) * ranks_per_node)
    if crowd is not None:
        found[f"accelerator {accelerator!r} {crowd}"] = None
    return tuple(found)


def of_op(
    op: str, accelerator: str, capabilities: AcceleratorCapabilities, nodes: int
) -> tuple[str, ...]:
    """Return why the op cannot be called in a world of so many nodes, though the backend has it;
    empty if it can."""
    if op not in capabilities.ops or capabilities.provides(op, nodes):
        return ()
    return (f"accelerator {accelerator!r} runs {op} on one node, not on {nodes}",)


def of_routes(
    table: RouteTable,
    placement: WorldPlacement,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
) -> tuple[str, ...]:
    """Return a sentence for each way between ranks that the backend does not take: relays, and host
    memory. One pair stands for all of its kind."""
    found: dict[str, str] = {}
    for one in table.classes:
        for what, sentence in _untaken(one, placement, accelerator, capabilities):
            found.setdefault(what, sentence)
    return tuple(found.values())


def _untaken(
    route: RouteClass,
    placement: WorldPlacement,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
) -> Iterator[tuple[str, str]]:
    if route.taken and (not route.staged or capabilities.stages):
        return
    src, dst = (
        f"{placement.sites[site].seats[local].accelerator} of node {node}"
        for (site, local), node in zip(
            ((route.src_site, route.src_local), (route.dst_site, route.dst_local)),
            _nodes(route, placement),
            strict=True,
        )
    )
    if route.kind == "host":
        yield (
            "host",
            f"{src} does not reach the memory of {dst}, and no accelerator backend stages in host "
            "memory what it sends within a node; it does between nodes, which such ranks are where the "
            "number of nodes is left open",
        )
        return
    if route.kind == "relay":
        yield (
            "relay",
            f"{src} reaches {dst} by a neighbour's NICs, and no accelerator backend relays",
        )
    if route.staged:
        nics = ", ".join(dict.fromkeys(rail.src_nic for rail in route.rails))
        yield (
            "staged",
            f"{src} reaches {dst} through host memory, because NICs ({nics}) do not reach the devices' "
            f"memory, and accelerator {accelerator!r} does not stage what it sends there",
        )


def _nodes(route: RouteClass, placement: WorldPlacement) -> tuple[int, int]:
    """Return the first nodes, source and destination, of a class of pairs."""
    src = placement.sites[route.src_site].nodes[0][0]
    if route.within:
        return src, src
    spans = placement.sites[route.dst_site].nodes
    return src, next(n for first, last in spans for n in range(first, last + 1) if n != src)


def of_exchange(
    exchange: Exchange, op: str, accelerator: str, capabilities: AcceleratorCapabilities
) -> tuple[str, ...]:
    """Return a sentence if ranks of different nodes exchange in a way that the backend does not
    run. Every backend runs the direct exchange. :func:`of_op` reports an op that it has on one node
    only."""
    if exchange == "direct" or op in (*capabilities.hierarchical_ops, *capabilities.one_node_ops):
        return ()
    return (f"accelerator {accelerator!r} does not run the exchange {exchange!r} of {op!r}",)


def of_returns(
    returns: Returns | None, accelerator: str, capabilities: AcceleratorCapabilities, nodes: int
) -> tuple[str, ...]:
    """Return a sentence if results of experts should come home in a way that the backend does not
    have in a world of so many nodes. None: there is no wish."""
    ways = capabilities.ways_home(nodes)
    if returns is None or returns in ways:
        return ()
    return (
        f"accelerator {accelerator!r} brings results home by {' and '.join(ways)} between nodes, not "
        f"by {returns}; leave returns open",
    )
