"""Tiles of a last wave in parts along K, on the host: when a plan cuts them, and what that needs."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_plans import gpu_plan

from mkernel.backends.accelerators.hopper import gemm, native, tuning
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.capabilities import OPS
from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule, ReduceSchedule
from mkernel.errors import ArgumentError, BackendUnavailable
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan, Scales
from mkernel.topology.cost import CutTiles, PathConstants, Tile, last_wave

PROCESSORS = 132
CLUSTERS = PROCESSORS // 2


CUT = CutTiles(splits=(2, 3, 4), part_us=5.0, kept_us=2.0)


def fused(cut: CutTiles | None) -> PathConstants:
    """Of the fused path, whose tiles are all cut so."""
    found = machine().constants.fused
    assert found is not None
    tiles = tuple(each.model_copy(update={"cut": cut}) for each in found.tiles)
    return found.model_copy(update={"tiles": tiles})


def _claims() -> AcceleratorCapabilities:
    return HopperAccelerator().capabilities().model_copy(update={"ops": OPS, "library_ops": OPS})


def planned(op: str, m: int, n: int, k: int, world: int = 2) -> LaunchPlan:
    options: dict[str, Any] = {"dtype": "bfloat16", "path": "fused", "capabilities": _claims()}
    return gpu_plan(HopperAccelerator(), op, world, {"m": m, "n": n, "k": k}, **options)


@pytest.fixture
def made() -> Any:
    try:
        return native.native()
    except BackendUnavailable as error:
        pytest.skip(f"this build has no kernels for Hopper: {error}")


def test_parts_take_rounds_and_each_that_is_kept_costs() -> None:
    """Ten places; a tile of 100 us and its fixed 2; for being a part 3, to add one 4."""
    cut = CutTiles(splits=(2, 3), part_us=3.0, kept_us=4.0)
    tile = Tile(rows=1, columns=1, tflops_per_core=1.0, cut=cut)

    def of(tiles: int, tile_us: float = 100.0) -> tuple[float, int]:
        return last_wave(tile, 2.0, tiles, 10, lambda _: tile_us)

    assert of(9) == (102.0, 1)  # 18 are two rounds
    assert of(5) == (2 + 50 + 3 + 4, 2)
    assert of(3) == (pytest.approx(2 + 100 / 3 + 3 + 8), 3)
    assert of(6) == (pytest.approx(2 * (2 + 100 / 3 + 3 + 8)), 3)
    assert of(2, 20.0) == (2 + 10 + 3 + 4, 2)
    assert of(2, 8.0) == (10.0, 1)  # short
    whole = tile.model_copy(update={"cut": None})
    assert last_wave(whole, 2.0, 5, 10, lambda _: 100.0) == (102.0, 1)


def test_parts_of_a_last_wave_are_as_fast_as_so_many_at_once() -> None:
    """Six places; a tile takes 10 us more for each that is under way beside it."""
    tile = Tile(
        rows=1, columns=1, tflops_per_core=1.0, cut=CutTiles(splits=(2,), part_us=1.0, kept_us=0.0)
    )
    assert last_wave(tile, 0.0, 3, 6, lambda at_once: 10.0 * at_once) == (30.0, 1)  # 6 of 31 us
    assert last_wave(tile, 0.0, 3, 6, lambda at_once: 9.0 * at_once + 9) == (32.5, 2)


@pytest.mark.parametrize(
    ("left", "splits"), [(0, 1), (1, 4), (16, 4), (22, 3), (33, 2), (40, 3), (66, 1), (60, 1)]
)
def test_a_last_wave_that_leaves_clusters_idle_is_cut(left: int, splits: int) -> None:
    tiles = 3 * CLUSTERS + left
    assert tuning.last_splits("wide", tiles, 8192, PROCESSORS, fused(CUT)) == splits
    assert tuning.last_splits("deep", tiles, 8192, PROCESSORS, fused(CUT)) == splits
    assert tuning.last_splits("wide", tiles, 128, PROCESSORS, fused(CUT)) == 1  # short
    assert tuning.last_splits("promoted", tiles, 8192, PROCESSORS, fused(CUT)) == 1
    assert tuning.last_splits("wide", tiles, 8192, PROCESSORS, fused(None)) == 1
    assert tuning.last_splits("wide", tiles, 8192, PROCESSORS, None) == 1


def test_plans_cut_as_their_tiles_and_blocks_say() -> None:
    """3394 rows of two ranks are 7 clusters of each, times 16: 224 tiles, three waves of 66 and 26. The
    target's 1024 tiles are fifteen and 34, which are two of thirds."""
    gathers = planned("all_gather_gemm", 3394, 4056, 8448).part(GatherSchedule)
    assert (gathers.tiling, gathers.push_blocks, gathers.last_splits) == ("wide", 0, 2)
    reduces = planned("gemm_reduce_scatter", 3394, 4056, 8448).part(ReduceSchedule)
    assert (reduces.tiling, reduces.last_splits) == ("wide", 2)
    target = planned("all_gather_gemm", 16_384, 4096, 16_384).part(GatherSchedule)
    assert target.last_splits == 3


