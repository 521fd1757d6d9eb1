"""The schedule of the GEMM ops: tile sizes, chunks, who pushes them, bands, exchanges.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`), which
states where each number was measured; these numbers change times, never results.

Copy engines or blocks of the kernel push rows. A copy engine costs no multiprocessor, but each copy
takes microseconds to start, and a rank starts W - 1 of them; blocks start at once and publish small
chunks. What is predicted to end sooner is taken. Copies within one device need room on its
multiprocessors, of which the kernel leaves none: where ranks share a device, they come before the
kernel. Tiles are those by which the whole call is predicted to end first, because the last rows wait
for a tile.
"""

from __future__ import annotations

import math

from mkernel.backends.accelerators.cuda.gemm import library_tuning, tuning
from mkernel.backends.accelerators.cuda.machine import CudaMachine, Spread, machine
from mkernel.backends.accelerators.cuda.schedule import FLAGS, TilingName, Way
from mkernel.backends.accelerators.cuda.transfer.engines import Choice
from mkernel.backends.accelerators.hopper.gemm import scaled_tuning
from mkernel.backends.accelerators.hopper.schedule import (
    FewRowsSchedule,
    GatherSchedule,
    ReduceSchedule,
    SegmentsSchedule,
)
from mkernel.plan import paths
from mkernel.plan.few_rows import cut
from mkernel.plan.model import (
    DTYPE_BYTES,
    CommonPart,
    DtypeName,
    GemmShape,
    Schedule,
    SumShape,
)
from mkernel.plan.pipeline import Exchange
from mkernel.plan.request import Scheduled, ScheduleRequest, TooLarge
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import (
    FewRowsConstants,
    MailedTilesConstants,
    Tile,
    gemm_tile_us,
)

COPIED_CHUNKS = 16
"""The most chunks that copy engines move, which is the number of copies of the epoch that exist for
them."""

ELEMENT_BYTES = 2

