"""Whether a plan could be launched: the conditions that ``init`` checks, and plans are marked by.

``mkernel plan`` also predicts what no backend runs today. What it prints says so by these functions,
and :class:`mkernel.World` refuses such worlds by the same ones, so the two cannot drift apart.
"""

from __future__ import annotations

from mkernel.plan import arguments
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
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


def plan_obstacles(made: LaunchPlan, capabilities: AcceleratorCapabilities) -> tuple[str, ...]:
    """The same of a plan's decisions."""
    found = []
    provided = arguments.provided_exchanges(made.op, made.nodes, capabilities)
    if made.exchange not in provided:
        found.append(
            f"accelerator {made.accelerator!r} does not provide the exchange {made.exchange!r} for "
            f"{made.op!r}; it provides: {', '.join(provided)}"
        )
    if made.order.runs not in capabilities.orders:
        found.append(
            f"accelerator {made.accelerator!r} does not consume sources in the order "
            f"{made.order.runs!r}; it does in: {', '.join(capabilities.orders)}"
        )
    return tuple(found)
