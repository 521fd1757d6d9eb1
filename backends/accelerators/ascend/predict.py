"""Predicted times of the GEMM ops and of ring attention from a machine description: tiles in waves,
each bound by the matrix unit or by a core's share of the memory path; bytes over links; the work
after the last tile.

These are closed forms of the schedule, and are compared with its replay (``sim/replay.hpp``); they
need no device and no record. Microseconds; rates are GB/s, so that 1e3 bytes take a microsecond at
1.
"""

from __future__ import annotations

from typing import NamedTuple

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, DtypeName, Prediction
from mkernel.plan.pipeline import Pipeline, Tiling
from mkernel.plan.predict import messages_us, payloads, prediction, work
from mkernel.topology.cost import MachineConstants
from mkernel.topology.routes import SharedLinks

L1, L0AB, L0C = 512 << 10, 64 << 10, 128 << 10
"""Bytes of a cube core's buffers (``isa/tile.hpp``)."""
VECTORS_PER_CUBE = 2
"""Vector cores of the compute kernel for each of its cube cores, if it has any."""
MOST_QUERIES, MOST_KEYS, ORDERED_KEYS, RESULTS = 128, 1024, 128, 128 * 128
"""Attention's limits: queries of a row block, keys of a tile, and elements of a block's results.
Long pieces have tiles of ``BLOCKS`` blocks and of all these keys; short ones have tiles of one
block and of half the keys (``kernels/ring_attention/args.hpp``)."""
BLOCKS = 2
VECTOR_PASSES = 6
"""Passes over a tile of scores: scale, row maximum, subtract, exponential, row sum, round."""
_STAGES = 4


