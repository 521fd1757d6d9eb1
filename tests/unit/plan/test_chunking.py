from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mkernel.plan.model import AttentionShape, CombineShape, DtypeName, GemmShape
from mkernel.plan.pipeline import ConsumptionOrder, Runs
from mkernel.plan.standard import (
    chunking,
    cut,
    other_row_chunks,
    others,
    row_chunk,
    rows_of_a_rank,
)

dtypes: st.SearchStrategy[DtypeName] = st.sampled_from(["float16", "bfloat16", "float32"])


def tiles(rows: int, k: int, dtype: DtypeName) -> int:
    tile_k = 128 if dtype == "float32" else 256
    return -(-rows // 128) * -(-k // tile_k)


@pytest.mark.parametrize(
    ("dtype", "tile_k", "step_k"),
    [("float16", 256, 64), ("bfloat16", 256, 64), ("float32", 128, 32)],
)
def test_tiles_by_dtype(dtype: DtypeName, tile_k: int, step_k: int) -> None:
    cut = chunking(512, 2048, dtype)
    assert (cut.tile_m, cut.tile_n, cut.tile_k, cut.step_k) == (128, 256, tile_k, step_k)


@pytest.mark.parametrize(
    ("rows", "k", "per_chunk", "chunks"),
    [
        (512, 2048, 4, 8),  # the main job: 32 tiles
        (128, 256, 1, 1),  # a single tile is a single chunk
        (128 * 512, 256, 4, 128),  # 512 tiles: 128 chunks are still within the aim
        (128 * 513, 256, 8, 65),  # one more: ceil(513 / 128) = 5, rounded up to 8
        (128 * 8192, 256, 64, 128),
        (128 * 8193, 256, 64, 129),  # the cap: as many chunks as it takes
    ],
)
def test_default_rule(rows: int, k: int, per_chunk: int, chunks: int) -> None:
    cut = chunking(rows, k, "float16")
    assert (cut.tiles_per_chunk, cut.chunks_per_rank) == (per_chunk, chunks)


@given(st.integers(1, 200_000), st.integers(1, 20_000), dtypes, st.none() | st.integers(1, 10**9))
def test_chunks_cover_all_tiles_and_none_is_empty(
    rows: int, k: int, dtype: DtypeName, chunk: int | None
) -> None:
    cut = chunking(rows, k, dtype, chunk)
    total = tiles(rows, k, dtype)
    assert cut.chunks_per_rank * cut.tiles_per_chunk >= total
    assert (cut.chunks_per_rank - 1) * cut.tiles_per_chunk < total
    assert cut.chunks_per_rank <= total
    if chunk is not None:
        assert cut.tiles_per_chunk == min(chunk, total)
    elif cut.tiles_per_chunk < 64:
        assert cut.chunks_per_rank <= 128


def test_order_by_hand() -> None:
    assert tuple(ConsumptionOrder(nodes=3, ranks_per_node=2))[:4] == (
        (0, 1, 2, 3, 4, 5),
        (1, 0, 3, 2, 5, 4),
        (2, 3, 4, 5, 0, 1),
        (3, 2, 5, 4, 1, 0),
    )


@settings(deadline=None)  # how long an example takes is the machine's business
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(get_args(Runs)))
def test_order_starts_at_home_and_never_collides(nodes: int, ranks: int, runs: Runs) -> None:
    order = ConsumptionOrder(nodes=nodes, ranks_per_node=ranks, runs=runs)
    world = nodes * ranks
    assert len(order) == world
    for rank, own in enumerate(order):
        assert own[0] == rank
        assert sorted(own) == list(range(world))
        node = rank // ranks
        if runs == "node":
            assert {other // ranks for other in own[:ranks]} == {node}, "own node first"
        elif runs == "far":
            assert {other // ranks for other in own[1 : world - ranks + 1]} <= {*range(nodes)} - {
                node
            }
        else:
            assert {other % ranks for other in own[:nodes]} == {rank % ranks}, "own rail first"
        assert [order.consumers(other)[step] for step, other in enumerate(own)] == [rank] * world
    for step in range(world):
        assert len({own[step] for own in order}) == world, "each source wanted by one rank"


@given(st.integers(1, 5000), st.integers(1, 4), st.integers(2, 8))
def test_other_row_chunks(rows: int, world: int, chunks: int) -> None:
    """One chunk a rank is always among them; the default is not."""
    shape = GemmShape(m=rows * world, n=8, k=8)
    default = row_chunk(shape, world, None, chunks)
    others = other_row_chunks(shape, world, default, chunks)
    assert default not in others
    assert rows in (default, *others)
    assert len(set(others)) == len(others)
    assert all(1 <= other <= rows and -(-rows // other) <= 4 * chunks for other in others)


def test_every_rank_has_its_part_of_a_sequence_and_all_of_its_tokens() -> None:
    sequence = AttentionShape(batch=1, heads=2, kv_heads=2, sequence=64, head_dim=16, causal=False)
    tokens = CombineShape(tokens=32, features=40, experts=8, top_k=2)
    rows = GemmShape(m=66, n=8, k=8)
    assert [rows_of_a_rank(shape, 4) for shape in (sequence, tokens, rows)] == [16, 32, 17]


def test_other_chunkings_are_others() -> None:
    shape = GemmShape(m=4096, n=1024, k=1024)
    default = cut("all_gather_gemm", shape, 2, "float16", None)
    found = others(default, "all_gather_gemm", shape, 2, "float16")
    counts = [default.chunks_per_rank, *(other.chunks_per_rank for other in found)]
    assert sorted(counts) == [1, 2, 4, 8, 16]  # of 64 tiles, up to all of them in one


def test_the_order_in_a_node_by_hand() -> None:
    order = ConsumptionOrder(nodes=1, ranks_per_node=4)
    assert order[1] == (1, 2, 3, 0)
    assert order.consumers(1) == (1, 0, 3, 2)
