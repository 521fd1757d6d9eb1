"""The kernel whose tiles leave by mail: which calls take it, what is predicted, which tile it has."""

from __future__ import annotations

from typing import Any

import pytest
from test_paths import simple  # type: ignore[import-not-found]

from mkernel.plan import paths
from mkernel.plan.mailed_tiles import tiles
from mkernel.plan.model import DtypeName, GemmShape, OpName
from mkernel.topology.cost import MachineConstants, MailedTilesConstants, Tile

NARROW = Tile(rows=128, columns=128, tflops_per_core=4.0)
WIDE = Tile(rows=256, columns=256, cores=2, tflops_per_core=8.0)
MADE = MailedTilesConstants(
    least_rows=129, most_rows=1024, most_bytes=1 << 24, tiles=(NARROW,), loads_gbs=1e6,
    start_us=4.0, tile_us=2.0, exchange_us=3.0, egress_gbs=400.0,
)  # fmt: skip


def predicted(m: int, n: int, k: int, **more: Any) -> Any:
    made = MADE.model_copy(update=more)
    return tiles(m, n, k, 2.0 * m * n, 128, 1e6, made)


def test_results_of_one_wave_are_all_waited_for() -> None:
    found = predicted(512, 4096, 4096)
    assert found.waves == 1
    assert found.compute == pytest.approx(2 * 128 * 128 * 4096 / 4e6 + 2.0)
    assert found.exposed == pytest.approx(2 * 512 * 4096 / 400e3 + 3.0)
    assert found.total == pytest.approx(found.compute + found.exposed)


def test_results_of_all_waves_but_the_last_are_hidden() -> None:
    found = predicted(512, 8192, 4096)
    assert found.waves == 2
    assert found.exposed == pytest.approx(2 * 512 * 8192 / 400e3 / 2 + 3.0)


def test_a_slow_link_is_waited_for_longer() -> None:
    """It has not carried a wave's results when the next one is computed."""
    found = predicted(512, 8192, 64, tile_us=0.0)
    product = 2 * 2 * 128 * 128 * 64 / 4e6
    assert found.compute == pytest.approx(product)
    assert found.exposed == pytest.approx(2 * 512 * 8192 / 400e3 - product / 2 + 3.0)


def test_the_tile_that_ends_first_is_taken() -> None:
    both = {"tiles": (NARROW, WIDE)}
    assert predicted(512, 8192, 4096, **both).tile == WIDE
    assert predicted(384, 4096, 4096, **both).tile == NARROW  # of 512 rows a quarter would be empty


def test_rows_that_are_no_whole_lines_load_longer() -> None:
    loads = {"loads_gbs": 1000.0, "uneven": 1.5}
    whole, k, both = (
        predicted(512, *sizes, **loads) for sizes in ((4096, 4096), (4096, 4104), (4104, 4104))
    )
    assert k.compute == pytest.approx(1.5 * whole.compute * 4104 / 4096)
    assert both.compute == pytest.approx(1.5 * k.compute * 33 / 32)


@pytest.mark.parametrize(
    ("op", "m", "n", "dtype", "world", "taken"),
    [
        ("gemm_all_reduce", 512, 8192, "bfloat16", 2, True),
        ("gemm_all_reduce", 129, 8192, "float16", 4, True),
        ("gemm_all_reduce", 128, 8192, "bfloat16", 2, False),
        ("gemm_all_reduce", 1024, 8192, "bfloat16", 2, True),  # all that a call's mail may have
        ("gemm_all_reduce", 1024, 8200, "bfloat16", 2, False),
        ("gemm_all_reduce", 1024, 4096, "bfloat16", 4, False),  # of three peers
        ("gemm_all_reduce", 1025, 1024, "bfloat16", 2, False),
        ("gemm_all_reduce", 512, 128, "bfloat16", 2, False),  # so few travel in float32
        ("gemm_all_reduce", 512, 8192, "float32", 2, False),
        ("gemm_all_reduce", 512, 8192, "bfloat16", 1, False),
        ("gemm_reduce_scatter", 512, 8192, "bfloat16", 2, False),
    ],
)
def test_which_calls_it_takes(
    op: OpName, m: int, n: int, dtype: DtypeName, world: int, taken: bool
) -> None:
    made = MachineConstants.model_validate(simple().model_dump() | {"mailed_tiles": MADE})
    shape = GemmShape(m=m, n=n, k=1024)
    assert (paths.mailed_tiles(op, shape, dtype, world, made) is not None) == taken
    assert paths.mailed_tiles(op, shape, dtype, world, simple()) is None
    if not taken or world != 2:
        return
    both = paths.predict(op, shape, dtype, world, 128, 128, made)
    assert both is not None
    expected = tiles(m, n, 1024, 2.0 * m * n, 128, made.memory_gbs, MADE)
    assert both[0].fused_us == pytest.approx(4.0 + expected.total)
