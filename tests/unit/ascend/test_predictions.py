"""What plans predict, held against the replay of their records: no model of the other's making."""

from __future__ import annotations

import devices
import pytest
from plan_walk import WalkedWorld

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.ascend.schedule import ReduceSchedule
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.harness.floors import floor_us, floors
from mkernel.harness.modelled import rates_of
from mkernel.plan.model import LaunchPlan, OpName
from mkernel.plan.planner import explain
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.topology.reshape import split_into_nodes

from .rig import A3, scheduled, traces

SIZES = ((2048, 2048, 2048), (4096, 4096, 1024), (6144, 1536, 4096))
SUMS = ("gemm_reduce_scatter", "gemm_all_reduce")
WITHIN = 0.15
MACHINE = devices.world(devices.node())


def planned(
    op: OpName, ranks: int, m: int, n: int, k: int, out_dtype: str = "float16"
) -> LaunchPlan:
    return api.plan(
        op, m=m, n=n, k=k, ranks_per_node=ranks, accelerator="ascend", out_dtype=out_dtype
    )


def replayed_us(plan: LaunchPlan) -> float:
    return model(traces(plan), A3, tracks=False).total_us


def off(plan: LaunchPlan) -> float:
    """How far the prediction is from the replay, as a share of it."""
    assert plan.prediction is not None
    return plan.prediction.pipelined_us / replayed_us(plan) - 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("op", ["all_gather_gemm", *SUMS])
def test_gemms_take_what_their_plan_predicts(
    op: OpName, ranks: int, sizes: tuple[int, ...]
) -> None:
    assert abs(off(planned(op, ranks, *sizes))) <= WITHIN


@pytest.mark.parametrize(
    "op",
    [
        "all_gather_gemm",
        *SUMS,
        "moe_dispatch",
        "moe_dispatch_gemm",
        "moe_combine",
        "ring_attention",
    ],
)
def test_between_nodes_a_call_is_modelled_with_the_nics_that_its_plan_predicts_with(
    op: OpName,
) -> None:
    """Those of emulated nodes are half as fast as the machine's own."""
    sizes = sizes_or_defaults(op, {})
    plan = api.plan(op, nodes=2, ranks_per_node=2, accelerator="ascend", **sizes)
    assert plan.prediction is not None
    modelled = AscendAccelerator().model(plan, traces(plan), "pipelined").total_us
    assert abs(plan.prediction.pipelined_us / modelled - 1) <= WITHIN


@pytest.mark.parametrize(("sequence", "causal"), [(8192, False), (4096, True)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_attention_takes_what_its_plan_predicts(ranks: int, sequence: int, causal: bool) -> None:
    plan = api.plan(
        "ring_attention", ranks_per_node=ranks, accelerator="ascend", batch=1, heads=16, kv_heads=4,
        sequence=sequence, head_dim=128, causal=causal,
    )  # fmt: skip
    assert abs(off(plan)) <= WITHIN


@pytest.mark.parametrize(
    "sizes",
    [
        (8192, 512, 256, 24, 4),
        (2048, 1024, 512, 32, 8),
        (4096, 2048, 1024, 64, 2),
        (128, 512, 256, 8, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("op", ["moe_dispatch_gemm", "moe_combine"])
def test_moe_takes_what_its_plan_predicts(op: OpName, ranks: int, sizes: tuple[int, ...]) -> None:
    names = ("tokens", "hidden", "features", "experts", "top_k")
    given = dict(zip(names, sizes, strict=True))
    if op == "moe_combine":
        del given["hidden"]
    plan = api.plan(op, ranks_per_node=ranks, accelerator="ascend", **given)
    assert abs(off(plan)) <= WITHIN


@pytest.mark.parametrize("op", ["moe_dispatch_gemm", "moe_combine"])
def test_moe_comes_within_a_quarter_of_its_floor(op: OpName) -> None:
    """8192 tokens a rank, 8 ranks."""
    sizes = sizes_or_defaults(op, {"tokens": 8192})
    plan = api.plan(op, ranks_per_node=8, accelerator="ascend", **sizes)
    rates = rates_of(A3, plan.dtype)
    least = floor_us(floors(op, plan.shape, plan.dtype, 8, rates, "balanced"), rates)
    assert least < replayed_us(plan) <= 1.25 * least


@pytest.mark.parametrize("op", SUMS)
def test_float32_partials_are_predicted_too_and_take_longer(op: OpName) -> None:
    """They are listed beside the 16-bit ones, which sums of 16 bits travel in."""
    narrow, wide = (planned(op, 8, 4096, 4096, 1024, out) for out in ("float16", "float32"))
    assert narrow.part(ReduceSchedule).partial_dtype == "float16"
    assert wide.part(ReduceSchedule).partial_dtype == "float32"
    assert abs(off(wide)) <= WITHIN
    slower = scheduled(narrow, partial_dtype="float32")
    assert replayed_us(slower) > 1.4 * replayed_us(narrow)


@pytest.mark.parametrize("op", SUMS)
def test_both_kinds_of_partials_are_listed(op: OpName) -> None:
    accelerator = AscendAccelerator()
    where = WalkedWorld(accelerator, split_into_nodes(MACHINE, 1, 4, devices.SIM, devices.SOFT), 4)
    _, considered, _ = explain(
        op, {"m": 1024, "n": 1024, "k": 512}, dtype="bfloat16", out_dtype="bfloat16",
        world=where.map, accelerator="ascend", capabilities=where.claims, nic=None, verbs=None,
        schedule=accelerator.schedule,
    )  # fmt: skip
    listed = {each.option: each.chosen for each in considered if each.decision == "partials"}
    assert listed == {"bfloat16": True, "float32": False}


@pytest.mark.parametrize("op", SUMS)
def test_small_sums_keep_float32(op: OpName) -> None:
    """The error of few elements scatters beyond one rounding's limit."""
    assert planned(op, 2, 64, 64, 64).part(ReduceSchedule).partial_dtype == "float32"
    assert planned(op, 2, 128, 64, 64).part(ReduceSchedule).partial_dtype == "float16"


def test_another_schedule_than_the_predicted_one_would_be_found() -> None:
    """Planted fault: one core instead of all."""
    plan = planned("gemm_reduce_scatter", 2, 2048, 2048, 2048)
    assert abs(off(scheduled(plan, cube_cores=1))) > WITHIN
