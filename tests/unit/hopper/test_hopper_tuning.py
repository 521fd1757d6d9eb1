"""How the GEMM kernels are scheduled, and what plans need of the workspace, without a GPU."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from gpu_plans import gpu_plan

from mkernel.backends.accelerators.cuda.capabilities import MOST_RANKS, OPS
from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule
from mkernel.errors import MkernelError
from mkernel.plan import few_rows, planner
from mkernel.plan.model import GemmShape, LaunchPlan

PROCESSORS = 132
RESULTS = Path(__file__).parents[3] / "bench/results"


def gathered(rows: int, n: int, k: int, world: int, chunk: int) -> GatherSchedule:
    return tuning.gather(rows, n, k, world, chunk, PROCESSORS)


def by_copy_engines(
    how: GatherSchedule, tiling: TilingName, rows: int, slices: int = 1
) -> GatherSchedule:
    """The schedule, but for what moves the rows."""
    moved = {"push_blocks": 0, "slices": slices}
    return how.model_copy(update={"tiling": tiling, "chunk_rows": rows, **moved})


def test_small_sums_of_few_rows_travel_unrounded() -> None:
    few = machine().constants.few_rows
    assert few is not None
    for m, product in ((16, "float32"), (17, "bfloat16")):
        made = tuning.few_rows(
            GemmShape(m=m, n=4096, k=512), "bfloat16", "bfloat16", PROCESSORS, few
        )
        assert made.product == product
        assert (made.splits, made.blocks) == (3, 114)


def test_few_tiles_are_narrow() -> None:
    assert tuning.tiling(512, 4, 1024, 4096, PROCESSORS) == "narrow"
    assert tuning.tiling(1024, 4, 1024, 4096, PROCESSORS) == "wide"  # 64 clusters of 66
    assert tuning.tiling(2048, 4, 1024, 2048, PROCESSORS) == "wide"
    assert tuning.tiling(2048, 4, 2048, 8192, PROCESSORS) == "wide"


def test_medium_tiles_where_they_fill_the_last_wave() -> None:
    """144 clusters of wide tiles are 3 waves of 66; 192 of medium ones also, of three quarters."""
    assert tuning.tiling(2048, 2, 2184, 5120, PROCESSORS) == "medium"
    assert tuning.tiling(2048, 2, 2048, 5120, PROCESSORS) == "wide"  # 128: 2 waves
    assert tuning.tiling(8192, 2, 8192, 8192, PROCESSORS) == "wide"


@pytest.mark.parametrize(
    ("file", "mean", "most"),
    [
        ("tile_menu_h100.json", 1.015, 1.1),
        ("tile_menu_fresh_h100.json", 1.015, 1.2),
        ("tile_menu_unaligned_h100.json", 1.02, 1.2),
    ],
)
def test_the_tiling_is_one_that_was_measured_as_fast(file: str, mean: float, most: float) -> None:
    """Of 64 products on one GPU the time by the chosen tiling over that by the fastest. Those of the
    fresh file were drawn after the constants were fitted."""
    rows = json.loads((RESULTS / file).read_text())["figures"]["rows"]
    costs = [
        row[tuning.tiling(row["m"], 1, row["n"], row["k"], PROCESSORS)]
        / min(row[name] for name in ("wide", "medium", "narrow"))
        for row in rows
    ]
    assert len(costs) == 64
    assert statistics.geometric_mean(costs) <= mean
    assert max(costs) <= most


def test_rows_that_share_lines_are_not_for_narrow_tiles() -> None:
    """Each row of a box then touches two lines, and narrow tiles load most of them."""
    assert tuning.tiling(968, 1, 3016, 3792, PROCESSORS) == "medium"  # 64 clusters of 66
    assert tuning.tiling(2456, 1, 3560, 9656, PROCESSORS) == "medium"  # 3 waves, as of wide ones
    assert tuning.tiling(2048, 1, 9624, 1752, PROCESSORS) == "wide"
    assert tuning.tiling(728, 1, 632, 6456, PROCESSORS) == "narrow"  # 30 tiles in all


def test_large_shards_are_copied_and_small_ones_pushed() -> None:
    large = gathered(1024, 1024, 16_384, 4, 1024)
    assert large == by_copy_engines(large, "wide", 1024, slices=tuning.SLICES)
    assert gathered(256, 1024, 4096, 4, 256).push_blocks == tuning.PUSH_BLOCKS
    assert gathered(3, 1024, 4096, 4, 3).chunk_rows == 3
    assert gathered(1024, 1024, 4096, 1, 1024).push_blocks == 0


def test_blocks_push_only_where_the_product_does_not_miss_them() -> None:
    """192 clusters of tiles are 3 waves of 66 clusters, but 4 of 62."""
    assert gathered(1024, 6144, 1536, 2, 1024).push_blocks == 0
    assert gathered(1024, 5632, 1536, 2, 1024).push_blocks == tuning.PUSH_BLOCKS  # 176: 3 of either


def test_rows_are_copied_where_slices_bring_the_end_forward() -> None:
    """Blocks would have the 8 MiB there sooner, but whole: a tile of all of K is left to do."""
    copied = gathered(1024, 1024, 4096, 4, 1024)
    assert copied == by_copy_engines(copied, "wide", 1024, slices=tuning.SLICES)
    assert gathered(1024, 1024, 4096, 4, 512).push_blocks == tuning.PUSH_BLOCKS  # as planned


def test_every_thread_that_pushes_has_a_part_of_a_shard() -> None:
    assert gathered(1024, 2560, 4096, 2, 1024).chunk_rows == tuning.PUSHED_ROWS
    assert gathered(512, 1024, 4096, 2, 512).chunk_rows == 512 // tuning.PUSHERS
    assert gathered(64, 1536, 4096, 4, 64).chunk_rows == 16  # 128 KiB
    assert gathered(64, 1536, 16_384, 4, 64).chunk_rows == 4


def test_a_planned_chunk_is_kept_while_there_are_flags() -> None:
    kept = gathered(4096, 1024, 4096, 4, 1024)
    assert kept == by_copy_engines(kept, "wide", 1024)
    many = gathered(4096, 1024, 4096, 4, 255)  # more chunks than copy engines take
    assert (many.chunk_rows, many.push_blocks) == (255, tuning.PUSH_BLOCKS)
    for rows, world in ((1 << 20, 4), (100_003, 8), (28_672, 4)):
        chunk = gathered(rows, 64, 64, world, 1).chunk_rows
        assert -(-rows // chunk) * world <= tuning.FLAGS
    assert gathered(28_672, 64, 64, 4, 1).chunk_rows == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 100, 1024, 5000, 16_384])
def test_owners_have_all_rows_in_whole_clusters(m: int, world: int) -> None:
    how = tuning.reduce("gemm_all_reduce", m, 1024, 1024, world, PROCESSORS)
    step = 128 if how.tiling == "narrow" else 256
    assert how.rows % step == 0
    assert how.rows * world >= m
    assert (how.rows - step) * world < m
    scattered = tuning.reduce("gemm_reduce_scatter", m * world, 1024, 1024, world, PROCESSORS)
    assert scattered.rows == m


@pytest.mark.parametrize("op", tuning.SPREADS)
def test_every_k_has_a_spread(op: str) -> None:
    limits = [each.from_k for each in tuning.SPREADS[op]]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == 0
    for k in (8, limits[0], 1 << 20):
        assert tuning.reduce(op, 4096, 4096, k, 4, PROCESSORS).panel_columns >= 1


def panel(op: str, m: int, n: int, k: int, world: int) -> tuple[int, int]:
    how = tuning.reduce(op, m, n, k, world, PROCESSORS)
    return how.panel_rows, how.panel_columns


def test_the_tiles_of_a_panel_keep_all_clusters_busy_once() -> None:
    """66 clusters of two blocks, 132 of one."""
    assert panel("gemm_all_reduce", 16_384, 16_384, 4096, 2) == (8, 8)
    assert panel("gemm_all_reduce", 16_384, 16_384, 4096, 4) == (2, 11)
    assert panel("gemm_all_reduce", 16_384, 16_384, 4096, 16) == (1, 4)
    ten_rows = panel("gemm_all_reduce", 10 * 512, 16_384, 4096, 2)
    assert ten_rows == (5, 13)  # two panels of 5, not 8 + 2
    assert panel("gemm_all_reduce", 1024, 2048, 512, 4) == (2, 22)  # narrow
    assert panel("gemm_all_reduce", 16_384, 16_384, 4096, 1) == (64, 64)
    assert panel("gemm_reduce_scatter", 16_384, 16_384, 4096, 4) == (16, 64)  # one panel
    assert panel("gemm_reduce_scatter", 16_384, 16_384, 1024, 2) == (4, 8)
    assert panel("gemm_reduce_scatter", 16_384, 16_384, 1024, 4) == (2, 8)


def test_rows_that_come_last_come_in_slices_where_copies_take_long() -> None:
    assert gathered(2048, 2048, 8192, 4, 2048).slices == tuning.SLICES
    assert gathered(2048, 7168, 8192, 4, 2048).slices == 1  # a longer product
    assert gathered(2048, 2048, 8192, 4, 1024).slices == 1  # chunks as planned
    assert gathered(256, 1024, 4096, 4, 256).slices == 1  # blocks push
    assert gathered(8192, 64, 8192, 1, 8192).slices == 1


# ---- with the native module ----------------------------------------------------------------------


def test_the_workspace_holds_all_shards(made: Any) -> None:
    whole = made.all_gather_gemm_bytes(4, made.AllGatherSchedule(1024, 1024), 512)
    assert whole == made.DATA_OFFSET + 4 * 1024 * 512 * 2
    with pytest.raises(ValueError, match="flags"):
        made.all_gather_gemm_bytes(4, made.AllGatherSchedule(made.MAX_FLAGS, 1), 8)


def test_limits_are_those_of_the_kernels(made: Any) -> None:
    assert (tuning.FLAGS, tuning.COPIED_CHUNKS) == (made.MAX_FLAGS, made.MAX_COPIED_CHUNKS)
    few = (few_rows.COLUMNS, few_rows.MOST_SPLITS, few_rows.DEPTH_BYTES)
    assert few == (made.FEW_COLUMNS, made.MOST_SPLITS, made.FEW_DEPTH_BYTES)
    assert (mail.MAIL_BYTES, mail.MOST_NORMED_COLUMNS) == (
        made.MAIL_BYTES,
        made.MOST_NORMED_COLUMNS,
    )
    assert made.MOST_RANKS == MOST_RANKS


def test_wrong_arguments_are_named(made: Any) -> None:
    legal: dict[str, Any] = {
        "n": 8, "k": 8, "half": False, "n_major": True,
        "tiling": made.Tiling.wide, "band": 8,
    }  # fmt: skip
    made.Product(**legal)
    for name, value in {"n": 12, "k": 0, "band": 0, "blocks": -1}.items():
        with pytest.raises(ValueError, match=f"^{name} = {value}; expected"):
            made.Product(**{**legal, name: value})
    tensors = {"a": 16, "b": 32, "out": 48, "bias": 64, "a_pitch": 8, "b_pitch": 0}
    made.GemmTensors(**tensors)
    wrong = {"a": 2, "b": 0, "out": 8, "bias": 6, "a_pitch": 12, "b_pitch": -8}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} = {value}; expected"):
            made.GemmTensors(**{**tensors, name: value})
    with pytest.raises(ValueError, match="rank = 2; expected 0 to 1"):
        made.DeviceWorld([16, 32], 2, 0, 1.0, 1)
    with pytest.raises(ValueError, match="ranks = 17"):
        made.DeviceWorld([16] * 17, 0, 0, 1.0, 1)
    with pytest.raises(ValueError, match="push_blocks = 3"):
        made.AllGatherSchedule(8, 8, 3)
    for slices, *others in ((0, 8, 0), (2, 4, 0), (2, 8, 2)):
        with pytest.raises(ValueError, match=f"slices = {slices}"):
            made.AllGatherSchedule(8, *others, slices=slices)
    with pytest.raises(ValueError, match="panel_columns = 0"):
        made.ReduceSchedule(m=8, rows=8, panel_rows=1, panel_columns=0, everywhere=False)


def test_between_nodes_blocks_send_in_puts_that_keep_a_nic_busy() -> None:
    large = tuning.gather_between_nodes(4096, 7168, 8192, 2, 4096, PROCESSORS)
    put = large.chunk_rows * 8192 * tuning.ELEMENT_BYTES
    assert put == tuning.machine().network.put_bytes
    assert large.push_blocks == tuning.machine().network.blocks
    assert large.slices == 1
    wished = tuning.gather_between_nodes(4096, 7168, 8192, 2, 100, PROCESSORS)
    assert wished.chunk_rows == 100
    short = tuning.gather_between_nodes(3, 64, 64, 2, 3, PROCESSORS)
    assert short.chunk_rows == 3


def test_hierarchical_relays_have_blocks_for_every_reader_of_the_node() -> None:
    network = tuning.machine().network
    for local, blocks in ((2, network.blocks), (5, 8), (8, 10)):
        how = tuning.gather_between_nodes(
            4096, 7168, 8192, 2 * local, 4096, PROCESSORS, local, "hierarchical"
        )
        assert (how.push_blocks, how.exchange) == (blocks, "hierarchical")
        direct = tuning.gather_between_nodes(4096, 7168, 8192, 2 * local, 4096, PROCESSORS, local)
        assert (direct.push_blocks, direct.exchange) == (network.blocks, "direct")


def test_hierarchical_sums_leave_a_wave_at_a_time() -> None:
    op = "gemm_reduce_scatter"
    direct = tuning.reduce(op, 16_384, 16_384, 4096, 4, PROCESSORS, 2)
    assert (direct.panel_rows, direct.panel_columns) == (16, 64)  # one panel
    waves = tuning.reduce(op, 16_384, 16_384, 4096, 4, PROCESSORS, 2, "hierarchical")
    assert 3 * waves.panel_rows * waves.panel_columns <= PROCESSORS // 2
    assert (waves.exchange, direct.exchange) == ("hierarchical", "direct")


@pytest.mark.parametrize(("n", "blocks"), [(8192, 2), (64, 1)])
def test_between_nodes_a_cluster_tends_the_network(n: int, blocks: int) -> None:
    for op in ("gemm_reduce_scatter", "gemm_all_reduce"):
        assert tuning.reduce(op, 8192, n, 8192, 2, PROCESSORS, 2).network_blocks == blocks
        assert tuning.reduce(op, 8192, n, 8192, 2, PROCESSORS).network_blocks == 0


@pytest.mark.parametrize("op", OPS)
def test_a_plan_after_others_is_what_it_would_be_as_the_first(op: str) -> None:
    """What plans of one op share is made once (``planner.Plans``). Refusals come between."""
    backend, draw = HopperAccelerator(), random.Random(56)
    claims = backend.capabilities().model_copy(update={"ops": OPS, "library_ops": OPS})

    def planned(m: int, k: int) -> LaunchPlan | str:
        sizes, options = {"m": m, "n": 4096, "k": k}, {"capabilities": claims, "dtype": "bfloat16"}
        try:
            return gpu_plan(backend, op, 2, sizes, **options)
        except MkernelError as error:
            return str(error)

    drawn = [(round(2 ** draw.uniform(1, 15)), draw.choice((255, 256, 4096))) for _ in range(60)]
    found = [planned(*each) for each in drawn]
    assert {type(each) for each in found} == {str, LaunchPlan}
    assert len({each.path for each in found if isinstance(each, LaunchPlan)}) == 2
    for each, made in zip(drawn, found, strict=True):
        planner._plans.cache_clear()
        planner._planned.cache_clear()
        first = planned(*each)
        assert first == made
        if isinstance(made, LaunchPlan) and isinstance(first, LaunchPlan):
            assert made.digest() == first.digest()
            assert LaunchPlan.model_validate(made.model_dump()) == made