_MACHINE = machine()
TILE_ROWS = _MACHINE.tilings.block_rows
CLUSTER_TILES = {**_MACHINE.tilings.clusters, "deep": _MACHINE.tilings.clusters["wide"]}
"""The rows and columns that a cluster computes at a time. Deep tiles, of plans of earlier versions,
are wide ones; the first of equal ones is planned."""
BAND = _MACHINE.tilings.band
LEVELS: dict[TilingName, int] = {"wide": 1, "medium": 2, "narrow": 2}
"""The levels of the tree over segments for which a tiling's kernel has registers, if it adds any."""
STEP_BYTES = 128
"""The bytes of a row in a step of K of the kernels (tile/block.cuh)."""
PUSH_BLOCKS = _MACHINE.pushing.blocks
PUSHERS = PUSH_BLOCKS * _MACHINE.pushing.threads_of_a_block
"""Threads that push; each has its own chunk in transit."""
PUSHED_ROWS = _MACHINE.pushing.most_rows
PUSHED_BYTES = _MACHINE.pushing.least_bytes
SLICES = _MACHINE.slicing.slices
SPREADS: dict[str, tuple[Spread, ...]] = {
    "gemm_reduce_scatter": _MACHINE.spreads.gemm_reduce_scatter,
    "gemm_all_reduce": _MACHINE.spreads.gemm_all_reduce,
}


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of a GEMM op or of AllReduce."""
    return tuning.with_norm(request, _scheduled(request))


def _scheduled(request: ScheduleRequest) -> Scheduled:
    plan = request.plan
    if plan.path == "library" or isinstance(plan.shape, SumShape):
        return tuning.scheduled(request)
    found, world = by_rows(request, chunks=1), plan.world_size
    processors = found.pipeline.compute_blocks
    made: Schedule
    shape = plan.gemm
    if plan.invariant is not None and plan.op != "all_gather_gemm":
        return found._replace(schedule=segments(request, processors), prediction=None)
    if plan.scales is not None:
        return _of_scaled(request, found)
    if plan.nodes == 1 and (
        few := paths.few_rows(plan.op, shape, plan.dtype, world, request.constants)
    ):
        made = few_rows(shape, plan.dtype, plan.dtype, processors, few)
    elif plan.nodes == 1 and (
        mailed := paths.mailed_tiles(plan.op, shape, plan.dtype, world, request.constants)
    ):
        made = mailed_tiles(request, processors, mailed)
    elif plan.op != "all_gather_gemm":
        made = reduce(
            plan.op, shape.m, shape.n, shape.k, world, processors,
            plan.nodes, found.pipeline.exchange,
            _tiling_of_call(request, processors) if plan.nodes == 1 else None,
        )  # fmt: skip
    else:
        rows = shape.m // world
        chunk = found.pipeline.rows_per_chunk or rows
        if plan.nodes == 1:
            tiles = _tiling_of_call(request, processors)
            made = gather(
                rows,
                shape.n,
                shape.k,
                world,
                chunk,
                processors,
                tiles,
                _MACHINE.of_plan(plan),
            )
        else:
            made = gather_between_nodes(
                rows, shape.n, shape.k, world, chunk, processors,
                plan.ranks_per_node, found.pipeline.exchange,
            )  # fmt: skip
    return found._replace(schedule=made)


def _of_scaled(request: ScheduleRequest, found: Scheduled) -> Scheduled:
    """Schedule the fused path of e4m3 operands. Its kernels load and multiply as many bytes per
    unit of time as those of 16-bit operands, so their times are those of half as long a K."""
    plan, cores, constants = request.plan, found.pipeline.compute_blocks, request.constants
    shape, world = plan.gemm, plan.world_size
    assert plan.scales is not None
    few = paths.few_scaled_rows(plan.op, shape, plan.out_dtype, world, plan.scales, constants)
    if few is not None:
        assert constants is not None
        return found._replace(
            schedule=few_rows(shape, plan.dtype, plan.out_dtype, cores, few),
            prediction=scaled_tuning.of_few_rows(plan, cores, few, constants),
        )
    k = _up(shape.k, ELEMENT_BYTES)
    tiles = _tiling_of_scaled_call(request, cores) if plan.scales.use_fast_accum else "promoted"
    made: GatherSchedule | ReduceSchedule
    if plan.op == "all_gather_gemm":
        rows = shape.m // world
        chunk = found.pipeline.rows_per_chunk or rows
        made = gather(rows, shape.n, k, world, chunk, cores, tiles, _MACHINE.of_plan(plan))
    else:
        made = reduce(plan.op, shape.m, shape.n, k, world, cores, tiles=tiles)
    times = None if constants is None else scaled_tuning.fused(plan, made.tiling, cores, constants)
    return found._replace(schedule=made, prediction=times)


def _tiling_of_scaled_call(request: ScheduleRequest, processors: int) -> TilingName | None:
    """Return the tiling with which a call of e4m3 operands is predicted to be the fastest. None:
    there are no constants for it."""
    plan, constants = request.plan, request.constants
    times: dict[TilingName, float] = {}
    for name in _MACHINE.tilings.clusters:
        if constants is not None and name != "promoted":
            found = scaled_tuning.fused(plan, name, processors, constants)
            times |= {} if found is None else {name: found.pipelined_us}
    if not times:
        return None
    return min(times, key=times.__getitem__)


def tiling(rows: int, owners: int, n: int, k: int, processors: int) -> TilingName:
    """Return the tiling that is predicted to be the fastest for a product of ``owners`` blocks of
    ``rows`` rows each on ``processors`` multiprocessors, by itself and with whole tiles."""
    path = _MACHINE.constants.fused
    assert path is not None
    found = path.products.fastest(
        owners, rows, n, k, processors, _MACHINE.constants.memory_gbs, ELEMENT_BYTES
    )
    return tiling_of(path.tiles[found.tile])


def tiling_of(tile: Tile) -> TilingName:
    """Return the tiling with such tiles of clusters."""
    cluster = (tile.rows, tile.columns)
    return next(name for name, size in CLUSTER_TILES.items() if size == cluster)


def _tiling_of_call(request: ScheduleRequest, processors: int) -> TilingName | None:
    """Return the tiling with which a call of one node is predicted to be the fastest. None: there
    are no constants for it."""
    plan, constants = request.plan, request.constants
    if constants is None or constants.fused is None:
        return None
    _, tile = paths.fused(
        plan.op, plan.gemm, plan.dtype, plan.out_dtype, plan.world_size, processors,
        constants.fused, constants,
    )  # fmt: skip
    if tile is None or (tile.rows, tile.columns) not in CLUSTER_TILES.values():
        return None
    return tiling_of(tile)


def gather(
    rows: int,
    n: int,
    k: int,
    world: int,
    chunk: int,
    processors: int,
    tiles: TilingName | None = None,
    machine: CudaMachine = _MACHINE,
) -> GatherSchedule:
    """Schedule AllGather+GEMM. A rank has ``rows`` rows, in chunks of ``chunk`` as planned.
    ``tiles`` None: the fastest. ``machine``: whose times decide."""
    tiles = tiles or tiling(rows, world, n, k, processors)
    chunk = max(chunk, _least_rows(rows, world))
    if world == 1:
        return GatherSchedule(
            tiling=tiles,
            chunk_rows=rows,
            push_blocks=0,
            band=BAND,
            blocks=processors,
        )
    engines, nbytes = machine.copies, rows * k * ELEMENT_BYTES
    by_engines = engines.choose("put", nbytes, 0, flagged=True)
    by_blocks = engines.choose("put", nbytes, PUSH_BLOCKS, flagged=True)
    work = _Tiles(tiles, rows, n, k, world, machine.constants.bfloat16_tflops_per_core)
    hidden_us = _MACHINE.slicing.from_share * work.product_us(processors)
    sliced = (world - 1) * by_engines.microseconds > hidden_us
    slices = SLICES if sliced and chunk == rows else 1
    blocks = 0 if by_blocks.engine == "copy_engine" else PUSH_BLOCKS
    if blocks and _finish_us(work, by_engines, processors, slices) < _finish_us(
        work, by_blocks, processors - PUSH_BLOCKS
    ):
        blocks = 0  # their part of the product, or the last rows, would be later
    if _up(rows, chunk) > COPIED_CHUNKS:
        blocks = PUSH_BLOCKS
    if blocks:
        slices = 1
        if chunk == rows:  # they publish it in parts
            least = _up(PUSHED_BYTES, k * ELEMENT_BYTES)
            chunk = min(rows, PUSHED_ROWS, max(least, _up(rows, PUSHERS)))
    return GatherSchedule(
        tiling=tiles,
        chunk_rows=chunk,
        push_blocks=blocks,
        slices=slices,
        band=BAND,
        blocks=processors,
    )


def gather_between_nodes(
    rows: int,
    n: int,
    k: int,
    world: int,
    chunk: int,
    processors: int,
    local: int = 1,
    exchange: Exchange = "direct",
) -> GatherSchedule:
    """Schedule AllGather+GEMM for ranks on several nodes, ``local`` on each: blocks of the kernel
    send, in puts of a size that keeps a NIC busy."""
    network = _MACHINE.network
    blocks = _network_blocks(local, exchange)
    least = _least_rows(rows, world)
    chunk = max(chunk, least)
    if chunk == rows:  # no chunk was requested: the shard is published in parts
        chunk = min(rows, max(_up(network.put_bytes, k * ELEMENT_BYTES), least))
    return GatherSchedule(
        tiling=tiling(rows, world, n, k, processors - blocks),
        chunk_rows=chunk,
        push_blocks=blocks,
        band=network.band,
        blocks=processors,
        exchange=exchange,
    )


def _least_rows(rows: int, world: int) -> int:
    """Return the fewest rows of a chunk if each chunk of ``world`` ranks' ``rows`` rows has a flag.
    TooLarge."""
    if world > FLAGS:
        raise TooLarge(
            f"AllGather+GEMM on {world} ranks: the fused kernel has {FLAGS} flags, and each rank's "
            "rows need one"
        )
    return _up(rows, FLAGS // world)


def _network_blocks(local: int, exchange: Exchange) -> int:
    """Return the blocks that send to other nodes and, if hierarchical, share arriving data with
    ``local`` ranks: an even number, so whole clusters of any tiling."""
    network = _MACHINE.network
    relays = 2 * math.ceil(local * network.relay_blocks / 2)
    return max(network.blocks, relays) if exchange == "hierarchical" else network.blocks


class _Tiles:
    """The tiles of a product of ``world`` ranks' rows: their number, and the time of one."""

    def __init__(
        self, tiling: TilingName, rows: int, n: int, k: int, world: int, tflops_per_core: float
    ) -> None:
        height, width = CLUSTER_TILES[tiling]
        self.cluster = height // TILE_ROWS
        self.rows = _up(rows, height)
        """Rows of clusters that one rank has."""
        self.columns = _up(n, width)
        self.world = world
        self.tile_us = gemm_tile_us(TILE_ROWS, width, k, tflops_per_core)

    def product_us(self, processors: int) -> float:
        """Return the time of all waves of the product."""
        clusters = self.world * self.rows * self.columns
        return _up(clusters, processors // self.cluster) * self.tile_us


def _finish_us(work: _Tiles, put: Choice, processors: int, slices: int = 1) -> float:
    """Return when the last tile is done. It ends after all others, and after the last rows have
    arrived; by then the last of the ``slices`` of K is left to do."""
    there_us = (work.world - 1) * put.microseconds + (slices - 1) * _MACHINE.slicing.slice_us
    return max(work.product_us(processors), there_us + work.tile_us / slices)


def reduce(
    op: str,
    m: int,
    n: int,
    k: int,
    world: int,
    processors: int,
    nodes: int = 1,
    exchange: Exchange = "direct",
    tiles: TilingName | None = None,
) -> ReduceSchedule:
    """Schedule a fused reduction. ``k`` is one rank's share. Rows of an all-reduce are dealt out in
    whole tiles of a cluster, so the last owners may have fewer, or none; on one node there are no
    tiles for missing rows. ``tiles`` None: the fastest. In a hierarchical exchange panels have one
    wave, because the sums that leave a node wait for a panel of all its ranks. TooLarge."""
    rows = m // world if op == "gemm_reduce_scatter" else _up(m, world)
    whole = tiles or tiling(m, 1, n, k, processors)
    if op != "gemm_all_reduce" or nodes > 1:
        tiles = tiles or tiling(rows, world, n, k, processors)
    tiles = tiles or whole
    if tiles != "promoted" and reduce_flags(op, rows, n, world, tiles) > FLAGS:
        tiles = "wide"  # which has the fewest tiles
    flags = reduce_flags(op, rows, n, world, tiles)
    if flags > FLAGS:
        raise TooLarge(
            f"{op} of [{m}, {n}] on {world} ranks: the fused kernel needs {flags} flags for its tiles "
            f"and has {FLAGS}; call it for fewer rows at a time"
        )
    height, width = CLUSTER_TILES[tiles]
    if op == "gemm_all_reduce":
        rows = _up(rows, height) * height
    spread = next(s for s in SPREADS[op] if k >= s.from_k)
    panel_rows, panel_columns = _up(rows, height), _up(n, width)
    if (spread.wave_of or exchange == "hierarchical") and world > 1:
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
        blocks=processors,
        product_tiling=whole,
        network_blocks=height // TILE_ROWS if nodes > 1 else 0,
        exchange=exchange,
    )


