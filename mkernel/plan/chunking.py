"""Rules that cut what a rank communicates into tiles and chunks."""

from __future__ import annotations

from mkernel.plan.model import (
    DTYPE_BYTES,
    AttentionShape,
    DtypeName,
    GemmShape,
    OpName,
    Shape,
    SumShape,
)
from mkernel.plan.pipeline import USUAL_TILE, Chunking, GemmTile, Tiling

MAX_CHUNKS = 128
"""Chunks a source that the default aims to stay within: each chunk costs a signal."""
MIN_TILES, MAX_TILES = 4, 64
"""The least and the most tiles a chunk by default: in steps of 4, so that a chunk is a whole number
of 256 KiB."""


def chunking(
    rows: int, k: int, dtype: DtypeName, chunk: int | None = None, tile: GemmTile = USUAL_TILE
) -> Chunking:
    """Cut one rank's A [rows, k] into pieces of ``tile``, usually 128 rows by 512 bytes of K (64
    KiB), and these into chunks.

    A chunk is 4 tiles; where that gives
    more than 128 chunks it is ceil(tiles / 128) rounded up to a multiple of 4, at most 64 tiles
    (then with as many chunks as it takes). ``chunk`` overrides the tiles of a chunk; a chunk is
    never larger than all tiles.
    """
    depth = tile.depth_bytes // DTYPE_BYTES[dtype]
    return _chunks_of(-(-rows // tile.rows) * -(-k // depth), dtype, chunk, tile)


def cut(
    op: OpName,
    shape: GemmShape,
    world: int,
    dtype: DtypeName,
    chunk: int | None = None,
    tile: GemmTile = USUAL_TILE,
) -> Chunking:
    """Cut what a GEMM op on ``world`` ranks communicates: A if it is gathered; if partial results
    are reduced, the output tiles that a rank owns, by the same rule."""
    if op == "all_gather_gemm":
        return chunking(shape.m // world, shape.k, dtype, chunk, tile)
    rows = shape.m // world if op == "gemm_reduce_scatter" else shape.m
    tiles = -(-rows // tile.rows) * -(-shape.n // tile.columns)
    if op == "gemm_all_reduce":
        tiles = -(-tiles // world)  # the ranks share all of them
    return _chunks_of(tiles, dtype, chunk, tile)


def tiling(dtype: DtypeName, tile: GemmTile = USUAL_TILE) -> Tiling:
    """Return a backend's output tile in elements of ``dtype``."""
    return Tiling(
        tile_m=tile.rows,
        tile_n=tile.columns,
        tile_k=tile.depth_bytes // DTYPE_BYTES[dtype],
        step_k=tile.step_bytes // DTYPE_BYTES[dtype],
    )


def _chunks_of(tiles: int, dtype: DtypeName, chunk: int | None, tile: GemmTile) -> Chunking:
    if chunk is None:
        chunk = MIN_TILES
        if -(-tiles // chunk) > MAX_CHUNKS:
            least = -(-tiles // MAX_CHUNKS)
            chunk = min(MAX_TILES, -(-least // MIN_TILES) * MIN_TILES)
    tiles_per_chunk = min(chunk, tiles)
    return Chunking(
        **dict(tiling(dtype, tile)),
        tiles_per_chunk=tiles_per_chunk,
        chunks_per_rank=-(-tiles // tiles_per_chunk),
    )


def others(
    default: Chunking,
    op: OpName,
    shape: GemmShape,
    world: int,
    dtype: DtypeName,
    tile: GemmTile = USUAL_TILE,
) -> list[Chunking]:
    """Return the chunkings with more or fewer tiles a chunk than the default."""
    made = {default.chunks_per_rank: default}
    tiles = MIN_TILES
    while tiles <= MAX_TILES:
        other = cut(op, shape, world, dtype, tiles, tile)
        made.setdefault(other.chunks_per_rank, other)
        tiles *= 2
    return [other for other in made.values() if other is not default]


def row_chunk(shape: Shape, world: int, chunk: int | None, chunks: int) -> int:
    """Return the rows (positions, tokens) of a chunk for backends that cut by rows; at most one
    rank's rows.

    By default a rank's rows make ``chunks`` chunks; 1 where nothing overlaps and chunks only cost.
    """
    rows = rows_of_a_rank(shape, world)
    return min(rows, chunk or -(-rows // chunks))


def rows_of_a_rank(shape: Shape, world: int) -> int:
    """Return the number of rows (positions, tokens) that each rank has."""
    if isinstance(shape, GemmShape | SumShape):
        return -(-shape.m // world)
    if isinstance(shape, AttentionShape):
        return shape.sequence // world
    return shape.tokens


def other_row_chunks(shape: Shape, world: int, default: int, chunks: int) -> list[int]:
    """Return the rows a chunk that make 1, 2, 4, ... chunks a rank, up to four times ``chunks``;
    without the default."""
    counts = (1 << power for power in range((4 * chunks).bit_length()))
    found = dict.fromkeys(row_chunk(shape, world, None, count) for count in counts)
    return [rows for rows in found if rows != default]


BLOCKS_PER_DESTINATION = 4


def comm_blocks(nodes: int, ranks_per_node: int, cores: int) -> int:
    """Return the number of blocks of the communication kernel: 4 a destination; all other nodes
    together are one destination.

    More do not help: they start every chunk at once and share one link, so that all of them arrive
    late, while few bring the first chunks early.
    """
    destinations = ranks_per_node - 1 + (nodes > 1)
    return max(1, min(cores, BLOCKS_PER_DESTINATION * destinations))
