"""The fused path of e4m3 operands on the host: when it is planned, and what calls hand to kernels."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_plans import gpu_plan
from hopper_calls import last_rank

from mkernel.backends.accelerators.cuda.capabilities import OPS
from mkernel.backends.accelerators.cuda.gemm import scaled_tuning
from mkernel.backends.accelerators.cuda.machine import CudaMachine, machine
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.gemm import fused as gemm
from mkernel.backends.accelerators.hopper.gemm import scaled_tuning as fused_tuning
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule, ReduceSchedule
from mkernel.errors import ArgumentError
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan, Scales
from mkernel.topology.cost import PathConstants

every_op = pytest.mark.parametrize("op", OPS)


def planned(
    op: str, mode: Any = "row", fast: bool = True, m: int = 8192, *, float32: bool = False,
    **options: Any,
) -> LaunchPlan:  # fmt: skip
    claims = HopperAccelerator().capabilities().model_copy(
        update={
            "ops": OPS, "library_ops": OPS, "scale_modes": ("tensor", "row", "block"),
            "fused_scale_modes": ("tensor", "row"),
            "fused_float32_scale_modes": ("tensor", "row") if float32 else (),
        }
    )  # fmt: skip
    around = Around(scales=Scales(mode=mode, use_fast_accum=fast))
    given = {
        "dtype": "float8_e4m3fn", "b_layout": "column", "around": around, "capabilities": claims,
        **options,
    }  # fmt: skip
    return gpu_plan(HopperAccelerator(), op, 2, {"m": m, "n": 2048, "k": 8192}, **given)


def measured(monkeypatch: pytest.MonkeyPatch, times: float | None) -> None:
    """The fused path is known to take so many times what a library's product does; None: not known."""
    product = machine().scaled.product
    if times is None:
        known(monkeypatch, None)
        return
    tiles = tuple(
        tile.model_copy(update={"tflops_per_core": tile.tflops_per_core / times})
        for tile in product.tiles
    )
    fused = product.model_copy(update={"tiles": tiles, "exchange_us": 0.0})
    known(monkeypatch, fused)


def known(monkeypatch: pytest.MonkeyPatch, fused: PathConstants | None) -> None:
    """Of the fused path, whatever bits it adds with; of the library's products the usual."""
    scaled = machine().scaled.model_copy(update={"fused": fused, "promoted": fused, "fast": None})
    made: CudaMachine = machine().model_copy(update={"scaled": scaled})
    for each in (scaled_tuning, fused_tuning):
        monkeypatch.setattr(each, "_MACHINE", made)


@pytest.mark.parametrize("mode", ["tensor", "row"])
@every_op
def test_it_is_planned_where_it_is_asked_for(op: str, mode: str) -> None:
    plan = planned(op, mode, path="fused")
    kind = GatherSchedule if op == "all_gather_gemm" else ReduceSchedule
    assert (plan.path, type(plan.schedule)) == ("fused", kind)
    assert plan.prediction is not None


@every_op
def test_it_is_not_planned_where_results_would_not_be_as_asked_for(op: str) -> None:
    assert planned(op, fast=False, path="fused").path == "library"
    assert planned(op, "block", fast=False, path="fused", float32=True).path == "library"
    few = planned(op, path="fused", m=2)
    assert few.path == ("fused" if op == "all_gather_gemm" else "library")


@pytest.mark.parametrize("mode", ["tensor", "row"])
@every_op
def test_sums_in_float32_have_tiles_of_their_own(op: str, mode: str) -> None:
    plan = planned(op, mode, fast=False, path="fused", float32=True)
    assert isinstance(plan.schedule, GatherSchedule | ReduceSchedule)
    assert (plan.path, plan.schedule.tiling) == ("fused", "promoted")
    if isinstance(plan.schedule, ReduceSchedule):
        assert plan.schedule.product_tiling == "promoted"
    fast = planned(op, mode, path="fused", float32=True).schedule
    assert isinstance(fast, GatherSchedule | ReduceSchedule)
    assert fast.tiling != "promoted"


@every_op
def test_tiles_that_add_with_other_bits_are_refused(op: str, made: Any) -> None:
    others: tuple[tuple[bool, TilingName], ...] = ((False, "wide"), (True, "promoted"))
    for fast, tiling in others:
        plan = planned(op, fast=fast, path="fused", float32=True, m=256)
        assert isinstance(plan.schedule, GatherSchedule | ReduceSchedule)
        gemm.product_of(plan, plan.schedule, plan.schedule.tiling)
        with pytest.raises(ArgumentError, match=r"plan\.schedule\.tiling"):
            gemm.product_of(plan, plan.schedule, tiling)


@every_op
def test_it_is_chosen_only_by_measured_times(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(times: float | None, **options: Any) -> LaunchPlan:
        measured(monkeypatch, times)
        return planned(op, m=8192 + 512 * int((times or 3) * 10), **options)  # none that is cached

    assert chosen(None).path == "library"
    fused = chosen(0.5)
    assert fused.path == "fused"
    assert fused.prediction is not None
    assert chosen(2.0).path == "library"
    assert chosen(0.6, fast=False).path == "library"
    assert chosen(0.4, fast=False, float32=True).path == "fused"
    assert chosen(0.7, path="library").path == "library"


def test_its_kernels_take_half_as_long_a_k(made: Any) -> None:
    """As many bytes."""
    plan = planned("gemm_reduce_scatter", path="fused")
    half = gpu_plan(
        HopperAccelerator(), "gemm_reduce_scatter", 2, {"m": 8192, "n": 2048, "k": 4096},
        dtype="bfloat16", b_layout="column", path="fused",
    )  # fmt: skip
    assert plan.schedule == half.schedule


def test_rows_and_their_scales_have_places_in_the_workspace(made: Any) -> None:
    for mode, scales in (("row", 8192), ("tensor", 2)):
        plan = planned("all_gather_gemm", mode, path="fused")
        needed = gemm.AllGatherExecutor.workspace(plan).areas[0]
        assert needed == made.DATA_OFFSET + made.gathered_scales_at(8192 * 8192) + 4 * scales
    assert made.gathered_scales_at(129) == 256


@every_op
def test_calls_hand_over_scales(op: str, made: Any) -> None:
    call = last_rank(planned(op, path="fused", m=256))
    tensors = gemm.Operands.of(call).tensors()
    assert tensors.a_scale == call.tensors["a_scale"].data_ptr() != 0
    assert tensors.b_scale == call.tensors["b_scale"].data_ptr() != 0


def test_products_that_kernels_do_not_have_are_refused(made: Any) -> None:
    product: dict[str, Any] = {
        "n": 64, "k": 64, "half": False, "n_major": False, "tiling": made.Tiling.wide, "band": 1,
        "scaling": made.Scaling.by_rows,
    }  # fmt: skip
    made.Product(**product)
    with pytest.raises(ValueError, match=r"k = 72; expected a positive multiple of 16"):
        made.Product(**{**product, "k": 72})
    with pytest.raises(ValueError, match="n_major = 1; expected 0 of e4m3 operands"):
        made.Product(**{**product, "n_major": True})
    promoted = {**product, "tiling": made.Tiling.promoted}
    made.Product(**promoted)
    with pytest.raises(ValueError, match="tiling = 4; expected another one than promoted"):
        made.Product(**{**promoted, "scaling": made.Scaling.none})
