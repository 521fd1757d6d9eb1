"""Plans for one node of GPUs that reach each other's memory, or do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.backend import PUT_OPS
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.model import Accelerator, Node, NumaNode, Topology
from mkernel.topology.world_map import world_map


def gpu_plan(
    backend: AcceleratorBackend,
    op: str,
    world: int,
    sizes: Mapping[str, int],
    *,
    no_p2p: bool = False,
    **options: Any,
) -> LaunchPlan:
    """``no_p2p``: the first two GPUs do not reach each other. ``options``: of the planner, such as
    ``dtype``."""
    gpus = tuple(
        Accelerator(id=f"cuda{i}", kind="cuda", name="H200", index=i, numa_node=0)
        for i in range(world)
    )
    node = Node(
        id=0, hostname="host", numa=(NumaNode(id=0, cpus=(0,)),), accelerators=gpus,
        no_p2p=(("cuda0", "cuda1"),) if no_p2p else (),
    )  # fmt: skip
    claims = options.pop("capabilities", None) or _claims(backend, gpus[0])
    constants = options.pop("constants", claims.constants)
    where = world_map(Topology(nodes=(node,)), world, constants, group=claims.process_group)
    return plan_of(
        op, sizes, world=where, nic=None, verbs=None, capabilities=claims,
        **{"accelerator": backend.name, "schedule": backend.schedule, **options},
    )  # fmt: skip


def _claims(backend: AcceleratorBackend, device: Accelerator) -> AcceleratorCapabilities:
    """On a machine of GPUs, as in a build that has the native module for them."""
    claims = backend.capabilities_on(device)
    return claims.model_copy(update={"put_ops": PUT_OPS}) if claims.process_group else claims
