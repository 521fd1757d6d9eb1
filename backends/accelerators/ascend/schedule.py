"""The schedule of a launch on simulated NPUs: chunks, tiles and cores.

The kernels themselves fix the order in which ranks are consumed (``kernels/consumption.hpp``):
those of the node first, then the others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field

from mkernel.backends.accelerators.ascend.machine import machine
from mkernel.backends.accelerators.ascend.predict import (
    L0AB,
    L0C,
    L1,
    VECTORS_PER_CUBE,
    attended,
    gathered,
    reduced,
)
from mkernel.backends.accelerators.ascend.predict_moe import combined, dispatched
from mkernel.backends.accelerators.ascend.settings import AscendSettings
from mkernel.errors import ArgumentError
from mkernel.plan.model import (
    DTYPE_BYTES,
    AttentionShape,
    CombineShape,
    CommonPart,
    DispatchShape,
    DtypeName,
    KeysTravel,
    MoeShape,
    OpName,
    Prediction,
    Schedule,
)
from mkernel.plan.paths import LEAST_FUSED_SUMS
from mkernel.plan.pipeline import Chunking, GemmTile, Pipeline, Tiling
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.plan.standard import MAX_CHUNKS, by_rows, by_tiles, choose, comm_blocks, cut, tiling
from mkernel.settings import load_as, variable

_PREFIX = str(AscendSettings.model_config["env_prefix"])

MOE_CHUNKS: dict[OpName, int] = {"moe_dispatch": 32, "moe_dispatch_gemm": 32, "moe_combine": 64}
MOE_TOKENS = 64
"""The fewest tokens of a chunk if a rank has more than four chunks; MOE_CHUNKS is the most chunks
per rank."""
MOE_SENDERS: dict[OpName, int] = {"moe_dispatch": 2, "moe_dispatch_gemm": 2, "moe_combine": 4}
"""Vector cores that send to one rank; each core then serves one rank, and none waits for another's
link."""
GATHER_TILE = GemmTile(depth_bytes=256)
REDUCE_TILE = GemmTile(depth_bytes=128)
"""A tile that is narrow along K, so that L1 has three or four stages of loads, and room for the
columns of B, or the rows of A, that it keeps."""
LEAVES_TILE = REDUCE_TILE.model_copy(update={"columns": 128})
"""The tile of invariant sums in which a rank has several leaves. L0C holds two, so that one is stored
while the next is multiplied. Its K steps are those of ``REDUCE_TILE``: all invariant sums have the
same, whatever their rows and ranks."""
SHORT_TILE, SHORT_K_BYTES = GemmTile(columns=128, depth_bytes=256, step_bytes=256), 3 << 10
"""The tile of GEMM+ReduceScatter for products of so short a K that L1 keeps all of A's rows, and
the bytes of the longest such K. L0C holds two such tiles, so that one is stored while the next is
multiplied, and no tile loads more because it is narrow. An AllReduce pays a link's latency twice
for each of its results, so it gains from fewer and wider ones."""


class ProductSchedule(Schedule):
    """The schedule of a GEMM op. ``chunking`` applies to what a rank sends. ``cube_cores``
    multiply; ``comm_cores``, vector cores, communicate."""

    chunking: Chunking
    cube_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class GemmSchedule(ProductSchedule):
    """The schedule of AllGather+GEMM."""

    kind: Literal["ascend.gemm"] = "ascend.gemm"


class ReduceSchedule(ProductSchedule):
    """The schedule of GEMM+ReduceScatter and GEMM+AllReduce.

    Results of single ranks travel in ``partial_dtype``: float32, or the output's dtype, to which
    each is then rounded once before they are added; those of invariant sums in the dtype of these.
    Output tiles are numbered in bands of ``band``
    groups of ``tile_m`` rows, within a band column by column (``kernels/gemm_reduce/args.hpp``)."""

    kind: Literal["ascend.gemm_reduce"] = "ascend.gemm_reduce"
    partial_dtype: DtypeName
    band: int = Field(ge=1)

    @property
    def partials(self) -> str:
        """The value of ``partial_dtype``."""
        return self.partial_dtype

    def owned(self, rows: int, columns: int, world: int) -> tuple[int, ...]:
        """Return the elements of each rank's run of tiles."""
        cut = self.chunking
        tiles = -(-rows // cut.tile_m) * -(-columns // cut.tile_n)
        edges = [self._before(tiles * rank // world, rows, columns) for rank in range(world + 1)]
        return tuple(end - start for start, end in pairwise(edges))

    def _before(self, tile: int, rows: int, columns: int) -> int:
        """Return the elements of the tiles before one (``Geometry::before`` of the kernels)."""
        cut = self.chunking
        groups, across = -(-rows // cut.tile_m), -(-columns // cut.tile_n)
        if tile == groups * across:
            return rows * columns
        first = tile // (self.band * across) * self.band
        height = min(self.band, groups - first)
        column, group = divmod(tile - first * across, height)
        above = first * cut.tile_m
        of_band = min(rows - above, self.band * cut.tile_m)
        left = column * cut.tile_n
        width = min(columns - left, cut.tile_n)
        return above * columns + of_band * left + group * cut.tile_m * width


class DispatchSchedule(Schedule):
    """The schedule of MoE dispatch+GEMM. Tokens travel in chunks of ``rows_per_chunk`` of their
    rank; ``tiling`` is that of the products. ``cube_cores`` multiply; of the vector cores
    ``comm_cores`` send, and ``vector_cores`` build tables and spread tokens."""

    kind: Literal["ascend.moe_dispatch"] = "ascend.moe_dispatch"
    rows_per_chunk: int = Field(ge=1)
    tiling: Tiling
    cube_cores: int = Field(ge=1)
    vector_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class CombineSchedule(Schedule):
    """The schedule of MoE combine, and of a dispatch without a product. Results return, and tokens
    travel, in chunks of ``rows_per_chunk`` tokens of the token's rank. Vector cores do everything:
    ``comm_cores`` send, ``vector_cores`` add up what arrived, or build tables and spread tokens."""

    kind: Literal["ascend.moe_combine"] = "ascend.moe_combine"
    rows_per_chunk: int = Field(ge=1)
    vector_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class AttentionSchedule(Schedule):
    """The schedule of ring attention. Keys and values travel in chunks of ``rows_per_chunk``
    positions. ``cube_cores`` multiply, each with VECTORS_PER_CUBE vector cores for its softmax;
    ``comm_cores``, further vector cores, send."""

    kind: Literal["ascend.ring_attention"] = "ascend.ring_attention"
    rows_per_chunk: int = Field(ge=1)
    cube_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)

    @property
    def keys_travel(self) -> KeysTravel:
        """Return that ranks send what queries of the receiver see."""
        return "seen"


_BY_ROWS: dict[OpName, type[DispatchSchedule | CombineSchedule | AttentionSchedule]] = {
    "moe_dispatch": CombineSchedule,
    "moe_dispatch_gemm": DispatchSchedule,
    "moe_combine": CombineSchedule,
    "ring_attention": AttentionSchedule,
}

_MOE = (MoeShape, DispatchShape, CombineShape)


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule GEMM ops in chunks of tiles, the others in chunks of rows."""
    plan = request.plan
    made = _BY_ROWS.get(plan.op)
    if made is None:
        return _gemm(request)
    if plan.op == "ring_attention" and request.comm_blocks is None:
        # One block sends as fast as a link; every further block costs half a cube core.
        destinations = plan.ranks_per_node - 1 + (plan.nodes > 1)
        request = replace(request, comm_blocks=max(1, destinations))
    if isinstance(plan.shape, _MOE) and request.chunk is None:
        # Vector cores take chunks in turns, so that there must be several for each.
        chunks = min(MOE_CHUNKS[plan.op], max(4, plan.shape.tokens // MOE_TOKENS))
        request = replace(request, chunk=-(-plan.shape.tokens // chunks))
    if isinstance(plan.shape, _MOE) and request.comm_blocks is None:
        others = max(1, plan.world_size - 1)
        most = _most_senders(plan.op, request.capabilities.comm_cores)
        each = min(MOE_SENDERS[plan.op], max(1, most // others))
        request = replace(request, comm_blocks=min(others * each, most))
    found = by_rows(request)
    decided = found.schedule.model_dump(exclude={"kind", "order"})
    decided |= cores(
        plan.op,
        found.pipeline.compute_blocks,
        found.pipeline.comm_blocks,
        request.capabilities.comm_cores,
    )
    if isinstance(plan.shape, MoeShape):
        decided["tiling"] = tiling(plan.dtype)
    if request.constants and not request.measured:
        pipeline = replace(found.pipeline, comm_blocks=decided["comm_cores"])
        known = plan, request.links, pipeline, request.constants, machine()
        if isinstance(plan.shape, AttentionShape):
            # Fewer cores that have equally many tiles of queries beat more that have not.
            most = decided["cube_cores"]
            counts = range(most, most - 1 if request.compute_blocks else most * 3 // 4, -1)
            by_cores = {count: attended(*known, count) for count in counts}
            decided["cube_cores"] = min(by_cores, key=lambda count: by_cores[count].pipelined_us)
            times = by_cores[decided["cube_cores"]]
        else:
            rows, vectors = decided["rows_per_chunk"], decided["vector_cores"]
            if isinstance(plan.shape, MoeShape | DispatchShape):
                times = dispatched(*known, rows, vectors, decided.get("tiling"))
            else:
                times = combined(*known, rows, vectors)
        found = found._replace(prediction=times)
    return found._replace(schedule=made(**decided))


def _gemm(request: ScheduleRequest) -> Scheduled:
    """Schedule a GEMM op. The settings of tiles, cores and chunks apply unless the call itself has
    options for them."""
    how, claims = load_as(AscendSettings), request.capabilities
    request = replace(
        request,
        compute_blocks=request.compute_blocks or how.cube_cores,
        comm_blocks=request.comm_blocks or how.comm_cores,
    )
    for name, most, kind in (
        ("cube_cores", claims.compute_cores, "cube"),
        ("comm_cores", claims.comm_cores, "vector"),
    ):
        wish = getattr(how, name)
        if wish is not None and wish > most:
            legal = f"at most {most}, the {kind} cores of the chip (MKERNEL_ASCEND_MACHINE)"
            raise ArgumentError(variable((name,), _PREFIX), wish, legal)
    if request.plan.op == "all_gather_gemm":
        return _gather(request, how)
    return _reduce(request, how)


def check_steps(plan: CommonPart, cut: Tiling) -> None:
    """Raise ValueError for K steps that invariant results do not have, which have the same in every
    plan of an op and a dtype."""
    usual = {"all_gather_gemm": GATHER_TILE, "moe_dispatch_gemm": GemmTile()}
    own = tiling(plan.dtype, usual.get(plan.op, REDUCE_TILE))
    if plan.invariant is not None and (cut.tile_k, cut.step_k) != (own.tile_k, own.step_k):
        raise ValueError(
            f"tile_k, step_k = {cut.tile_k}, {cut.step_k}, but invariant results of {plan.op} in "
            f"{plan.dtype} have {own.tile_k}, {own.step_k}"
        )


def _tile(usual: GemmTile, how: AscendSettings, plan: CommonPart) -> GemmTile:
    """Return the usual tile, changed by the settings. ArgumentError, which names the settings: the
    buffers of a cube core do not hold the tile, or it has other K steps than invariant results."""
    dtype = plan.dtype
    if plan.invariant is not None and how.tile_k is not None:
        legal = "None: invariant results have the same K steps in every plan"
        raise ArgumentError(variable(("tile_k",), _PREFIX), how.tile_k, legal)
    depth = usual.depth_bytes if how.tile_k is None else how.tile_k * DTYPE_BYTES[dtype]
    step = next(step for step in range(usual.step_bytes, 0, -1) if depth % step == 0)
    tile = GemmTile(
        rows=how.tile_m or usual.rows,
        columns=how.tile_n or usual.columns,
        depth_bytes=depth,
        step_bytes=step,
    )
    set_ = [name for name in ("tile_m", "tile_n", "tile_k") if getattr(how, name) is not None]
    for buffer, needed, most in (
        ("L1", 2 * depth * (tile.rows + tile.columns), L1),
        ("L0A", 2 * step * tile.rows, L0AB),
        ("L0B", 2 * step * tile.columns, L0AB),
        ("L0C", 4 * tile.rows * tile.columns, L0C),
    ):
        if set_ and needed > most:
            raise ArgumentError(
                ", ".join(variable((name,), _PREFIX) for name in set_),
                ", ".join(str(getattr(how, name)) for name in set_),
                f"a tile that takes at most {most} bytes of {buffer}",
                why=f"{tile.rows} x {tile.columns}, K {depth // DTYPE_BYTES[dtype]}, takes {needed}",
            )
    return tile


def _gather(request: ScheduleRequest, how: AscendSettings) -> Scheduled:
    """Choose chunks and blocks by predicted times: few blocks per destination and small chunks
    bring the first chunks early; many blocks send at the link's rate without a gap for their
    signals."""
    plan, constants = request.plan, request.constants
    world = plan.world_size
    tile = _tile(GATHER_TILE, how, plan)
    found = by_tiles(request, tile=tile)
    pipeline, alternatives = found.pipeline, tuple[Alternative, ...]()
    if request.measured is None and constants is not None:

        def times(option: Pipeline) -> Prediction:
            return gathered(plan, request.links, option, constants, machine())

        def cut_in(tiles: int | None) -> Chunking:
            return cut("all_gather_gemm", plan.gemm, world, plan.dtype, tiles, tile)

        whole = cut_in(1).chunks_per_rank  # tiles
        least = -(-whole // min(MAX_CHUNKS, how.most_chunks))
        cuts, blocks = [cut_in(request.chunk or least)], [pipeline.comm_blocks]
        if request.chunk is None:
            cuts += [cut_in(factor * least) for factor in (2, 4, 8, 16) if factor * least < whole]
        if request.comm_blocks is None:
            few = comm_blocks(plan.nodes, plan.ranks_per_node, request.capabilities.comm_cores)
            blocks = [few, max(1, few // 2), min(2 * few, request.capabilities.comm_cores)]
        options = [
            replace(pipeline, chunking=chunking, comm_blocks=count)
            for count in dict.fromkeys(blocks)
            for chunking in dict.fromkeys(cuts)
        ]
        pipeline, alternatives = choose(
            "chunk and blocks",
            options,
            lambda option: times(option).pipelined_us,
            lambda option: (
                f"{option.chunking.tiles_per_chunk if option.chunking else 0} tiles, "
                f"{option.comm_blocks} blocks"
            ),
        )
        found = found._replace(prediction=times(pipeline))
    decided = {
        "chunking": pipeline.chunking,
        "cube_cores": pipeline.compute_blocks,
        "comm_cores": pipeline.comm_blocks,
    }
    return found._replace(
        schedule=GemmSchedule(**decided), pipeline=pipeline, alternatives=alternatives
    )


def _reduce(request: ScheduleRequest, how: AscendSettings) -> Scheduled:
    """Choose bands and chunks. A band has as many row groups as give all ranks' owners together one
    tile per core. A chunk is one tile, or a number of tiles that divides a band, so that a core
    continues with the same rows. All vector cores communicate.

    Partial results travel in the output's dtype if that is predicted to be faster, and sums are
    large enough that the error stays within one rounding's (``LEAST_FUSED_SUMS``). Invariant sums
    decide neither that nor K steps by the call."""
    plan, claims = request.plan, request.capabilities
    shape, world = plan.gemm, plan.world_size
    everywhere = plan.op == "gemm_all_reduce"
    cube = request.compute_blocks or claims.compute_cores

    def owned(tile: GemmTile) -> int:
        tiles = groups(tile) * -(-shape.n // tile.columns)
        return -(-tiles // (world if everywhere else 1))

    def groups(tile: GemmTile) -> int:
        return -(-(shape.m if everywhere else shape.m // world) // tile.rows)

    several = plan.invariant is not None and plan.invariant.segments > world
    tile = _tile(LEAVES_TILE if several else REDUCE_TILE, how, plan)
    band = _band(cube, world, groups(tile))
    short = shape.k * DTYPE_BYTES[plan.dtype] <= SHORT_K_BYTES and not (everywhere and world > 1)
    asked = how.tile_m or how.tile_n or how.tile_k or plan.invariant
    if short and not asked and owned(SHORT_TILE) <= band * how.most_chunks:
        tile = SHORT_TILE
    whole = replace(
        request,
        chunk=request.chunk or _chunk(owned(tile), band, how.most_chunks),
        comm_blocks=request.comm_blocks or claims.comm_cores,
    )
    found = by_tiles(whole, tile=tile)
    kinds: list[DtypeName] = [plan.out_dtype]
    if plan.invariant is not None:
        kinds = [plan.invariant.partial_dtype or plan.out_dtype]
    elif plan.out_dtype != "float32":
        small = shape.m * shape.n < LEAST_FUSED_SUMS * world
        kinds.insert(0 if small else 1, "float32")
        if small:
            kinds = kinds[:1]
    times: dict[DtypeName, Prediction] = {}

    def pipelined_us(kind: DtypeName) -> float:
        assert request.constants is not None
        times[kind] = reduced(
            plan, request.links, found.pipeline, request.constants, machine(), kind, band
        )
        return times[kind].pipelined_us

    partial, considered = kinds[0], tuple[Alternative, ...]()
    if request.constants is not None:
        pipelined_us(partial)
        partial, considered = choose("partials", kinds, pipelined_us)
    schedule = ReduceSchedule(**_decided(found), partial_dtype=partial, band=band)
    return Scheduled(
        schedule,
        found.pipeline,
        request.measured or times.get(partial),
        found.alternatives + considered,
    )


def _band(cores: int, world: int, groups: int) -> int:
    """Return the row groups of an owner that are computed at once: the most with which bands of all
    owners fill the cores evenly, or else as many as there are cores for."""
    most = max(1, min(cores // world, groups))
    even = [band for band in range(1, most + 1) if cores % (band * world) == 0]
    return max(even, default=most)


def _chunk(tiles: int, band: int, most: int) -> int:
    """Return the tiles of a chunk: the fewest that divide a band and make at most ``most`` chunks
    of an owner's tiles, or else whole bands."""
    least = -(-tiles // most)
    for chunk in range(least, band + 1):
        if band % chunk == 0:
            return chunk
    return -(-least // band) * band


def _decided(found: Scheduled) -> dict[str, Any]:
    decided = found.schedule.model_dump(exclude={"kind", "order"})
    cube, comm = found.pipeline.compute_blocks, found.pipeline.comm_blocks
    return decided | {"cube_cores": cube, "comm_cores": comm}


def cores(op: OpName, cube: int, comm: int, vectors: int) -> dict[str, int]:
    """Return the fields of a schedule that give its kernels cores.

    Args:
        cube, comm: cores for each kernel according to the cost model.
        vectors: vector cores of the chip, which both kernels of MoE and of attention share. At most
            half of them communicate in a dispatch, two thirds in a combine; in attention all but
            those of one cube core may, so there may be fewer cube cores.
    """
    if op == "ring_attention":
        comm = min(comm, vectors - VECTORS_PER_CUBE)
        cube = min(cube, (vectors - comm) // VECTORS_PER_CUBE)
        return {"cube_cores": cube, "comm_cores": comm}
    if op not in _BY_ROWS:
        return {"cube_cores": cube, "comm_cores": comm}
    comm = min(comm, _most_senders(op, vectors))
    shared = {"vector_cores": min(VECTORS_PER_CUBE * cube, vectors - comm), "comm_cores": comm}
    return shared if _BY_ROWS[op] is CombineSchedule else {"cube_cores": cube, **shared}


def _most_senders(op: OpName, vectors: int) -> int:
    """Return the most vector cores of MoE that may communicate: a combine has more to send than to
    add."""
    return max(1, vectors * 2 // 3 if op == "moe_combine" else vectors // 2)
