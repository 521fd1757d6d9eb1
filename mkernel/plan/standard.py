"""The decisions that most backends share, and the schedules of those that bring none of their own.

:func:`choose` takes the default, or what is predicted to beat it. The rules behind it cut what a rank
communicates into tiles and chunks. :func:`by_rows` and :func:`by_tiles` decide chunks, order and cores
by predicted times. A backend that has more to say puts a schedule of its own into what they found:
``by_rows(request)._replace(schedule=…)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

from pydantic import Field

from mkernel.plan import predict
from mkernel.plan.model import (
    DTYPE_BYTES,
    CommonPart,
    DtypeName,
    GemmShape,
    OpName,
    Prediction,
    Schedule,
    Shape,
    rows_of_a_rank,
)
from mkernel.plan.pipeline import (
    USUAL_TILE,
    Chunking,
    ConsumptionOrder,
    GemmTile,
    Pipeline,
    Returns,
    Runs,
    Tiling,
)
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.plan.simulate import simulate
from mkernel.topology.cost import MachineConstants

GAIN = 0.03
"""An option must be predicted to be faster than the default by this share: less is within the
model's error, and plans should not change with the last digit of a constant."""

_Option = TypeVar("_Option")


def choose(
    decision: str,
    options: Sequence[_Option],
    cost: Callable[[_Option], float],
    name: Callable[[_Option], str] = str,
    by: str = "",
) -> tuple[_Option, tuple[Alternative, ...]]:
    """Choose the fastest option if it gains enough over the first one, the default; else choose the
    default. Returns the choice and all options as alternatives. ``by`` says how the costs were
    found, if not by the closed forms."""
    if len(options) == 1:
        return options[0], ()
    times = [cost(option) for option in options]
    best = min(range(len(options)), key=times.__getitem__)
    chosen = best if times[best] < (1 - GAIN) * times[0] else 0
    of_first = f"default, {by}" if by else "default"
    return options[chosen], tuple([
        Alternative(
            decision, name(options[number]), times[number], number == chosen, by if number else of_first
        )
        for number in range(len(options))
    ])  # fmt: skip


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


_ROW_CHUNKS = 4
_DETAIL = 1000
"""The approximate number of messages in a simulation: enough to compare, and as long for any
world."""


class RowSchedule(Schedule):
    """A schedule by rows: each rank's rows (positions, tokens) travel in chunks of
    ``rows_per_chunk``. ``order`` is the order in which the others' rows are consumed
    (:class:`mkernel.plan.pipeline.ConsumptionOrder`)."""

    kind: Literal["rows"] = "rows"
    rows_per_chunk: int = Field(ge=1)
    order: Runs = "node"


class TileSchedule(Schedule):
    """A schedule by tiles: each rank's data travels in chunks of whole tiles; ``order`` is as in
    :class:`RowSchedule`."""

    kind: Literal["tiles"] = "tiles"
    chunking: Chunking
    order: Runs = "node"


def by_rows(
    request: ScheduleRequest,
    *,
    chunks: int = _ROW_CHUNKS,
    orders: tuple[Runs, ...] = ("node",),
    one_kernel_per_chunk: bool = False,
    grouped: bool = False,
    whole_tokens: bool = False,
) -> Scheduled:
    """Decide chunks of rows, order and cores, and make a :class:`RowSchedule`.

    Args:
        chunks: number that a rank's rows make by default; a better number is looked for unless it
            is 1.
        orders: orders of sources that launches can follow, the default first.
        one_kernel_per_chunk: each chunk is computed by a kernel of its own.
        grouped: messages to all peers leave as one, chunk by chunk.
        whole_tokens: as of :class:`mkernel.plan.traffic.Way`.
    """
    plan = request.plan
    rows = row_chunk(plan.shape, plan.world_size, request.chunk, chunks)
    cuts: list[int] = []
    if request.chunk is None and chunks > 1:
        cuts = [rows, *other_row_chunks(plan.shape, plan.world_size, rows, chunks)]
        if one_kernel_per_chunk:  # each must gain what it costs: the fewest first
            cuts.sort(reverse=True)
    usual = _usual(
        request, orders, rows_per_chunk=rows,
        one_kernel_per_chunk=one_kernel_per_chunk, grouped=grouped, whole_tokens=whole_tokens,
    )  # fmt: skip
    found, prediction, alternatives = _decided(request, usual, (), cuts, orders)
    schedule = RowSchedule(
        rows_per_chunk=found.rows_per_chunk or rows,
        order=found.order.runs,
    )
    return Scheduled(schedule, found, prediction, alternatives)


def by_tiles(
    request: ScheduleRequest, *, tile: GemmTile = USUAL_TILE, orders: tuple[Runs, ...] = ("node",)
) -> Scheduled:
    """Decide chunks of tiles of a GEMM op, order and cores, and make a :class:`TileSchedule`.

    Args:
        tile: the output tile of the kernels.
        orders: as in :func:`by_rows`.
    """
    plan = request.plan
    usual_cut = cut(plan.op, plan.gemm, plan.world_size, plan.dtype, request.chunk, tile)
    cuts = [usual_cut]
    if request.chunk is None:
        cuts += others(usual_cut, plan.op, plan.gemm, plan.world_size, plan.dtype, tile)
    usual = _usual(request, orders, chunking=usual_cut)
    found, prediction, alternatives = _decided(request, usual, cuts, (), orders)
    schedule = TileSchedule(chunking=found.chunking or usual_cut, order=found.order.runs)
    return Scheduled(schedule, found, prediction, alternatives)


