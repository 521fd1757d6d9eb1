"""Predicted times of MoE from a machine description: the scalar instructions that make the tables,
one transfer of a token over each link, and the work after the last chunk. Routing is balanced
(:data:`mkernel.plan.traffic.Routing`).

These are closed forms of the schedule, and are compared with its replay (``sim/replay.hpp``); they
need no device and no record. Microseconds; rates are GB/s, so that 1e3 bytes take a microsecond at
1.
"""

from __future__ import annotations

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.accelerators.ascend.predict import Tiles, tile_us
from mkernel.plan.model import (
    DTYPE_BYTES,
    CombineShape,
    CommonPart,
    DispatchShape,
    MoeShape,
    Prediction,
)
from mkernel.plan.pipeline import Pipeline, Tiling
from mkernel.plan.predict import messages_us, payloads, prediction
from mkernel.topology.cost import MachineConstants
from mkernel.topology.routes import SharedLinks

_ID_BYTES = 4
_BAND_BYTES, _BAND_COLUMNS = 16 << 10, 512
"""The limits of a band, the rows that a combine adds up at once, in float32
(``kernels/moe_combine/vector.hpp``)."""
_SLOT_INSTRUCTIONS, _SUM_INSTRUCTIONS, _SUM_PASSES = 8, 6, 3
"""Costs of a combine: instructions issued for each slot of a band beside the loads of its rows, and
for the sum of all slots; passes of the vector pipe over the rows of a slot (widen, weight, add)."""


