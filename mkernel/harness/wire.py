"""T_m between nodes, where no library takes the way that the op takes: bytes by the rails' rate."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mkernel.harness.spec import GEMMS
from mkernel.plan.model import LaunchPlan
from mkernel.plan.predict import payloads
from mkernel.topology.model import Nic
from mkernel.topology.world_map import WorldMap

_GBPS_PER_GBS = 8
_DISPATCHES = ("moe_dispatch", "moe_dispatch_gemm")
_OPS = (*GEMMS, *_DISPATCHES, "moe_gemm_combine", "moe_combine", "ring_attention")
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
    if plan.nodes == 1 or plan.op not in _OPS or plan.nic is None:
        return None
    rates = [_gbps(nic) for nic in _nics(world, rank)]
    if not rates or None in rates:
        return None
    whole = plan.op in _DISPATCHES
    sent = payloads(plan.op, plan.shape, plan.dtype, plan.world_size, whole_tokens=whole)
    rate_gbs = sum(rate for rate in rates if rate is not None) / _GBPS_PER_GBS
    return (plan.nodes - 1) * sum(sent) / rate_gbs / 1e3


def _nics(world: WorldMap, rank: int) -> list[Nic]:
    seat = world.placement[rank]
    node = world.kinds.prototypes[world.kinds.of[seat.node]]
    return [nic for nic in node.nics if nic.id in seat.nics]


def _gbps(nic: Nic) -> float | None:
    """Return a port's rate. The software device names one also where it has no limit."""
    if not nic.emulated:
        return nic.speed_gbps
    asked = float(os.environ.get(_EMULATED_MBPS, "0")) / 1e3
    return asked or None