def _usual(request: ScheduleRequest, orders: tuple[Runs, ...], **cuts: Any) -> Pipeline:
    plan, claims = request.plan, request.capabilities
    few = comm_blocks(plan.nodes, plan.ranks_per_node, claims.comm_cores)
    return Pipeline(
        order=ConsumptionOrder(plan.nodes, plan.ranks_per_node, orders[0]),
        compute_blocks=request.compute_blocks or claims.compute_cores,
        comm_blocks=request.comm_blocks or few,
        exchange=request.exchanges[0],
        returns=request.returns or _fewer_rows(plan, claims.ways_home(plan.nodes)),
        **cuts,
    )


def _fewer_rows(plan: CommonPart, ways: tuple[Returns, ...]) -> Returns:
    """Choose how results come home if nothing predicts it: by rank if that is less than half as
    much."""
    if len(ways) == 1:
        return ways[0]
    if plan.op != "moe_gemm_combine":  # of other ops either way is as much
        return "slots"
    by_slot, by_rank = (
        sum(predict.payloads(plan.op, plan.shape, plan.dtype, plan.world_size, returns))
        for returns in get_args(Returns)
    )
    return "ranks" if 2 * by_rank < by_slot else "slots"


def _decided(
    request: ScheduleRequest,
    usual: Pipeline,
    cuts: Sequence[Chunking],
    rows: Sequence[int],
    orders: tuple[Runs, ...],
) -> tuple[Pipeline, Prediction | None, tuple[Alternative, ...]]:
    """Decide one thing after another, each with the defaults of those that follow: exchange, how
    results of experts come home, chunks of tiles, communication blocks; then, by simulation, rows a
    chunk and order. Measured times are of the default chunks and order, which stand then, and also
    if there are no constants."""
    plan, constants = request.plan, request.constants
    if request.measured is not None or constants is None:
        return usual, request.measured, ()

    def pipelined_us(option: Pipeline, constants: MachineConstants = constants) -> float:
        return predict.predict(plan, request.links, option, constants).pipelined_us

    def sequential_us(option: Pipeline, constants: MachineConstants = constants) -> float:
        """Return the call's time if results come home after the products; by rank, weights travel
        first."""
        times = predict.predict(plan, request.links, option, constants)
        return times.sequential_us + (constants.signal_us if option.returns == "ranks" else 0.0)

    found, considered = choose(
        "exchange",
        [replace(usual, exchange=exchange) for exchange in request.exchanges],
        pipelined_us,
        lambda option: option.exchange,
    )
    alternatives: tuple[Alternative, ...] = considered
    if plan.op == "moe_gemm_combine" and request.returns is None:
        ways = request.capabilities.ways_home(plan.nodes)
        found, considered = choose(
            "results",
            [replace(found, returns=returns) for returns in ways],
            sequential_us,
            lambda option: f"by {option.returns[:-1]}",
        )
        alternatives += considered
    if cuts:
        found, considered = choose(
            "chunk",
            [replace(found, chunking=each) for each in cuts],
            pipelined_us,
            lambda option: f"{option.chunking.tiles_per_chunk if option.chunking else 0} tiles",
        )
        alternatives += considered
    if request.comm_blocks is None:
        found, considered = choose(
            "communication",
            [found, *_more_blocks(found, request.capabilities.comm_cores)],
            pipelined_us,
            lambda option: f"{option.comm_blocks} blocks",
        )
        alternatives += considered
    prediction = predict.predict(plan, request.links, found, constants)
    if plan.world_size > 1 and plan.path == "fused":
        timed = plan.model_copy(update={"prediction": prediction})
        found, considered = _tuned(timed, found, rows, orders, constants)
        alternatives += considered
    return found, prediction, alternatives


def _more_blocks(found: Pipeline, cores: int) -> list[Pipeline]:
    """Return the same pipeline with twice and four times the blocks for communication, as far as
    there are cores."""
    more = [factor * found.comm_blocks for factor in (2, 4)]
    return [replace(found, comm_blocks=count) for count in more if count <= cores]


def _tuned(
    timed: CommonPart,
    usual: Pipeline,
    rows: Sequence[int],
    orders: Sequence[Runs],
    constants: MachineConstants,
) -> tuple[Pipeline, tuple[Alternative, ...]]:
    """Decide the order and the rows a chunk by simulation; return the pipeline, and all options
    with their simulated times. Closed forms cannot tell these options apart.

    Args:
        timed: the plan so far, with its predicted times. usual: its pipeline, whose other decisions
            stand.
        rows: rows that a chunk may have, the default first, which stands where nothing gains; empty
            where chunks are not made of rows.
        orders: orders of sources, the default first. Where nodes or their ranks are one they are
            all the same.
    """

    def time_us(option: Pipeline) -> float:
        return simulate(timed, option, constants, detail=_DETAIL).time_us

    cuts = [replace(usual, rows_per_chunk=each) for each in rows] or [usual]
    found, considered = choose(
        "chunk", cuts, time_us, lambda option: f"{option.rows_per_chunk} rows", "simulated"
    )
    options = [
        replace(found, order=replace(found.order, runs=runs))
        for runs in (orders if timed.nodes > 1 and timed.ranks_per_node > 1 else orders[:1])
    ]
    found, more = choose("order", options, time_us, lambda option: option.order.runs, "simulated")
    return found, considered + more