def segments(request: ScheduleRequest, processors: int) -> SegmentsSchedule:
    """Schedule invariant results of a reduction. Nothing is predicted of them."""
    plan, shape = request.plan, request.plan.gemm
    assert plan.invariant is not None
    promoted = plan.scales is not None and not plan.scales.use_fast_accum
    way: Way | None = "one_shot" if plan.op == "gemm_all_reduce" else None
    nbytes = shape.m * shape.n * DTYPE_BYTES[plan.out_dtype]
    chosen, levels = ("promoted", 0) if promoted else _tree(plan, processors)
    one = plan.world_size > 1 and (way is None or _MACHINE.in_one(nbytes, plan.world_size))
    return SegmentsSchedule(
        tiling=chosen,
        levels=levels,
        blocks=processors,
        band=BAND,
        by_mail=one and library_tuning.by_mail(plan, plan.out_dtype, way, request.constants),
    )


def _tree(plan: CommonPart, processors: int) -> tuple[TilingName, int]:
    """Return the tiling of the products of a rank's segments, and the levels of the tree that they add
    in registers: those that are predicted to be the fastest, with the kernel that adds the rest."""
    shape, machine, itemsize = plan.gemm, _MACHINE.constants, DTYPE_BYTES[plan.dtype]
    assert plan.invariant is not None
    assert machine.fused is not None
    of_rank = plan.invariant.segments // plan.world_size
    whole = plan.scales is None and shape.k * itemsize % (of_rank * STEP_BYTES) == 0
    found: list[tuple[float, int, TilingName]] = []
    for levels in range(3 if whole else 1):
        roots = of_rank >> levels
        if roots == 0:
            break
        moved = (roots + 1) * shape.m * shape.n * DTYPE_BYTES[plan.out_dtype]
        added_us = machine.launch_us + moved / (machine.memory_gbs * 1e3) if roots > 1 else 0.0
        for product in machine.fused.products.each(
            roots, shape.m, shape.n, _up(shape.k * itemsize, ELEMENT_BYTES * roots),
            processors, machine.memory_gbs, ELEMENT_BYTES,
        ):  # fmt: skip
            name = tiling_of(machine.fused.tiles[product.tile])
            if levels in (0, LEVELS[name]):
                found.append((product.total_us + added_us, levels, name))
    _, levels, name = min(found)
    return name, levels


