"""Predicted times of a plan, from the closed-form model; they are modelled, never measured."""

from __future__ import annotations

from typing import NamedTuple

from mkernel.plan.model import (
    DTYPE_BYTES,
    CombineShape,
    CommonPart,
    DispatchShape,
    DtypeName,
    GemmCombineShape,
    GemmShape,
    MoeShape,
    OpName,
    Prediction,
    Shape,
    SumShape,
)
from mkernel.plan.pipeline import Pipeline, Returns
from mkernel.plan.traffic import Routing, Traffic, Way, flows, traffic
from mkernel.topology.cost import (
    GemmCall,
    MachineConstants,
    gemm_tile_us,
    gemm_us,
    transfer_us,
)
from mkernel.topology.routes import RouteClass, SharedLinks


def predict(
    plan: CommonPart, links: SharedLinks, pipeline: Pipeline, constants: MachineConstants
) -> Prediction:
    """Predict any op: schedule-aware if tiles are planned, else by the closed form. ``plan`` is
    what all backends share of it; ``links`` are those of its routes."""
    if plan.op == "all_gather_gemm" and pipeline.chunking is not None:
        return all_gather_gemm(plan, links, pipeline, constants)
    return closed_form(plan, links, pipeline, constants)


def closed_form(
    plan: CommonPart, links: SharedLinks, pipeline: Pipeline, constants: MachineConstants
) -> Prediction:
    """Predict T_c = work / rate and T_m = bytes to every peer over the slowest link; s: bytes an
    element.

    AllGather+GEMM: work 2·M·K·N, M/W·K·s a peer. GEMM+ReduceScatter: 2·M·N·K, M/W·N·s a peer;
    GEMM+AllReduce: the same twice; AllReduce: M·N, and these bytes too. MoE: 2·T·k·H·I, and with
    uniform routing T·r·H·s a peer, r as :func:`wanted` says, or T·H·s where tokens travel whole; a
    combine T·k/W·I·s, GEMM+combine T·k/W·H·s, or T·r·H·s where sums of ranks come home; and ids, or
    weights. Ring attention: 4·B·H·(S/W)·S·D, halved when causal, 2·B·H_kv·(S/W)·D·s a peer. Bytes, also
    of the hierarchical exchange, are those of :mod:`mkernel.plan.traffic`.
    Backward: 2.5 times the work of attention, twice a dispatch's; float32 gradients travel too.
    pipelined = max(T_c, T_m) + launch, the floor; sequential = T_c + T_m + launch.
    """
    world = plan.world_size
    rate = (
        constants.tflops_per_core(plan.dtype) * pipeline.compute_blocks * 1e6
    )  # flop a microsecond
    compute = _MORE_WORK.get(plan.op, 1.0) * work(plan.shape, world) / rate
    comm = 0.0
    if world > 1:
        pairs = PairBytes.expected(traffic(plan, way_of(pipeline)))
        comm = max(_link_times(pairs, links, pipeline, 1, constants))
    return prediction(compute, comm, max(compute, comm), constants.launch_us, constants)


def prediction(
    compute: float,
    comm: float,
    pipelined: float,
    start: float,
    constants: MachineConstants,
    **paths: float,
) -> Prediction:
    """Make a prediction from times in microseconds without the start of a call, which is added to
    each.

    ``paths`` are the times of both paths with the start (``fused_us``, ``library_us``), if there
    are two.
    """
    return Prediction(
        compute_us=compute,
        comm_us=comm,
        sequential_us=compute + comm + start,
        pipelined_us=pipelined + start,
        constants=constants.name,
        measured=constants.measured,
        **paths,
    )


_MORE_WORK: dict[str, float] = {
    "ring_attention_backward": 2.5,
    "moe_dispatch_backward": 2.0,
    "moe_gemm_combine_backward": 2.0,
}
"""The factor of work over the op whose gradients it computes."""


