"""How the GEMM ops are scheduled: tile sizes, chunks, who pushes them, bands, exchanges.

Pure functions of a plan's sizes. The numbers here and in transfer/engines.json
were measured on four H200 with bfloat16 and NVLink; they change times, never results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mkernel.backends.accelerators.hopper.schedule import (
    GatherSchedule,
    LibrarySchedule,
    ReduceSchedule,
    TilingName,
    Way,
)
from mkernel.backends.accelerators.hopper.transfer.engines import Choice, measured_engines
from mkernel.plan import paths
from mkernel.plan.model import DTYPE_BYTES, DtypeName, GemmShape, LaunchPlan

FLAGS = 114_688
"""Flags of a workspace, one a chunk of each rank; as in device/workspace.cuh."""
COPIED_CHUNKS = 16
"""Copy engines move at most so many chunks: there are so many copies of the epoch for them."""

ELEMENT_BYTES = 2
TILE_ROWS = 128
CLUSTER_TILES: dict[TilingName, tuple[int, int]] = {
    "wide": (256, 256),
    "deep": (256, 256),
    "narrow": (128, 128),
}
"""Rows and columns of the output that a cluster of blocks, one to TILE_ROWS, computes at a time."""
BAND = 8
"""Rows of clusters that share columns of B in L2."""

NARROW_BELOW_WAVES = 1.2
"""With fewer wide tiles for each multiprocessor than this, narrow ones keep more of them busy."""
DEEP_UP_TO_WAVES = 2.0
DEEP_FROM_K = 4096

PUSH_BLOCKS = 8
"""Blocks of the kernel that push small shards: they start at once, copy engines later."""
PUSHERS = 2 * PUSH_BLOCKS
"""Threads that push; each has a chunk of its own under way."""
PUSHED_ROWS = 64
PUSHED_BYTES = 128 << 10
"""A pushing thread publishes at most so many rows at once, and at least so many bytes."""

SLICES = 2
SLICED_FROM = 0.7
"""Where the copies take longer than this share of the product's time, tiles of the rows that come
last begin with a part of K. Below it, the loader's waits cost more than that saves."""
SLICE_US = 5.0
"""Each further slice costs a flag's copy and the gaps around it."""

CORE_TFLOPS = 5.8
"""One multiprocessor's rate while it computes tiles; it gives the time of a wave."""
LATE = 1.25
"""Rows may come later than copies alone take, by this factor: the link has other traffic, and ranks
start apart."""

SCATTERED_ELEMENTS = 1 << 12
"""Whole products of up to so many elements are rounded by a copy of their own. The library may cut a
product along K and round the parts, an error that scatters where there are few elements."""

ONE_SHOT_BYTES = 1 << 20
"""Up to so many bytes of partial results, times W - 2, it is faster to send all of them to every
rank than to send sums in an exchange of their own: (W-1)(W-2)/W times the bytes, but 5 us less to
wait."""
ONE_SHOT_MOST = 8 << 20


@dataclass(frozen=True)
class Spread:
    """How a reduction spreads its transfers over the call, for shares of K from ``from_k`` on.

    ``wave_of``: an owner's tiles are cut into panels, and the own tiles of a panel are computed after
    the other owners' tiles of the next. A panel is so large that its tiles of all owners, or of the
    others, are one wave; None: one panel is all. ``pace``: least clock cycles between two puts of a
    block. ``by_outbox``: puts come from memory, not straight from the block that made the tile:
    smoother, and worth its memory traffic where the link is nearly full.
    """

    from_k: int
    wave_of: Literal["all", "others"] | None
    pace: int
    by_outbox: bool = False


SPREADS: dict[str, tuple[Spread, ...]] = {
    "gemm_reduce_scatter": (
        Spread(4096, None, 3500),
        Spread(2048, None, 2000, by_outbox=True),
        Spread(0, "all", 0),
    ),
    "gemm_all_reduce": (
        Spread(4096, "others", 4000),
        Spread(2048, "others", 2000, by_outbox=True),
        Spread(0, "others", 0),
    ),
}
"""Ordered by a rank's share of K, the longest first. That share sets the time of a tile, in which
the tile's puts must fit."""


def schedule(plan: LaunchPlan) -> GatherSchedule | ReduceSchedule | LibrarySchedule | None:
    """How a plan runs; None: it has several nodes, and cannot."""
    if plan.nodes > 1:
        return None
    shape, world = plan.gemm, plan.world_size
    processors = plan.resources.compute_blocks
    if plan.path == "library":
        return library(plan.op, shape, plan.dtype, world)
    if plan.op != "all_gather_gemm":
        return reduce(plan.op, shape.m, shape.n, shape.k, world, processors)
    rows = shape.m // world
    chunk = plan.rows_per_chunk or rows
    return gather(rows, shape.n, shape.k, world, chunk, processors)


