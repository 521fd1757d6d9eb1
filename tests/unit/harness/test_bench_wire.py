"""T_m between nodes: the least bytes of an op by the rate of a rank's rails."""

from __future__ import annotations

import pytest

from mkernel.backends import registry
from mkernel.harness.spec import GEMMS
from mkernel.harness.wire import crosses_emulated, emulated, wire_us
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology
from mkernel.topology.world_map import WorldMap, world_map


def made(op: str, ranks: int, nic: Nic, nodes: int = 2) -> tuple[LaunchPlan, WorldMap]:
    """A plan on so many nodes of ``ranks`` ranks, each rank with NICs of its own like ``nic``."""
    every = [
        Node(
            id=node,
            hostname=f"host{node}",
            numa=(NumaNode(id=0, cpus=(0,)),),
            accelerators=tuple(
                Accelerator(
                    id=f"a{i}", kind="ascend", name="A", index=i, numa_node=0, emulated=True
                )
                for i in range(ranks)
            ),
            nics=tuple(
                nic.model_copy(update={"id": f"nic{i}", "name": f"nic{i}"}) for i in range(ranks)
            ),
        )
        for node in range(nodes)
    ]
    claims = registry.accelerator("ascend").capabilities()
    where = world_map(Topology(nodes=tuple(every)), ranks, claims.constants)
    sizes = {"m": 1024, "n": 256, "k": 512}
    if op == "ring_attention":
        sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "sequence": 384, "head_dim": 64}
    elif op not in GEMMS:
        sizes = {"tokens": 64, "hidden": 128, "features": 256, "experts": 12, "top_k": 2}
        if op == "moe_combine":
            del sizes["hidden"]
    plan = plan_of(
        op, sizes, dtype="float16", world=where, nic="cx7", verbs="soft",
        accelerator="ascend", capabilities=claims, schedule=registry.accelerator("ascend").schedule,
    )  # fmt: skip
    return plan, where


REAL = Nic(id="nic0", kind="mlx5", name="nic0", numa_node=0, speed_gbps=400.0)
SHARD = 512 * 512 * 2  # bytes of one of two ranks' rows of A, in half


@pytest.mark.parametrize(
    ("op", "ranks", "nodes", "nbytes"),
    [
        ("all_gather_gemm", 1, 2, SHARD),
        ("gemm_reduce_scatter", 1, 2, SHARD / 2),
        ("gemm_all_reduce", 1, 2, SHARD),
        ("all_gather_gemm", 2, 2, SHARD / 2),  # shared by the two ranks of the other node
        ("all_gather_gemm", 1, 4, 3 * SHARD / 2),
        ("moe_dispatch_gemm", 1, 2, 64 * 128 * 2),
        ("moe_dispatch_gemm", 2, 3, 2 * 64 * 128 * 2),
        ("moe_combine", 1, 2, 64 * 256 * 2),
        ("ring_attention", 1, 2, 2 * 3 * 2 * 192 * 64 * 2),
        ("ring_attention", 2, 2, 2 * 3 * 2 * 96 * 64 * 2),
    ],
)
def test_least_bytes_by_rate(op: str, ranks: int, nodes: int, nbytes: float) -> None:
    plan, where = made(op, ranks, REAL, nodes)
    assert wire_us(plan, where, 1) == pytest.approx(nbytes / 50e3)


def test_an_emulated_rail_has_the_rate_that_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft = REAL.model_copy(update={"kind": "soft", "emulated": True, "speed_gbps": 100.0})
    plan, where = made("all_gather_gemm", 1, soft)
    monkeypatch.delenv("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", raising=False)
    assert wire_us(plan, where, 0) is None  # it goes as fast as it can
    monkeypatch.setenv("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", "200000")
    assert wire_us(plan, where, 0) == pytest.approx(SHARD / 25e3)
    assert crosses_emulated(plan, where, 0)
    assert not crosses_emulated(*made("all_gather_gemm", 1, REAL), 0)
    assert not crosses_emulated(*made("all_gather_gemm", 2, soft, nodes=1), 0)
    assert emulated({"MKERNEL_SOFTVERBS_SEED": "1", "HOME": "/"}) == {"MKERNEL_SOFTVERBS_SEED": "1"}
