"""T_m between nodes, where no library takes the way that the op takes: bytes by the rails' rate."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mkernel.harness.spec import GEMMS
from mkernel.plan.model import (
    DTYPE_BYTES,
    AttentionShape,
    CombineShape,
    GemmCombineShape,
    LaunchPlan,
    MoeShape,
)
from mkernel.topology.model import Nic
from mkernel.topology.world_map import WorldMap

_GBPS_PER_GBS = 8
_EMULATED = "MKERNEL_SOFTVERBS_"
_EMULATED_MBPS = _EMULATED + "BANDWIDTH_MBPS"


def emulated(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return how the software RDMA device was asked to behave; empty: as fast as it can."""
    return {name: value for name, value in environment.items() if name.startswith(_EMULATED)}


def crosses_emulated(plan: LaunchPlan, world: WorldMap, rank: int) -> bool:
    """Return whether CPUs of this host stand for a NIC that the rank's calls go through."""
    return (
        plan.nodes > 1 and plan.nic is not None and any(nic.emulated for nic in _nics(world, rank))
    )


def wire_us(plan: LaunchPlan, world: WorldMap, rank: int) -> float | None:
    """Return the microseconds that this rank's rails need for the least bytes of an op: of each other
    node one shard, which ranks there may share; twice that where sums go back. Of MoE a shard is the
    own tokens, or what comes home of as many; of attention the own keys and values. None: another op,
    one node, or rails without a rate."""
    nbytes = _shard_bytes(plan)
    if plan.nodes == 1 or nbytes is None or plan.nic is None:
        return None
    rates = [_gbps(nic) for nic in _nics(world, rank)]
    if not rates or None in rates:
        return None
    both_ways = 2 if plan.op == "gemm_all_reduce" else 1
    rate_gbs = sum(rate for rate in rates if rate is not None) / _GBPS_PER_GBS
    return both_ways * (plan.nodes - 1) * nbytes / rate_gbs / 1e3


def _nics(world: WorldMap, rank: int) -> list[Nic]:
    seat = world.placement[rank]
    node = world.kinds.prototypes[world.kinds.of[seat.node]]
    return [nic for nic in node.nics if nic.id in seat.nics]


def _shard_bytes(plan: LaunchPlan) -> float | None:
    shape = plan.shape
    if isinstance(shape, MoeShape) and plan.op == "moe_dispatch_gemm":
        return shape.tokens * shape.hidden * DTYPE_BYTES[plan.dtype]
    if isinstance(shape, GemmCombineShape) and plan.op == "moe_gemm_combine":
        return shape.tokens * shape.hidden * DTYPE_BYTES[shape.partial_dtype]
    if isinstance(shape, CombineShape) and plan.op == "moe_combine":
        return shape.tokens * shape.features * DTYPE_BYTES[plan.dtype]
    if isinstance(shape, AttentionShape) and plan.op == "ring_attention":
        rows = shape.batch * shape.kv_heads * shape.sequence / plan.world_size
        return 2 * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    if plan.op not in GEMMS:
        return None
    width = plan.gemm.k if plan.op == "all_gather_gemm" else plan.gemm.n
    return plan.gemm.m * width * DTYPE_BYTES[plan.dtype] / plan.world_size


def _gbps(nic: Nic) -> float | None:
    """Return a port's rate. The software device names one also where it has no limit."""
    if not nic.emulated:
        return nic.speed_gbps
    asked = float(os.environ.get(_EMULATED_MBPS, "0")) / 1e3
    return asked or None