def tiling(rows: int, owners: int, n: int, k: int, processors: int) -> TilingName:
    """The tiling of a product of ``owners`` blocks of ``rows`` rows each on ``processors``
    multiprocessors."""
    height, width = CLUSTER_TILES["wide"]
    waves = owners * _up(rows, height) * _up(n, width) * (height // TILE_ROWS) / processors
    if waves < NARROW_BELOW_WAVES:
        return "narrow"
    if waves <= DEEP_UP_TO_WAVES and k >= DEEP_FROM_K:
        return "deep"
    return "wide"


def gather(rows: int, n: int, k: int, world: int, chunk: int, processors: int) -> GatherSchedule:
    """A rank has ``rows`` rows, in chunks of ``chunk`` as planned."""
    tiles = tiling(rows, world, n, k, processors)
    chunk = max(chunk, _up(rows, FLAGS // world))
    if world == 1:
        return GatherSchedule(tiling=tiles, chunk_rows=rows, push_blocks=0, band=BAND)
    engines, nbytes = measured_engines(), rows * k * ELEMENT_BYTES
    by_engines = engines.choose("put", nbytes, 0, flagged=True)
    by_blocks = engines.choose("put", nbytes, PUSH_BLOCKS, flagged=True)
    work = _Tiles(tiles, rows, n, k, world)
    sliced = (world - 1) * by_engines.microseconds > SLICED_FROM * work.product_us(processors)
    slices = SLICES if sliced and chunk == rows else 1
    blocks = 0 if by_blocks.engine == "copy_engine" else PUSH_BLOCKS
    if blocks and _finish_us(work, by_engines, processors, slices) < _finish_us(
        work, by_blocks, processors - PUSH_BLOCKS
    ):
        blocks = 0  # their part of the product, or the last rows, would be later
    if _up(rows, chunk) > COPIED_CHUNKS:
        blocks = PUSH_BLOCKS
    put = by_blocks if blocks else by_engines
    ahead = _columns_ahead(work, (world - 1) * put.microseconds, processors - blocks)
    if blocks:
        slices = 1
        if chunk == rows:  # they publish it in parts
            least = _up(PUSHED_BYTES, k * ELEMENT_BYTES)
            chunk = min(rows, PUSHED_ROWS, max(least, _up(rows, PUSHERS)))
    return GatherSchedule(
        tiling=tiles,
        chunk_rows=chunk,
        push_blocks=blocks,
        columns_ahead=ahead,
        slices=slices,
        band=BAND,
    )


class _Tiles:
    """The tiles of a product of ``world`` ranks' rows: how many, and how long one takes."""

    def __init__(self, tiling: TilingName, rows: int, n: int, k: int, world: int) -> None:
        height, width = CLUSTER_TILES[tiling]
        self.cluster = height // TILE_ROWS
        self.rows = _up(rows, height)
        """Rows of clusters that one rank has."""
        self.columns = _up(n, width)
        self.world = world
        self.tile_us = 2 * TILE_ROWS * width * k / (CORE_TFLOPS * 1e6)

    def product_us(self, processors: int) -> float:
        """The time of all waves of the product."""
        clusters = self.world * self.rows * self.columns
        return _up(clusters, processors // self.cluster) * self.tile_us


def _finish_us(work: _Tiles, put: Choice, processors: int, slices: int = 1) -> float:
    """When the last tile is done. It ends after all others, and after the last rows have come: by
    then the last of the ``slices`` of K is left to do."""
    there_us = (work.world - 1) * put.microseconds + (slices - 1) * SLICE_US
    return max(work.product_us(processors), there_us + work.tile_us / slices)


def _columns_ahead(work: _Tiles, there_us: float, processors: int) -> int:
    """Tile columns of the own rows that keep the device busy until all other rows are there; 0: all.

    From then on everyone's rows share the columns of B in L2. Own and others' rows by themselves read
    B again for each rank; which costs nothing where a rank's rows fill the bands of the raster.
    """
    if work.rows >= BAND:
        return 0
    waves = math.ceil(LATE * there_us / work.tile_us)
    ahead = _up(waves * (processors // work.cluster), work.rows)
    return ahead if ahead < work.columns else 0


def reduce(op: str, m: int, n: int, k: int, world: int, processors: int) -> ReduceSchedule:
    """``k`` is one rank's share. Rows of an all-reduce are dealt out in whole tiles of a cluster,
    so the last owners may have fewer, or none."""
    rows = m // world if op == "gemm_reduce_scatter" else _up(m, world)
    tiles = tiling(rows, world, n, k, processors)
    height, width = CLUSTER_TILES[tiles]
    if op == "gemm_all_reduce":
        rows = _up(rows, height) * height
    spread = next(s for s in SPREADS[op] if k >= s.from_k)
    panel_rows, panel_columns = _up(rows, height), _up(n, width)
    if spread.wave_of and world > 1:
        owners = world if spread.wave_of == "all" else world - 1
        panel_rows = _up(panel_rows, _up(panel_rows, max(1, BAND // owners)))
        clusters = processors * TILE_ROWS // height
        panel_columns = max(1, clusters // (owners * panel_rows))
    return ReduceSchedule(
        tiling=tiles,
        rows=rows,
        panel_rows=panel_rows,
        panel_columns=panel_columns,
        pace=spread.pace,
        by_outbox=spread.by_outbox,
        band=BAND,
    )


def library(op: str, shape: GemmShape, dtype: DtypeName, world: int) -> LibrarySchedule:
    """The same of the library path."""
    whole = op == "all_gather_gemm" or world == 1
    product = paths.partial_dtype(shape, dtype)
    if whole:
        product = "float32" if shape.m * shape.n <= SCATTERED_ELEMENTS else dtype
    way: Way | None = None
    if op == "gemm_all_reduce" and not whole:
        nbytes = shape.m * shape.n * DTYPE_BYTES[product]
        brief = nbytes <= ONE_SHOT_MOST and nbytes * (world - 2) <= ONE_SHOT_BYTES
        way = "one_shot" if brief else "two_shot"
    return LibrarySchedule(product=product, way=way)


def _up(value: int, by: int) -> int:
    return -(-value // by)