def work(shape: Shape, world: int) -> float:
    """Return the number of floating-point operations of one rank."""
    if isinstance(shape, GemmShape):
        return 2.0 * shape.m * shape.n * shape.k
    if isinstance(shape, SumShape):  # each rank adds up its share
        return float(shape.m) * shape.n
    if isinstance(shape, MoeShape | GemmCombineShape):
        columns = shape.columns if isinstance(shape, MoeShape) else shape.features
        return 2.0 * shape.tokens * shape.top_k * shape.hidden * columns
    if isinstance(shape, CombineShape):
        return 2.0 * shape.tokens * shape.top_k * shape.features
    if isinstance(shape, DispatchShape):  # rows are moved alone
        return 0.0
    own = shape.sequence / world
    whole = 4.0 * shape.batch * shape.heads * own * shape.sequence * shape.head_dim
    return whole / 2 if shape.causal else whole


class Payloads(NamedTuple):
    """The bytes that a rank sends to each other rank: what its work reads (``gather``), partial
    results (``scatter``), and results (``spread``)."""

    gather: float = 0.0
    scatter: float = 0.0
    spread: float = 0.0


def way_of(pipeline: Pipeline) -> Way:
    """Return how a pipeline moves bytes, as far as the cost model knows it."""
    return Way(
        exchange=pipeline.exchange, returns=pipeline.returns, whole_tokens=pipeline.whole_tokens
    )


class PairBytes(NamedTuple):
    """The bytes that a rank sends to each rank of its node, to the rank in its place of each other
    node, and to each other rank there."""

    near: float
    rail: float
    cross: float

    @classmethod
    def expected(cls, found: Traffic) -> PairBytes:
        """Return what ranks send that all send alike."""
        each, nodes = found.ranks_per_node, found.nodes
        return cls(
            found.sent(0, 1) if each > 1 else 0.0,
            found.sent(0, each) if nodes > 1 else 0.0,
            found.sent(0, each + 1) if each > 1 and nodes > 1 else 0.0,
        )

    @classmethod
    def alike(cls, payload: float, links: SharedLinks, pipeline: Pipeline) -> PairBytes:
        """Return the bytes if each rank has ``payload`` for each other one, and, where nodes share
        them, the same for all ranks of a node."""
        if pipeline.exchange == "hierarchical":
            return cls(payload * links.placement.nodes, payload, 0.0)
        return cls(payload, payload, payload)


def sent_by(plan: CommonPart, pipeline: Pipeline) -> Payloads:
    """Return the bytes that each ordered pair of ranks exchanges in a pipeline of a plan."""
    return payloads(
        plan.op, plan.shape, plan.dtype, plan.world_size, pipeline.returns,
        whole_tokens=pipeline.whole_tokens,
    )  # fmt: skip


def payloads(
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    world: int,
    returns: Returns = "slots",
    *,
    partials: DtypeName | None = None,
    results: DtypeName | None = None,
    whole_tokens: bool = False,
    one_exchange: bool = False,
    routing: Routing = "uniform",
) -> Payloads:
    """Return the bytes that each ordered pair of ranks exchanges directly, as expected and without
    what describes rows, such as ids. They are those of :func:`mkernel.plan.traffic.flows`, by stage.

    Args:
        partials, results: dtypes in which partial results and their sums travel. None: the same as
            ``dtype``.
        whole_tokens: one row of each token travels, whatever its routing.
        one_exchange: as of :class:`mkernel.plan.model.Schedule`.
        routing: routing of tokens, which decides how many ranks want one.
    """
    if isinstance(shape, GemmShape | SumShape):
        call = gemm_call(op, shape, dtype, partials or dtype, results or dtype, world)
        return Payloads(*call.payloads(one_exchange))
    way = Way(returns=returns, whole_tokens=whole_tokens, routing=routing)
    nbytes = sum(
        flow.pair(0, 1) * flow.nbytes
        for flow in flows(op, shape, dtype, world, 1, way)
        if not flow.describes
    )
    return Payloads(gather=nbytes)


def gemm_call(
    op: OpName,
    shape: GemmShape | SumShape,
    dtype: DtypeName,
    partials: DtypeName,
    results: DtypeName,
    world: int,
) -> GemmCall:
    """Return the call of a GEMM op, or of AllReduce, as closed forms take it. ``partials``,
    ``results``: dtypes in which partial results and their sums travel."""
    k = shape.k if isinstance(shape, GemmShape) else 0
    return GemmCall(
        op, shape.m, shape.n, k, world,
        DTYPE_BYTES[dtype], DTYPE_BYTES[partials], DTYPE_BYTES[results],
    )  # fmt: skip


