"""What users may choose of a plan and of the chip, and that the planner's own choices are good ones."""

from __future__ import annotations

from itertools import product

import pytest

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.ascend.machine import load_machine, machine, using
from mkernel.backends.accelerators.ascend.schedule import ProductSchedule
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan, OpName

from .rig import A3, changed, traces

GRID = tuple(product(((128, 256), (128, 128), (256, 128), (64, 256)), (28, 48), (1, 4)))
"""Tiles, vector cores that communicate, tiles a chunk."""


def planned(op: OpName, ranks: int, m: int, n: int, k: int, chunk: int | None = None) -> LaunchPlan:
    out = "float32" if op == "all_gather_gemm" else "float16"
    return api.plan(
        op, m=m, n=n, k=k, ranks_per_node=ranks, accelerator="ascend", out_dtype=out, chunk=chunk
    )


def modelled_us(plan: LaunchPlan) -> float:
    return model(traces(plan), A3, tracks=False).total_us


@pytest.mark.parametrize(
    ("op", "ranks", "sizes"),
    [
        ("gemm_reduce_scatter", 8, (2048, 2048, 2048)),
        ("gemm_all_reduce", 4, (4096, 2048, 1024)),
        ("all_gather_gemm", 8, (3072, 1536, 2048)),
    ],
)
def test_no_choice_of_a_grid_is_3_percent_faster(
    op: OpName, ranks: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modelled_us(planned(op, ranks, *sizes))
    times = {}
    for (rows, columns), comm, chunk in GRID:
        if op == "all_gather_gemm" and rows > 128:
            continue  # what it sends passes a vector core's buffers
        for name, value in (("TILE_M", rows), ("TILE_N", columns), ("COMM_CORES", comm)):
            monkeypatch.setenv(f"MKERNEL_ASCEND_{name}", str(value))
        times[rows, columns, comm, chunk] = modelled_us(planned(op, ranks, *sizes, chunk))
    assert len(set(times.values())) > len(times) / 4  # they are choices
    assert own <= 1.03 * min(times.values()), min(times, key=times.__getitem__)


@pytest.mark.parametrize("sizes", [(4096, 4096, 1024), (6144, 6144, 1536)], ids=str)
def test_short_products_are_stored_while_others_are_multiplied(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the cube's rate alone 0.8 at least, and the whole call gains."""
    m, n, k = sizes
    own = planned("gemm_reduce_scatter", 8, m, n, k)
    alone = model(traces(own), A3, "compute_only", tracks=False).total_us - A3.chip.launch_us
    macs = A3.cube.macs_per_cycle_16bit * A3.clock_ghz * 1e3 * A3.aic_cores
    assert m * n * k / macs > 0.8 * alone
    monkeypatch.setenv("MKERNEL_ASCEND_TILE_N", "256")  # the tile of longer products
    assert modelled_us(own) < modelled_us(planned("gemm_reduce_scatter", 8, m, n, k))


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_all_reduce"])
def test_plans_follow_the_settings(op: OpName, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"tile_m": 64, "tile_n": 128, "tile_k": 32, "cube_cores": 5, "comm_cores": 9}
    for name, value in wanted.items():
        monkeypatch.setenv(f"MKERNEL_ASCEND_{name.upper()}", str(value))
    monkeypatch.setenv("MKERNEL_ASCEND_MOST_CHUNKS", "6")
    part = planned(op, 2, 1024, 512, 256).part(ProductSchedule)
    found = part.chunking.model_dump() | part.model_dump()
    assert {name: found[name] for name in wanted} == wanted
    assert 1 < part.chunking.chunks_per_rank <= 6
    monkeypatch.setenv("MKERNEL_ASCEND_TILE_M", "24")
    with pytest.raises(ArgumentError, match="MKERNEL_ASCEND_TILE_M"):
        planned(op, 2, 1024, 512, 256)


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_all_reduce"])
@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"CUBE_CORES": 25}, "MKERNEL_ASCEND_CUBE_CORES = 25 .* at most 24, the cube cores"),
        ({"COMM_CORES": 49}, "MKERNEL_ASCEND_COMM_CORES = 49 .* at most 48, the vector cores"),
        ({"CUBE_CORES": 21, "MACHINE": "a2-20"}, "MKERNEL_ASCEND_CUBE_CORES = 21 .* at most 20"),
        ({"TILE_M": 256, "TILE_N": 256}, "TILE_M, MKERNEL_ASCEND_TILE_N = 256, 256 .* of L0C"),
        ({"TILE_N": 512, "TILE_M": 16}, "MKERNEL_ASCEND_TILE_N = 16, 512 .* of L0B"),
        ({"TILE_K": 1024}, "MKERNEL_ASCEND_TILE_K = 1024 .* of L1"),
    ],
    ids=str,
)
def test_settings_beyond_the_chip_are_refused_by_name(
    op: OpName, wanted: dict[str, int | str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wanted.items():
        monkeypatch.setenv(f"MKERNEL_ASCEND_{name}", str(value))
    with pytest.raises(ArgumentError, match=said):
        planned(op, 2, 1024, 512, 256)


def test_chips_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cube in (("a3", 24), ("a2-24", 24), ("a2-20", 20)):
        monkeypatch.setenv("MKERNEL_ASCEND_MACHINE", name)
        assert machine() == load_machine(name)
        claims = AscendAccelerator().capabilities()
        assert (claims.compute_cores, claims.comm_cores) == (cube, 2 * cube)
        part = planned("gemm_all_reduce", 2, 1024, 512, 256).part(ProductSchedule)
        assert (part.cube_cores, part.comm_cores) == (cube, 2 * cube)
    monkeypatch.setenv("MKERNEL_ASCEND_MACHINE", "a4")
    with pytest.raises(ArgumentError, match=r"machine = 'a4'.*a3, a2-24, a2-20"):
        machine()


def test_plans_are_made_for_the_machine_at_hand() -> None:
    sizes = 2, 1024, 1024, 1024
    usual = planned("gemm_all_reduce", *sizes)
    slow = changed(pipes={"mte2_gbs": A3.pipes.mte2_gbs / 16})
    with using(slow):
        found = planned("gemm_all_reduce", *sizes)
    assert usual.prediction is not None
    assert found.prediction is not None
    assert found.prediction.compute_us > 2 * usual.prediction.compute_us
    assert planned("gemm_all_reduce", *sizes) == usual
