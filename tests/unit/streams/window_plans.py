"""Plans of devices that reach each other, or do not."""

from __future__ import annotations

from mkernel.backends.accelerators.streams.backend import StreamsAccelerator
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.model import Accelerator, Node, NumaNode, Topology


def plan(op: str, world: int, nodes: int = 1, no_p2p: bool = False, **sizes: int) -> LaunchPlan:
    """Of a GEMM op on devices of one node, or a part of them on each of several."""
    each = world // nodes
    node = Node(
        id=0, hostname="host", numa=(NumaNode(id=0, cpus=(0,)),),
        accelerators=tuple(
            Accelerator(id=f"cuda{i}", kind="cuda", name="GPU", index=i) for i in range(each)
        ),
        no_p2p=(("cuda0", "cuda1"),) if no_p2p else (),
    )  # fmt: skip
    return plan_of(
        op,
        sizes,
        dtype="float32",
        nodes=nodes,
        ranks_per_node=each,
        accelerator="streams",
        capabilities=StreamsAccelerator("cpu").capabilities(),
        nic=None,
        verbs=None,
        topology=Topology(nodes=tuple(node.model_copy(update={"id": i}) for i in range(nodes))),
    )
