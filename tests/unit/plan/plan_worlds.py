"""Small worlds, capabilities and backends for the planner's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
from shipped import constants_of

from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import GemmShape, LaunchPlan
from mkernel.plan.planner import Planned, explain
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows, by_tiles
from mkernel.topology.model import Topology
from mkernel.topology.reshape import split_into_nodes
from mkernel.topology.world_map import world_map

MACHINE = devices.world(devices.node())
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
    constants=constants_of("ascend"),
)


def scheduled(request: ScheduleRequest) -> Scheduled:
    """Tiles of products, rows of everything else."""
    return (by_tiles if isinstance(request.plan.shape, GemmShape) else by_rows)(request)


def world(nodes: int, ranks_per_node: int) -> Topology:
    return split_into_nodes(MACHINE, nodes, ranks_per_node, devices.SIM, devices.SOFT)


def explained(
    op: str,
    sizes: dict[str, int],
    nodes: int,
    ranks_per_node: int,
    how: Callable[..., Any] = explain,
    **options: Any,
) -> Any:
    """A plan and its alternatives, with any of the planner's other arguments replaced; ``topology``
    and ``constants`` are those of its map."""
    topology = options.pop("topology", None) or world(max(nodes, 1), max(ranks_per_node, 1))
    arguments: dict[str, Any] = {
        "dtype": "float16",
        "accelerator": "ascend",
        "capabilities": CAPABILITIES,
        "nic": "cx7",
        "verbs": "soft",
        "schedule": scheduled,
        **options,
    }
    claims = arguments["capabilities"]
    constants = arguments.pop("constants", claims.constants)
    where = world_map(topology, ranks_per_node, constants, group=claims.process_group)
    return how(op, sizes, world=where, **arguments)


def make(nodes: int = 2, ranks_per_node: int = 2, **options: Any) -> LaunchPlan:
    """A plan of the main job, with any of the planner's arguments replaced."""
    return main_job(nodes, ranks_per_node, **options).plan


def main_job(nodes: int = 2, ranks_per_node: int = 2, **options: Any) -> Planned:
    """The same with its pipeline and alternatives."""
    sizes = {"m": 2048, "n": 1024, "k": 2048}
    sizes = {name: options.pop(name, size) for name, size in sizes.items()}
    op = options.pop("op", "all_gather_gemm")
    return explained(op, sizes, nodes, ranks_per_node, **options)
