"""Small worlds, capabilities and backends for the planner's tests."""

from __future__ import annotations

from typing import Any

from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology
from mkernel.topology.reshape import split_into_nodes

SIM = Accelerator(id="ascend-sim0", kind="ascend", name="simulator", index=0, emulated=True)
SOFT = Nic(id="soft0", kind="soft", name="soft0", emulated=True)
MACHINE = Topology(nodes=(Node(id=0, hostname="h", numa=(NumaNode(id=0, cpus=(0, 1, 2, 3)),)),))
CAPABILITIES = AcceleratorCapabilities(
    ops=("all_gather_gemm",),
    dtypes=("float16", "bfloat16", "float32"),
    out_dtypes=("float16", "bfloat16", "float32"),
    b_layouts=("row", "column"),
    alignment_bytes=16,
    transfer_paths=("p2p", "nic"),
    peer_access=True,
    simulated=True,
    compute_cores=24,
    comm_cores=48,
)


def world(nodes: int, ranks_per_node: int) -> Topology:
    return split_into_nodes(MACHINE, nodes, ranks_per_node, SIM, SOFT)


def make(nodes: int = 2, ranks_per_node: int = 2, **options: Any) -> LaunchPlan:
    """A plan of the main job, with any of the planner's arguments replaced."""
    arguments: dict[str, Any] = {
        "op": "all_gather_gemm",
        "m": 2048,
        "n": 1024,
        "k": 2048,
        "dtype": "float16",
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "accelerator": "ascend",
        "capabilities": CAPABILITIES,
        "nic": "cx7",
        "verbs": "soft",
    }
    arguments.update(options)
    if "topology" not in arguments:
        arguments["topology"] = world(max(nodes, 1), max(ranks_per_node, 1))
    sizes = {name: arguments.pop(name) for name in ("m", "n", "k")}
    return plan(arguments.pop("op"), sizes, **arguments)