def dispatched(
    plan: CommonPart,
    links: SharedLinks,
    pipeline: Pipeline,
    constants: MachineConstants,
    machine: Machine,
    rows_per_chunk: int,
    vectors: int,
    cut: Tiling | None,
) -> Prediction:
    """Predict MoE dispatch+GEMM (``kernels/moe``); without a product, ``cut`` is None.

    T_m = min(1, k/W)·T·H·s and T·k ids to each peer, after the search of the first chunk. T_c =
    tables, chunks spread in turns by the vector cores, and the products, which cannot begin before
    a first chunk is spread, nor end before the last one is. pipelined = max(T_c, T_m + the
    remaining work on the last chunks).
    """
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, MoeShape | DispatchShape), "a dispatch has no other shape"
    pipes, latency = machine.pipes, machine.pipes.memory_latency_ns / 1e3
    word, issue = pipes.scalar_ns / 1e3, pipes.issue_ns / 1e3
    size, own = DTYPE_BYTES[plan.dtype], shape.experts // world
    chunks = -(-shape.tokens // rows_per_chunk)
    places = shape.top_k * min(rows_per_chunk, shape.tokens)  # of a chunk
    here = places / world
    rounds = -(-world * chunks // vectors)
    count = word * (places + 3 * here + own)
    place = word * chunks * (own * (world + 1) + 3)
    at_once = min(vectors, world * chunks)
    put_gbs = min(pipes.mte3_gbs, machine.chip.l2_gbs / (2 * at_once))  # in and out of one memory
    row = shape.hidden * size / put_gbs / 1e3
    spread = here * max(5 * word + issue, row) + word * (rows_per_chunk + 2 * own) + 2 * latency
    home = -(-chunks // vectors) * word * (2 * places + chunks * world)
    products = after = 0.0
    if isinstance(shape, MoeShape):
        assert cut is not None
        rate = constants.tflops_per_core(plan.dtype)
        rows = shape.tokens * shape.top_k
        columns = -(-shape.features // cut.tile_n)
        of_an_expert = -(-rows // (own * cut.tile_m))  # row tiles
        number = columns * own * of_an_expert
        cut = cut.model_copy(update={"tile_m": -(-rows // (own * of_an_expert))})  # in the mean
        tiles = Tiles(
            number, pipeline.compute_blocks, cut, shape.hidden, plan.dtype, plan.out_dtype
        )
        tile = tile_us(tiles, machine, rate)
        # The first row tile of an expert reads its weights for the first time.
        weights = own * shape.hidden * shape.features * size / machine.chip.hbm_gbs / 1e3
        first_read = columns * own / number * tile * tiles.waves
        products = tile * tiles.waves + max(0.0, weights - first_read)
        # A row tile has rows of many chunks of a source: this share of all begins with the last one's.
        late = min(1.0, cut.tile_m * own * world / rows)
        after = max(min(2, tiles.waves) * tile, late * products) + 2 * latency
    tables = count * rounds + place
    compute = max(
        tables + spread * rounds + max(after, home),
        tables + home * (world > 1) + spread * rounds + after,
        tables + spread + products + 2 * latency,
    )
    if world == 1:
        return prediction(compute, 0.0, compute, constants.launch_us, constants)
    payload = payloads(plan.op, shape, plan.dtype, world, routing="balanced").gather
    payload += shape.tokens * shape.top_k * _ID_BYTES
    sent = messages_us(payload, links, pipeline, constants) + word * places
    pipelined = max(compute, sent + constants.p2p_latency_us + constants.signal_us + spread + after)
    return prediction(compute, sent, min(pipelined, compute + sent), constants.launch_us, constants)


def combined(
    plan: CommonPart,
    links: SharedLinks,
    pipeline: Pipeline,
    constants: MachineConstants,
    machine: Machine,
    rows_per_chunk: int,
    vectors: int,
) -> Prediction:
    """Predict MoE combine (``kernels/moe_combine``).

    T_m = T·k/W·I·s to each peer, row by row. T_c = bands of tokens in turns; the scalar pipe finds
    their rows and issues the loads one by one, once for each ``_BAND_COLUMNS`` columns. pipelined =
    max(T_c, T_m + a band).
    """
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, CombineShape), "a combine has no other shape"
    pipes, latency = machine.pipes, machine.pipes.memory_latency_ns / 1e3
    word, issue = pipes.scalar_ns / 1e3, pipes.issue_ns / 1e3
    size, rows = DTYPE_BYTES[plan.dtype], shape.tokens * shape.top_k
    passes = -(-shape.features // _BAND_COLUMNS)
    columns = min(_BAND_COLUMNS, shape.features)
    tokens = max(1, min(rows_per_chunk, shape.tokens, _BAND_BYTES // (4 * columns)))
    bands = -(-shape.tokens // rows_per_chunk) * -(-rows_per_chunk // tokens)
    # The cost of a slot of a band: one word per row, or two for an own expert's, and the row's
    # load; weights and flags, widening, and the sum.
    found = tokens * (word * (1 + 1 / world) + issue) + _SLOT_INSTRUCTIONS * issue
    load_gbs = min(pipes.mte2_gbs, machine.chip.l2_gbs / min(vectors, bands))
    loaded = tokens * columns * size / load_gbs / 1e3
    vector = machine.vector.bytes_per_cycle * machine.clock_ghz * 1e3
    adding = _SUM_PASSES * 4 * tokens * columns / vector
    a_slot = max(found, loaded, adding)
    band = passes * (shape.top_k * a_slot + _SUM_INSTRUCTIONS * issue)
    compute = -(-bands // vectors) * band + adding + 3 * latency
    if world == 1:
        return prediction(compute, 0.0, compute, constants.launch_us, constants)
    width = shape.features * size
    a_put = max(word + issue, width / pipes.mte3_gbs / 1e3)
    put = rows * (world - 1) / world / pipeline.comm_blocks * a_put
    payload = payloads(plan.op, shape, plan.dtype, world).gather
    sent = max(messages_us(payload, links, pipeline, constants), put)
    arrival = constants.p2p_latency_us + constants.signal_us + latency
    last = band + adding + 3 * latency
    pipelined = max(compute, sent + arrival + last)
    return prediction(compute, sent, min(pipelined, compute + sent), constants.launch_us, constants)
