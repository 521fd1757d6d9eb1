"""Plans of devices that reach each other, or do not."""

from __future__ import annotations

from mkernel.backends.accelerators.streams.backend import StreamsAccelerator
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.model import Accelerator, Node, NumaNode, Topology


def plan(op: str, world: int, no_p2p: bool = False, **sizes: int) -> LaunchPlan:
    """Of an op on the devices of one node, of which the first two may not reach each other."""
    node = Node(
        id=0, hostname="host", numa=(NumaNode(id=0, cpus=(0,)),),
        accelerators=tuple(
            Accelerator(id=f"cuda{i}", kind="cuda", name="GPU", index=i) for i in range(world)
        ),
        no_p2p=(("cuda0", "cuda1"),) if no_p2p else (),
    )  # fmt: skip
    return plan_of(
        op,
        sizes,
        dtype="float32",
        nodes=1,
        ranks_per_node=world,
        accelerator="streams",
        capabilities=StreamsAccelerator("cpu").capabilities(),
        nic=None,
        verbs=None,
        topology=Topology(nodes=(node,)),
    )