def test_an_all_reduce_has_tiles_for_the_rows_there_are() -> None:
    """1046 rows are five clusters', three of the first owner and two of the other: 320 tiles of 256
    columns, four waves of 66 and 56. With three of each they would be 384, five and 54."""
    plan = planned("gemm_all_reduce", 1046, 16_192, 6784)
    how = plan.part(ReduceSchedule)
    assert (how.tiling, how.rows, how.last_splits) == ("wide", 768, 1)
    assert tuning.owned_rows(plan.op, 1046, 2, how.rows) == (1, 1046)
    assert tuning.tiles_shared_out(plan.op, plan.gemm, 2, how) == (320, PROCESSORS)
    scattered = planned("gemm_reduce_scatter", 1046, 16_192, 6784)
    rows = scattered.part(ReduceSchedule).rows
    assert tuning.owned_rows(scattered.op, 1046, 2, rows) == (2, 523)


def test_narrow_tiles_are_not_cut() -> None:
    """By what a cut saves them the fused path was predicted to be faster than the library's, of which
    636 x 3712 x 12608 took 1.6 times as long."""
    own = machine().constants.fused
    assert tuning.last_splits("narrow", 40, 12_608, PROCESSORS, fused(CUT)) > 1
    assert tuning.last_splits("narrow", 40, 12_608, PROCESSORS, own) == 1
    options: dict[str, Any] = {"dtype": "bfloat16", "capabilities": _claims()}
    sizes = {"m": 636, "n": 3712, "k": 12_608}
    auto = gpu_plan(HopperAccelerator(), "all_gather_gemm", 2, sizes, **options)
    assert auto.path == "library"


@pytest.mark.usefixtures("made")
def test_nothing_is_cut_of_e4m3_operands_or_between_nodes() -> None:
    plan = planned("all_gather_gemm", 3394, 4056, 8448)
    for changes in ({"nodes": 2}, {"scales": Scales(mode="row", use_fast_accum=True)}):
        other = plan.model_copy(update=changes)
        with pytest.raises(ArgumentError, match=r"plan\.schedule\.last_splits"):
            gemm._product(other, plan.schedule, plan.schedule.tiling, 2)


def test_what_is_kept_lies_behind_all_else(made: Any) -> None:
    """A split that is kept is 256 x 256 floats of a cluster; the last of a tile is not."""
    options: dict[str, Any] = {
        "n": 4096, "k": 8192, "half": False, "n_major": False, "tiling": made.Tiling.wide,
        "band": 8, "blocks": PROCESSORS,
    }  # fmt: skip

    def needed(splits: int, others: int = 0) -> int:
        product = made.Product(**options, last_splits=splits)
        found: int = made.with_kept_splits(1000, product, 2, 1792, others)
        return found

    each = 256 * 256 * 4
    left = 2 * 7 * 16 % CLUSTERS
    assert needed(1) == 1000
    assert needed(2) == 1024 + left * each
    assert needed(3) == 1024 + 2 * left * each
    fewer = (2 * 7 * 16) % (CLUSTERS - 8 // 2)  # of 62 clusters more are left
    assert needed(2, 8) == 1024 + max(left, fewer) * each
    with pytest.raises(ValueError, match=r"splits need \d+ flags"):
        needed(400)
    for wrong in ({"blocks": 0}, {"scaling": made.Scaling.by_rows}):
        with pytest.raises(ValueError, match="last_splits = 2; expected 1, or more"):
            made.Product(**{**options, **wrong}, last_splits=2)
    with pytest.raises(ValueError, match="last_splits = 0"):
        made.Product(**options, last_splits=0)


def test_workspaces_have_room_for_it(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """26 tiles of clusters keep a part each, behind what the call needs besides: the rows of all ranks,
    or what the other rank puts here, half of it. (A collective of the whole product needs more.)"""
    monkeypatch.setattr(gemm, "_staging", lambda _: 0)
    m, n, k = 3394, 4056, 8448
    kept, before = 26 * 256 * 256 * 4, made.DATA_OFFSET
    gathers, scatters, sums = gemm.AllGatherExecutor, gemm.ReduceExecutor, gemm.ReduceExecutor
    for op, executor, world, needed in (
        ("all_gather_gemm", gathers, 2, before + m * k * 2 + kept),
        ("gemm_reduce_scatter", scatters, 2, before + m // 2 * n * 2 + kept),
        ("all_gather_gemm", gathers, 1, before + kept),
        ("gemm_all_reduce", sums, 1, before + kept),
    ):
        found = executor.workspace(planned(op, m, n, k, world)).areas[0]
        assert found >= needed, (op, world, found - needed)