def all_gather_gemm(
    plan: CommonPart, links: SharedLinks, pipeline: Pipeline, constants: MachineConstants
) -> Prediction:
    """Predict AllGather+GEMM: T_c = 2·M·K·N_r/C in waves, T_m = (W-1)/W·M·K·s/B over the slowest
    link.

    Links: those that :mod:`mkernel.topology.routes` names; a NIC's routes share it, each
    direction by itself. The communication blocks that serve one destination share its bytes and
    chunks, and each chunk adds a signal to their time.

    sequential = T_c + T_m. pipelined = max(T_c + wait for the first remote chunk that local rows do
    not cover, T_m + the last tile): never below max(T_c, T_m), never above sequential. Both also
    include one launch; T_c and T_m do not.
    """
    shape, cut, world = plan.gemm, pipeline.chunking, plan.world_size
    if cut is None:
        raise TypeError("a pipeline of rows has no tiles to predict")
    rate = constants.tflops_per_core(plan.dtype)
    compute = gemm_us(
        shape.m,
        shape.n,
        shape.k,
        tile_m=cut.tile_m,
        tile_n=cut.tile_n,
        cores=pipeline.compute_blocks,
        tflops_per_core=rate,
        memory_gbs=constants.memory_gbs,
        itemsize=DTYPE_BYTES[plan.dtype],
        out_itemsize=DTYPE_BYTES[plan.out_dtype],
    )
    launch = constants.launch_us
    if world == 1:
        return prediction(compute, 0.0, compute, launch, constants)

    shard = sent_by(plan, pipeline).gather
    chunks = cut.chunks_per_rank
    pairs = PairBytes.alike(shard, links, pipeline)
    comm = max(_link_times(pairs, links, pipeline, chunks, constants))

    chunk_bytes = shard / chunks
    first = constants.signal_us + min(
        transfer_us(chunk_bytes, route.bandwidth_gbs, route.latency_us)
        for route in links.table.classes
    )
    exposed = max(0.0, min(first, comm) - compute / world)
    tile = gemm_tile_us(cut.tile_m, cut.tile_n, shape.k, rate)
    pipelined = max(compute + exposed, comm + min(tile, compute))
    return prediction(compute, comm, pipelined, launch, constants)


def messages_us(
    payload: float, links: SharedLinks, pipeline: Pipeline, constants: MachineConstants
) -> float:
    """Return the microseconds until each rank has sent so many bytes to each other one."""
    pairs = PairBytes.alike(payload, links, pipeline)
    return max(_link_times(pairs, links, pipeline, 1, constants))


def _link_times(
    pairs: PairBytes,
    links: SharedLinks,
    pipeline: Pipeline,
    chunks: int,
    constants: MachineConstants,
) -> list[float]:
    """Return the busy time of each link, and of the blocks that serve each of a rank's destinations
    (:attr:`Pipeline.destinations`), or of all blocks if they take messages in turn. Each message
    costs a signal a chunk."""
    nodes, each = links.placement.nodes, links.placement.ranks_per_node
    once = pipeline.exchange == "hierarchical"

    def sent(route: RouteClass) -> float:
        if route.within:
            return pairs.near
        return pairs.rail if route.src_local == route.dst_local else pairs.cross

    times = [transfer_us(*load) for load in links.loads(sent)]
    far = (nodes - 1) * (pairs.rail + (each - 1) * pairs.cross)
    every = [(pairs.near, nodes if once else 1)] * (each - 1)
    every += [(far, (nodes - 1) * (1 if once else each))] * (nodes > 1)
    if pipeline.blocks_in_turn:
        every = [(sum(nbytes for nbytes, _ in every), sum(count for _, count in every))]
    blocks = pipeline.comm_blocks / max(1, len(every))
    rate = max(blocks * constants.comm_block_gbs, constants.copy_engine_gbs or 0.0)
    for nbytes, count in every:
        messages = 1 if pipeline.grouped else count
        signals = chunks * messages / blocks * constants.signal_us
        times.append(transfer_us(nbytes, rate, signals))
    return times