class Tiles(NamedTuple):
    """Output tiles of a rank: ``number`` of them, on ``cores``. ``same_rows`` tiles in succession
    on a core have the same rows of A, or ``same_columns`` the same columns of B. ``stored``: the
    dtype in which they leave L0C."""

    number: int
    cores: int
    tiling: Tiling
    k: int
    dtype: DtypeName
    stored: DtypeName
    same_rows: float = 1.0
    same_columns: float = 1.0
    leaves: int = 1
    """Results that one tile stores, of as many segments of K."""

    @property
    def waves(self) -> int:
        """The tiles of the busiest core."""
        return -(-self.number // self.cores)

    @property
    def stored_bytes(self) -> int:
        """The bytes that one tile stores."""
        return self.leaves * self.tiling.tile_m * self.tiling.tile_n * DTYPE_BYTES[self.stored]

    @property
    def loaded_bytes(self) -> float:
        """The bytes that one tile loads, on average: A and B, less the part of either that L1 keeps
        (``kernels/gemm/product.hpp``)."""
        t, size = self.tiling, DTYPE_BYTES[self.dtype]
        a, b = t.tile_m * t.tile_k * size, t.tile_n * t.tile_k * size
        stages = min(_STAGES, max(2, L1 * 5 // 8 // (a + b)))
        k_tiles = -(-self.k // t.tile_k)
        fit = (L1 - stages * b) // a
        kept = 0 if k_tiles < stages else k_tiles if fit >= k_tiles else fit - stages
        of_a = (1 - 1 / self.same_rows) * min(kept * a, t.tile_m * self.k * size)
        of_b = (1 - 1 / self.same_columns) * min(
            (L1 - stages * (a + b)) // b * b, t.tile_n * self.k * size
        )
        return (t.tile_m + t.tile_n) * self.k * size - of_a - of_b


def tile_us(tiles: Tiles, machine: Machine, tflops: float, other_bytes: float = 0.0) -> float:
    """Return the time of one tile on one of many cores. ``other_bytes``: bytes that pass the memory
    per tile beside the tile's own."""
    t, cube = tiles.tiling, machine.cube
    busy = min(tiles.cores, tiles.number)
    steps = tiles.leaves * -(-tiles.k // tiles.leaves // t.step_k)
    products = (
        2.0 * t.tile_m * t.tile_n * tiles.k / (tflops * 1e6)
        + steps * cube.startup_cycles / machine.clock_ghz / 1e3
    )
    latency = machine.pipes.memory_latency_ns / 1e3
    store = tiles.stored_bytes / machine.pipes.fix_gbs / 1e3 + tiles.leaves * latency
    if 2 * t.tile_m * t.tile_n * 4 > L0C:  # one output tile in L0C: products wait for its store
        products += store
    share = min(machine.pipes.mte2_gbs, machine.chip.l2_gbs / busy)
    passed = tiles.loaded_bytes + tiles.stored_bytes + other_bytes
    loads = max(tiles.loaded_bytes / share, passed * busy / machine.chip.l2_gbs) / 1e3
    return max(products, loads, store)


def product_us(tiles: Tiles, machine: Machine, tflops: float, other_bytes: float = 0.0) -> float:
    """Return the time of all tiles of a rank, from the first load to the last store."""
    latency = machine.pipes.memory_latency_ns / 1e3
    store = tiles.stored_bytes / tiles.leaves / machine.pipes.fix_gbs / 1e3
    return tiles.waves * tile_us(tiles, machine, tflops, other_bytes) + 2 * latency + store


def reduced(
    plan: CommonPart,
    links: SharedLinks,
    pipeline: Pipeline,
    constants: MachineConstants,
    machine: Machine,
    partial_dtype: DtypeName,
    band: int,
) -> Prediction:
    """Predict GEMM+ReduceScatter and GEMM+AllReduce (``kernels/gemm_reduce``).

    T_m = (M/W·N·s of the partials, and of the results if all ranks get them) to each peer.
    pipelined = max(T_c + tail, first wave + T_m + tail): the tail is the remaining path of the last
    wave's tiles, to their owner, through the sum, and to the other ranks.

    Where a rank has several leaves of invariant sums, cube cores store each of them, and vector
    cores add them up before they send: T_c is then at least the time of all additions.
    """
    shape, cut, world = plan.gemm, pipeline.chunking, plan.world_size
    assert cut is not None, "GEMM ops are cut in tiles"
    everywhere = plan.op == "gemm_all_reduce"
    rows = shape.m if everywhere else shape.m // world
    columns = -(-shape.n // cut.tile_n)
    count = -(-rows // cut.tile_m) * columns * (1 if everywhere else world)
    cores = pipeline.compute_blocks
    # The next tile of a core has the same rows if whole bands of all owners fill the cores.
    at_once = band * world
    again = cores % at_once == 0 and (world == 1 or band % cut.tiles_per_chunk == 0)
    same_rows = max(1.0, columns * at_once / cores) if again else 1.0
    tree = plan.invariant is not None
    leaves = max(1, plan.invariant.segments // world) if plan.invariant else 1
    stored = plan.out_dtype if world * leaves == 1 else partial_dtype
    tiles = Tiles(count, cores, cut, shape.k, plan.dtype, stored, same_rows, leaves=leaves)
    rate = constants.tflops_per_core(plan.dtype)
    compute = product_us(tiles, machine, rate)
    if world * leaves == 1:
        return prediction(compute, 0.0, compute, constants.launch_us, constants)

    part, result = DTYPE_BYTES[partial_dtype], DTYPE_BYTES[plan.out_dtype]
    elements = shape.m * shape.n

    others = (world - 1) / world
    moved = elements * (2 * others * part + part)  # read, written by peers, added up
    moved += (
        elements / world * result * (3 if everywhere else 1)
        + 2 * others * elements * result * everywhere
    )
    if leaves > 1:
        moved += elements * part * (leaves + others)
    busy = product_us(tiles, machine, rate, moved / count)

    latency, signal = constants.p2p_latency_us, constants.signal_us
    tile = cut.tile_m * cut.tile_n
    a_peer = -(-min(cores, count) // world)  # tiles of a wave
    link = min(constants.p2p_gbs, constants.comm_block_gbs) * 1e3
    add = _sum_us(tile, part, world + leaves - 1, machine, tree)
    first = tile_us(tiles, machine, rate, moved / count)
    if leaves > 1:
        before = _sum_us(tile, part, leaves, machine, tree)
        busy = max(busy, first + count * (add / world + before * others) / pipeline.comm_blocks)
        add += before * (world > 1)
    if world == 1:
        return prediction(compute, add, busy + add, constants.launch_us, constants)
    payload = sum(
        payloads(plan.op, shape, plan.dtype, world, partials=partial_dtype, results=plan.out_dtype)
    )
    sent = messages_us(payload, links, pipeline, constants)
    tail = a_peer * tile * part / link + latency + signal + add
    spread_tail = (a_peer * tile * result / link + 2 * latency + signal) if everywhere else 0.0
    alone = sent + add + latency + signal + (2 * latency + signal) * everywhere
    pipelined = max(busy + tail + spread_tail, first + alone)
    return prediction(
        compute, alone, min(pipelined, compute + alone), constants.launch_us, constants
    )


def _sum_us(tile: int, size: int, terms: int, machine: Machine, tree: bool) -> float:
    """Return the time to load and add a tile's partials on one vector core; the last loads add a
    latency. A tree rounds each sum, and widens what is rounded; in float32 it copies half of the
    partials."""
    vector = machine.vector.bytes_per_cycle * machine.clock_ghz * 1e3
    passes = (2 * terms + 1) if size == 2 else terms
    if tree:
        passes += 2 * (terms - 1) if size == 2 else terms // 2
    work = passes * tile * 4 / vector
    loads = terms * tile * size / machine.pipes.mte2_gbs / 1e3
    return max(work, loads) + 3 * machine.pipes.memory_latency_ns / 1e3


def gathered(
    plan: CommonPart,
    links: SharedLinks,
    pipeline: Pipeline,
    constants: MachineConstants,
    machine: Machine,
) -> Prediction:
    """Predict AllGather+GEMM (``kernels/ag_gemm``).

    T_m = M/W·K·s to each peer. The blocks that serve a peer send a chunk each at the same time, so
    all of these arrive when the last of them does. pipelined = max(T_c, first chunks + the waves of
    all but the own rows, T_m + a wave).
    """
    shape, cut, world = plan.gemm, pipeline.chunking, plan.world_size
    assert cut is not None, "GEMM ops are cut in tiles"
    rows = shape.m // world
    columns = -(-shape.n // cut.tile_n)
    own = -(-rows // cut.tile_m) * columns
    cores = pipeline.compute_blocks
    tiles = Tiles(own * world, cores, cut, shape.k, plan.dtype, plan.out_dtype)
    if cores % columns == 0 or columns == cores:  # each core stays with its columns
        tiles = tiles._replace(same_columns=max(1.0, own * world / cores))
    rate = constants.tflops_per_core(plan.dtype)
    compute = product_us(tiles, machine, rate)
    if world == 1:
        return prediction(compute, 0.0, compute, constants.launch_us, constants)
    shard = payloads(plan.op, shape, plan.dtype, world).gather
    sent = messages_us(shard, links, pipeline, constants)
    at_once = min(cut.chunks_per_rank, -(-pipeline.comm_blocks // (world - 1)))
    first = sent * at_once / cut.chunks_per_rank + constants.p2p_latency_us + constants.signal_us
    moved = 3.0 * (world - 1) * shard / tiles.number  # each put passes memory at both ends
    one = tile_us(tiles, machine, rate, moved)
    busy = product_us(tiles, machine, rate, moved)
    late = first + -(-own * (world - 1) // cores) * one
    last = sent + constants.p2p_latency_us + constants.signal_us + one
    pipelined = max(busy, late, last)
    return prediction(compute, sent, min(pipelined, compute + sent), constants.launch_us, constants)


def attended(
    plan: CommonPart,
    links: SharedLinks,
    pipeline: Pipeline,
    constants: MachineConstants,
    machine: Machine,
    cubes: int,
) -> Prediction:
    """Predict ring attention (``kernels/ring_attention``).

    Scores, weights and parts pass the memory between a cube core and its vector cores, and keys and
    values are loaded for each tile of queries. Cores take the tiles in turns, so some have one more
    than others.

    T_m = 2·B·H_kv·(S/W)·D·s to each peer. pipelined = T_c + the part of T_m that the products with
    own keys, a share of 1/W, do not cover.
    """
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, AttentionShape), "attention has no other shape"
    size, width, own = DTYPE_BYTES[plan.dtype], shape.head_dim, shape.sequence // world
    piece = own // (2 if shape.causal else 1)
    long_pieces = piece >= MOST_KEYS
    queries = max(16, min(MOST_QUERIES, RESULTS // width // 16 * 16)) * (
        BLOCKS if long_pieces else 1
    )
    keys = min(MOST_KEYS if long_pieces else MOST_KEYS // 2, piece)
    if plan.invariant is not None:
        keys = min(ORDERED_KEYS, piece)
    items = shape.batch * shape.heads * (own // piece) * -(-piece // queries)
    scores = work(shape, world) / (4.0 * width)
    if shape.causal:  # tiles across the diagonal are computed whole
        scores += shape.batch * shape.heads * own * min(queries, piece) / 2
    ring = 2.0 * (4 + size) + 8.0 * width / keys
    inputs = 2.0 * width * size / queries
    latency = machine.pipes.memory_latency_ns / 1e3
    vector = machine.vector.bytes_per_cycle * machine.clock_ghz * VECTORS_PER_CUBE
    rate = constants.tflops_per_core(plan.dtype) * 1e3
    a_score = max(
        (ring + inputs) * cubes / machine.chip.l2_gbs,
        4.0 * width / rate,
        (4 + 4.0 * width / keys) / machine.pipes.fix_gbs,
        (inputs + size) / machine.pipes.mte2_gbs,
        4.0 * VECTOR_PASSES / vector,
    )
    of_a_core = scores / items * -(-items // cubes)
    compute = of_a_core * a_score / 1e3 + of_a_core / (queries * keys) * latency
    if world == 1:
        return prediction(compute, 0.0, compute, constants.launch_us, constants)
    payload = sum(payloads(plan.op, shape, plan.dtype, world))
    sent = messages_us(payload, links, pipeline, constants)
    pipelined = compute + max(0.0, sent - compute / world)
    return prediction(compute, sent, min(pipelined, compute + sent), constants.launch_us, constants)
