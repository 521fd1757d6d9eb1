"""The backend for CUDA devices plans a library's products and exchanges, and runs none of the kernels
that backends upon it have."""

from __future__ import annotations

from typing import Any, get_args

import devices
import pytest
from gpu_plans import gpu_plan

from mkernel.backends import registry
from mkernel.backends.accelerators.cuda.attention.in_parts import AttentionExecutor
from mkernel.backends.accelerators.cuda.attention.in_pieces import AttentionInPiecesExecutor
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.collectives.all_reduce import SumExecutor
from mkernel.backends.accelerators.cuda.gemm.gather_parts import GatherPartsExecutor
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.gemm.reduce_parts import ReducePartsExecutor
from mkernel.backends.accelerators.cuda.settings import CudaSettings, settings_of
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.backends.accelerators.streams.backend import StreamsAccelerator
from mkernel.errors import Unsupported
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan, OpName, Scales

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
LARGE = {"m": 8192, "n": 4096, "k": 4096}
ATTENTION = {"batch": 1, "heads": 16, "kv_heads": 16, "sequence": 32768, "head_dim": 128}


def planned(op: str, sizes: dict[str, int], world: int = 2, **options: Any) -> LaunchPlan:
    return gpu_plan(CudaAccelerator(), op, world, sizes, **{"dtype": "bfloat16", **options})


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("m", [16, 512, 8192])
def test_products_are_a_librarys_in_as_many_parts_as_are_fastest(op: str, m: int) -> None:
    made = planned(op, {**LARGE, "m": m})
    parts = GatherPartsExecutor if op == GEMMS[0] else ReducePartsExecutor
    assert made.path == "library"
    assert CudaAccelerator.executor_of(made) in (LibraryExecutor, parts)
    assert made.prediction is not None
    assert made.prediction.fused_us is None
    rival = gpu_plan(
        HopperAccelerator(), op, 2, {**LARGE, "m": m}, dtype="bfloat16", path="library"
    )
    assert made.schedule == rival.schedule
    assert made.prediction.pipelined_us == pytest.approx(rival.prediction.pipelined_us)  # type: ignore[union-attr]


@pytest.mark.parametrize("op", GEMMS)
def test_e4m3_operands_are_a_librarys_too(op: str) -> None:
    scales = Around(scales=Scales(mode="row", use_fast_accum=True))
    options: dict[str, Any] = {"out_dtype": "bfloat16", "b_layout": "column", "around": scales}
    made = planned(op, LARGE, dtype="float8_e4m3fn", **options)
    assert (made.path, made.scales) == ("library", scales.scales)
    assert CudaAccelerator().capabilities().fused_scale_modes == ()


@pytest.mark.parametrize("op", GEMMS)
def test_a_path_that_is_not_there_is_refused(op: str) -> None:
    with pytest.raises(Unsupported, match=f"'cuda' has no kernel that does all of '{op}'; set"):
        planned(op, LARGE, path="fused")


def test_sums_and_attention_take_kernels_that_any_device_has() -> None:
    sums = planned("all_reduce", {"m": 64, "n": 4096})
    assert CudaAccelerator.executor_of(sums) is SumExecutor
    parts = planned("ring_attention", ATTENTION)
    assert parts.schedule.library == "cudnn"  # type: ignore[attr-defined]
    assert CudaAccelerator.executor_of(parts) is AttentionExecutor
    own = gpu_plan(HopperAccelerator(), "ring_attention", 2, ATTENTION, dtype="bfloat16")
    assert own.schedule != parts.schedule
    long = planned("ring_attention", {**ATTENTION, "sequence": 1 << 20, "heads": 64}, world=8)
    assert CudaAccelerator.executor_of(long) is AttentionInPiecesExecutor


def test_ops_that_it_lacks_are_named() -> None:
    claimed = CudaAccelerator().capabilities().ops
    lacking = {op for op in get_args(OpName) if op not in claimed}
    assert all(op.startswith("moe") and op.endswith("backward") for op in lacking)
    other = planned("all_reduce", {"m": 64, "n": 4096})
    other = other.model_copy(update={"op": "moe_combine_backward"})
    with pytest.raises(
        Unsupported, match="'cuda' has no kernel of moe_combine_backward; it has: all_reduce"
    ):
        CudaAccelerator.executor_of(other)


def test_what_hopper_has_besides_is_its_own() -> None:
    base, upon = CudaAccelerator().capabilities(), HopperAccelerator().capabilities()
    assert {*base.ops} == {*upon.ops}
    assert (base.scaled_experts, upon.scaled_experts) == (False, True)
    assert "torch._scaled_grouped_mm takes them by rows" in base.why_no_scaled_experts
    assert base.only_library_ops == base.library_ops == upon.library_ops
    assert upon.only_library_ops == ()
    preferred = [
        each.preference for each in (StreamsAccelerator, CudaAccelerator, HopperAccelerator)
    ]
    assert preferred == sorted({*preferred})
    assert type(registry.accelerator("cuda")) is CudaAccelerator


def test_each_has_settings_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CUDA_OUTPUTS", "1")
    monkeypatch.setenv("MKERNEL_HOPPER_OUTPUTS", "2")
    assert [type(settings_of(name)) for name in ("cuda", "hopper")] == [
        CudaSettings,
        HopperSettings,
    ]
    assert [settings_of(name).outputs for name in ("cuda", "hopper")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "by_cuda", "modes"),
    [
        ("NVIDIA A100-SXM4-80GB", True, ()),
        ("NVIDIA L40S", True, ("tensor", "row")),
        ("NVIDIA H200", True, ("tensor", "row", "block")),
        ("NVIDIA B200", True, ("tensor", "row")),
        ("10de:2b85", True, ("tensor", "row")),  # of 12.0, by its PCI id
        ("Tesla V100-SXM2-16GB", False, None),
        ("NVIDIA of next year", False, None),
    ],
)
def test_claims_are_those_of_the_device(name: str, by_cuda: bool, modes: Any) -> None:
    device = devices.gpu(0, name=name)
    claims = CudaAccelerator().capabilities_on(device)
    assert (claims.misfit(device) is None) == by_cuda
    if by_cuda:
        assert claims.scale_modes == modes
    else:
        assert "has kernels for sm_80 and later only, not for" in str(claims.misfit(device))
    upon = HopperAccelerator().capabilities_on(device)
    assert (upon.misfit(device) is None) == (name == "NVIDIA H200")


def test_a_later_device_than_any_that_is_known_runs_what_is_compiled_for_earlier_ones() -> None:
    for architecture, fits in (
        ("sm_75", False),
        ("sm_80", True),
        ("sm_90a", True),
        ("sm_130", True),
    ):
        device = devices.gpu(0, architecture=architecture)
        assert (CudaAccelerator().capabilities_on(device).misfit(device) is None) == fits
