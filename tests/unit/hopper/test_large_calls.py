"""Whatever is planned for Hopper is launched, however large it is: plans of all sizes up to what a
GPU's memory holds, and what a launch checks before it starts anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import devices
import pytest
from gpu_plans import gpu_plan
from plan_walk import WalkedWorld

from mkernel.backends.accelerators.cuda.attention import tuning as attention_tuning
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import FLAGS
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.backends.accelerators.hopper.schedule import ReduceSchedule
from mkernel.errors import Unsupported
from mkernel.plan.arguments import Around
from mkernel.plan.model import AttentionShape, Scales

MEMORY = 144 << 30
"""Bytes of the largest GPU of this architecture."""
WORLDS = (1, 2, 3, 4, 6, 8, 12, 16)


@pytest.fixture
def backend(made: Any) -> HopperAccelerator:
    """The backend, in a build with kernels."""
    return HopperAccelerator()


def refused(backend: HopperAccelerator, op: str, world: int, sizes: Any, **options: Any) -> str:
    """Return why a call is not planned or launched; empty: it is. ``sizes``: of tensors that fit."""
    try:
        made = gpu_plan(backend, op, world, sizes, **{"dtype": "bfloat16", **options})
        backend.workspace(made)
    except (Unsupported, ValueError) as error:
        return f"{op} of {sizes} on {world} ranks, {options}: {error}"
    return ""


def products() -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yield products of two bytes an element, as large as a GPU holds."""
    for world in WORLDS:
        for m in (16, 1 << 17, 1 << 24):
            rows = -(-m // world) * world
            for n, k in ((128, 64), (16_384, 6656), (1 << 17, 64), (1 << 20, 512)):
                for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
                    a = rows // world if op == "all_gather_gemm" else rows
                    out = rows // world if op == "gemm_reduce_scatter" else rows
                    if 2 * (a * k + n * k + out * n) <= MEMORY:
                        yield op, world, {"m": rows, "n": n, "k": k}


@pytest.mark.parametrize("path", ["auto", "fused"])
def test_products_of_all_sizes_are_launched(backend: HopperAccelerator, path: str) -> None:
    found = [refused(backend, *each, path=path) for each in products()]
    assert not any(found), [each for each in found if each][:5]


@pytest.mark.parametrize("fast", [True, False])
def test_e4m3_products_of_all_sizes_are_launched(backend: HopperAccelerator, fast: bool) -> None:
    """Tiles that are added up in float32 are small, so that they need the most flags."""
    around = Around(scales=Scales(mode="row", use_fast_accum=fast))
    how = {"dtype": "float8_e4m3fn", "b_layout": "column", "around": around}
    found = [refused(backend, *each, **how) for each in products()]
    assert not any(found), [each for each in found if each][:5]


def test_sums_of_all_sizes_are_launched(backend: HopperAccelerator) -> None:
    found = [
        refused(backend, "all_reduce", world, {"m": m, "n": n})
        for world in WORLDS
        for m in (1, 1 << 12, 1 << 17, 1 << 24)
        for n in (8, 2048, 1 << 18)
        if 4 * m * n <= MEMORY
    ]
    assert not any(found), [each for each in found if each][:5]


@pytest.mark.parametrize("way", ["parts", "kernel"])
def test_attention_of_all_lengths_is_launched(
    backend: HopperAccelerator, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", way)
    found = []
    for world in WORLDS:
        for rows in (128, 1 << 13, 1 << 18, 1 << 22):
            for heads, kv_heads in ((1, 1), (64, 8)):
                for causal in (False, True):
                    sizes = {
                        "batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": 128,
                        "sequence": rows * world, "causal": causal,
                    }  # fmt: skip
                    if 2 * 2 * (heads + kv_heads) * rows * 128 <= MEMORY:
                        found.append(refused(backend, "ring_attention", world, sizes))
    assert not any(found), [each for each in found if each][:5]


def test_calls_of_experts_are_launched_or_not_planned(backend: HopperAccelerator) -> None:
    """Planning refuses, by name, what kernels of a dispatch cannot number."""
    said, found = set(), []
    for world, tokens, hidden, (experts, top_k) in itertools.product(
        WORLDS, (1, 1 << 13, 1 << 20, 1 << 24), (64, 4096), ((8, 2), (256, 8), (1 << 15, 1))
    ):
        sizes = {"tokens": tokens, "features": 512, "experts": experts * world, "top_k": top_k}
        if 2 * tokens * max(hidden, 512) * top_k > MEMORY:
            continue
        found.append(refused(backend, "moe_combine", world, sizes))
        sizes["hidden"] = hidden
        found.append(refused(backend, "moe_gemm_combine", world, sizes))
        dispatched = refused(backend, "moe_dispatch_gemm", world, sizes)
        named = {what for what in ("bytes", "words", "experts on") if what in dispatched}
        said |= named
        found.append("" if named else dispatched)
        numbered = native().MoeSizes(world=world, tokens=tokens, top_k=top_k, experts=experts)
        if named and "bytes" not in named:
            with pytest.raises(ValueError, match=r"too many places|experts on a rank"):
                numbered.dispatch_bytes(2 * hidden, pieces=0)
    assert not any(found), [each for each in found if each][:5]
    assert said == {"bytes", "words", "experts on"}


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_flags_are_counted_as_kernels_number_them(backend: HopperAccelerator, op: str) -> None:
    """The most columns that a launch takes with the plan's tiling are those that are planned."""
    made, gathers = native(), op == "gemm_all_reduce"
    for tiling, (_, width) in tuning.CLUSTER_TILES.items():
        for world, rows in ((2, 1 << 16), (8, 5000)):
            one = tuning.reduce_flags(op, rows, width, world, tiling)
            most = FLAGS // one * width
            arguments = getattr(made.Tiling, tiling), False, gathers
            made.gemm_reduce_bytes(world, world, rows, most, *arguments)
            with pytest.raises(ValueError, match=f"flags of {FLAGS}"):
                made.gemm_reduce_bytes(world, world, rows, most + 8, *arguments)


def test_large_reductions_stay_fused(backend: HopperAccelerator) -> None:
    for world, m, n, k in ((2, 131_072, 16_384, 6656), (8, 131_072, 8192, 3584)):
        sizes = {"m": m, "n": n, "k": k}
        made = gpu_plan(backend, "gemm_all_reduce", world, sizes, dtype="bfloat16", path="fused")
        assert isinstance(made.schedule, ReduceSchedule)


def test_between_nodes_what_has_no_flags_is_not_planned(backend: HopperAccelerator) -> None:
    """There is no library path; all that is planned is launched."""
    gpus = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(8))
    nics = tuple(devices.nic(i, gpudirect=True) for i in range(8))
    world = WalkedWorld(backend, devices.world(*2 * [devices.node(gpus, nics)]), 8)
    sizes = {"m": 131_072, "n": 8192, "k": 3584}
    assert backend.workspace(world.plan("gemm_all_reduce", sizes, dtype="bfloat16")).areas
    scattered = world.plan("gemm_reduce_scatter", {**sizes, "n": 16_384}, dtype="bfloat16")
    assert backend.workspace(scattered).areas
    with pytest.raises(
        Unsupported, match=r"\[131072, 16384\] on 16 ranks.* 122880 flags .* 114688"
    ):
        world.plan("gemm_all_reduce", {**sizes, "n": 16_384}, dtype="bfloat16")


def test_more_ranks_than_flags_are_refused_by_name() -> None:
    """A what-if of 16,384 nodes ended in a division by zero, and one of attention not at all."""
    for gather in (tuning.gather, tuning.gather_between_nodes):
        with pytest.raises(Unsupported, match=f"{FLAGS + 1} ranks.* {FLAGS} flags"):
            gather(1, 1024, 8192, FLAGS + 1, 1, 132)
    shape = AttentionShape(
        batch=1, heads=64, kv_heads=8, head_dim=128, sequence=FLAGS << 10, causal=False
    )
    with pytest.raises(Unsupported, match=f"{FLAGS} ranks.* {2 * FLAGS} flags"):
        attention_tuning.piece_rows(shape, FLAGS, 2)
