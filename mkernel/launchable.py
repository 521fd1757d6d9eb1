"""Whether a plan could be launched: the conditions that ``init`` checks, and plans are marked by.

``mkernel plan`` also predicts what no backend runs today. What it prints says so by these functions,
and :class:`mkernel.World` refuses such worlds by the same ones, so the two cannot drift apart.
"""

from __future__ import annotations

from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.pipeline import Exchange
from mkernel.topology.kinds import NodeKinds


def world_obstacles(
    accelerator: str, capabilities: AcceleratorCapabilities, world: NodeKinds
) -> tuple[str, ...]:
    """Why no world of this accelerator can be made of these nodes, a sentence each; empty: it can.

    Args:
        accelerator, capabilities: the backend's name, and its claims on such devices.
        world: its kinds of nodes, with the devices that ranks would use.
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
    return tuple(found)


def exchange_obstacles(exchange: Exchange) -> tuple[str, ...]:
    """The same of what ranks of different nodes exchange: backends do so pair by pair."""
    if exchange == "direct":
        return ()
    return (f"no accelerator backend runs the exchange {exchange!r}",)
