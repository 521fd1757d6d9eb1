"""MoE between nodes on the host: plans, areas, and what calls queue, by stand-ins for kernels."""

from __future__ import annotations

from typing import Any

import devices
import pytest
import test_hopper_moe as one_node
import torch
from plan_walk import WalkedWorld, decorations
from test_hopper_moe import BESIDE, MAIN, SIZES, Started, called, run

from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.capabilities import MOE
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.moe import executors as moe
from mkernel.backends.accelerators.cuda.moe import nodes as moe_nodes
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.moe import executors as moe_upon
from mkernel.backends.accelerators.hopper.moe import tuning as moe_tuning
from mkernel.backends.accelerators.hopper.schedule import DispatchSchedule, GemmCombineSchedule
from mkernel.errors import Unsupported
from mkernel.plan.missing import of_op
from mkernel.plan.model import GemmCombineShape, LaunchPlan

FAR = ("send_far", "send_outbox", "land_far")
MODEL = {"hidden": 7168, "features": 2048, "experts": 256, "top_k": 8}


@pytest.fixture
def started(made: Any, monkeypatch: pytest.MonkeyPatch) -> Started:
    module = Started(made)
    monkeypatch.setattr(one_node, "STARTED", (*one_node.STARTED, *FAR))
    for each in (moe, moe_nodes, moe_upon):
        monkeypatch.setattr(each, "native", lambda: module)
    monkeypatch.setattr(DispatchContext, "network_of", lambda self, call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def two_nodes(direct: bool = True) -> WalkedWorld:
    gpus = (devices.gpu(0, name="NVIDIA H200"),)
    nics = (devices.nic(0, gpudirect=direct),)
    nodes = [devices.node(gpus, nics) for _ in range(2)]
    return WalkedWorld(HopperAccelerator(), devices.world(*nodes), 1)


def planned(op: str, direct: bool = True, **options: Any) -> LaunchPlan:
    sizes = one_node.sizes_of(op, options)
    return two_nodes(direct).plan(op, sizes, dtype="bfloat16")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", MOE)
def test_no_field_is_decoration(started: Started, op: str) -> None:
    usual = planned(op)
    assert decorations(usual, one_node.launches(started, two_nodes(), usual)) == []


def test_tokens_leave_with_their_ids_and_the_product_waits_for_neither(started: Started) -> None:
    plan = planned("moe_dispatch_gemm")
    run(called(plan))
    travels = [(each, BESIDE) for each in ("push_whole", "send_far", "send_far", "land_far")]
    assert started.names == [*travels, ("moe_route", MAIN), ("moe_grouped", MAIN)]
    started.told.clear()
    run(called(plan, "compute_only"))
    assert started.names == [("moe_route", MAIN), ("moe_grouped", MAIN)]


def test_rows_travel_so_too_and_a_routing_is_used_again_inside_a_node_alone(
    started: Started,
) -> None:
    run(called(planned("moe_dispatch")))
    travels = [(each, BESIDE) for each in ("push_whole", "send_far", "send_far", "land_far")]
    assert started.names == [*travels, ("moe_route", MAIN), ("copy_rows", MAIN)]
    for op in ("moe_dispatch", "moe_dispatch_gemm"):
        with pytest.raises(Unsupported, match="in worlds of one node; this one has 2"):
            planned(op, routed=True)


@pytest.mark.parametrize("op", MOE)
def test_kernels_are_loaded_before_one_waits_for_a_nic(started: Started, op: str) -> None:
    run(called(planned(op)))
    first = [("load_moe", 0), *([("load_grouped", 0)] if "gemm" in op else [])]
    assert started.loaded_at == first
    run(one_node.called(one_node.planned(op)))
    assert started.loaded_at == first


@pytest.mark.usefixtures("started")  # the plan asks what the build has
def test_tokens_travel_whole_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts of a NIC send a rank's tokens as they lie."""
    monkeypatch.setenv("MKERNEL_HOPPER_TOKENS", "wanted")
    assert planned("moe_dispatch_gemm").part(DispatchSchedule).push_blocks == 0
    assert one_node.planned("moe_dispatch_gemm").part(DispatchSchedule).push_blocks == 8


def test_sums_leave_behind_the_product(started: Started) -> None:
    plan = planned("moe_gemm_combine")
    assert plan.part(GemmCombineSchedule).returns == "ranks"
    run(called(plan))
    assert started.names == [
        ("push_whole", BESIDE), ("send_far", BESIDE), ("land_far", BESIDE), ("moe_grouped", MAIN),
        ("moe_home", MAIN), ("send_outbox", MAIN), ("land_far", MAIN), ("moe_home", MAIN),
    ]  # fmt: skip
    started.told.clear()
    run(called(plan, "compute_only"))
    assert not {name for name, _ in started.names} & set(FAR)


def test_a_combine_alone_adds_by_rank_in_float32(started: Started) -> None:
    call = called(planned("moe_combine"))
    run(call)
    assert started.names == [
        ("push_whole", BESIDE), ("send_far", BESIDE), ("land_far", BESIDE),
        ("moe_home", MAIN), ("send_outbox", MAIN), ("land_far", MAIN), ("moe_home", MAIN),
    ]  # fmt: skip
    home = started.given["Home"]
    assert (home["wide"], home["by_rank"]) == (True, True)
    started.told.clear()
    run(called(planned("moe_combine"), "compute_only"))
    assert started.names == [("moe_home", MAIN)] * 2


def test_results_by_slot_are_refused(started: Started) -> None:
    with pytest.raises(
        Unsupported, match="by ranks between nodes, not by slots; leave returns open"
    ):
        planned("moe_gemm_combine", returns="slots")
    claims = HopperAccelerator().capabilities()
    assert [of_op(op, "hopper", claims, 2) for op in MOE] == [()] * len(MOE)


@pytest.mark.parametrize("op", MOE)
def test_areas(started: Started, op: str) -> None:
    """NICs write where ranks of a node write; the outbox is behind it."""
    offset = native.native().DATA_OFFSET
    direct, staged = planned(op), planned(op, direct=False)
    assert (direct.routes.staged, staged.routes.staged) == (False, True)
    sizes = moe.sizes_of(2, SIZES["tokens"], SIZES["top_k"], SIZES["experts"])
    row_bytes = 2 * SIZES["hidden"]
    if op in ("moe_dispatch", "moe_dispatch_gemm"):
        whole, outbox = sizes.dispatch_bytes(row_bytes), 0
        slots = [sizes.far_tokens(row_bytes), sizes.far_ids(row_bytes)]
    else:
        if isinstance(direct.shape, GemmCombineShape):
            row_bytes *= 2 if direct.shape.partial_dtype == "float32" else 1
        else:
            row_bytes = 4 * SIZES["features"]
        whole, outbox = sizes.home_bytes(row_bytes, True), 2 * SIZES["tokens"] * row_bytes
        slots = [sizes.far_weights(), sizes.far_sums(row_bytes)]
        assert offset + sizes.outbox_offset(row_bytes) == whole
    found = HopperAccelerator().workspace(direct)
    assert (found.areas, found.staging) == ((whole + outbox,), 0)
    found = HopperAccelerator().workspace(staged)
    assert (found.areas, found.staging) == ((whole,), whole - offset + outbox)
    assert [slot.flag for slot in slots] == [0, 2]
    ends = [slot.offset + 2 * slot.bytes for slot in slots]
    assert ends[0] <= slots[1].offset
    assert ends[1] <= whole - offset


def test_a_place_is_left_for_what_lands_and_own_tokens_come_first(started: Started) -> None:
    near = one_node.planned("moe_dispatch_gemm", **MODEL, tokens=32768).part(DispatchSchedule)
    far = planned("moe_dispatch_gemm", **MODEL, tokens=32768).part(DispatchSchedule)
    assert far.blocks == near.blocks - 2
    assert far.early_tiles > 4 * near.early_tiles
    assert far.early_rows == near.early_rows == moe_tuning.TILE_ROWS


@pytest.mark.usefixtures("started")
def test_own_tiles_that_come_first_may_be_of_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """8192 tokens of DeepSeek-V3: an expert has 128 rows of each rank."""
    sizes = {**MODEL, "tokens": 4096}
    assert planned("moe_dispatch_gemm", **sizes).part(DispatchSchedule).early_tiles == 0
    constants = machine()
    experts = constants.experts.model_copy(update={"far_early_rows": 128})
    monkeypatch.setattr(
        moe_tuning, "machine", lambda: constants.model_copy(update={"experts": experts})
    )
    far = planned("moe_dispatch_gemm", **{**sizes, "tokens": 4100}).part(DispatchSchedule)
    assert far.early_rows == 128
    assert far.early_tiles > 100
    near = one_node.planned("moe_dispatch_gemm", **sizes).part(DispatchSchedule)
    assert (near.early_rows, near.early_tiles) == (256, 0)
    several = planned("moe_gemm_combine", **MODEL, tokens=4096).part(GemmCombineSchedule)
    assert several.blocks == far.blocks


def test_what_is_copied_first_where_ranks_share_a_device(started: Started) -> None:
    started.shared = True
    run(called(planned("moe_dispatch_gemm")))
    assert {stream for _, stream in started.names} == {MAIN}