def reduce_flags(op: str, rows: int, n: int, world: int, tiling: TilingName) -> int:
    """Return the number of flags of a fused reduction whose ranks own ``rows`` rows: one for each
    block of 128 rows of a tile from each peer, and with AllReduce as many for the sums that come
    back; as in host/gemm/fused.cpp."""
    height, width = CLUSTER_TILES[tiling]
    blocks = _up(rows, height) * (height // TILE_ROWS) * _up(n, width)
    return (2 if op == "gemm_all_reduce" else 1) * (world - 1) * blocks


def few_rows(
    shape: GemmShape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    processors: int,
    constants: FewRowsConstants,
) -> FewRowsSchedule:
    """Schedule few rows. ``shape.k`` is one rank's share."""
    found = cut(shape.n, shape.k, DTYPE_BYTES[dtype], processors, constants)
    return FewRowsSchedule(
        splits=found.splits,
        blocks=found.splits * found.clusters,
        product=paths.partial_dtype(shape, out_dtype),
    )


def mailed_tiles(
    request: ScheduleRequest, processors: int, constants: MailedTilesConstants
) -> FewRowsSchedule:
    """Schedule tiles that leave by mail."""
    plan, machine = request.plan, request.constants
    assert machine is not None
    found = paths.tiles_by_mail(
        plan.op, plan.gemm, plan.dtype, plan.world_size, processors, constants, machine.memory_gbs
    )
    return FewRowsSchedule(
        splits=1, blocks=processors, product=plan.dtype, tiling=tiling_of(found.tile)
    )


def _up(value: int, by: int) -> int:
    return -(-value // by)
