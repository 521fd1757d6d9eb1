"""The schedule of the MoE ops.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).

Tokens travel within a node in one of two ways. Copy engines bring all of them to every rank and take
no multiprocessor; with two to four ranks and top-8 that is hardly more than what is wanted. A kernel
of ``push_blocks`` blocks sends each token only to the ranks that have an expert of it, with uniform
routing to a share 1 - (1 - 1/W)^k of them. The shorter predicted time decides;
``MKERNEL_HOPPER_TOKENS`` names one. Between nodes tokens travel whole. The grouped product gathers
rows by 16-byte copies where it is bound by reading weights, because bulk tensor copies of single rows
are slower; where the product itself counts, rows are first copied into memory in their order. Experts
in e4m3 have one tiling.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import CombineSchedule, RowsSchedule
from mkernel.backends.accelerators.hopper.schedule import (
    DispatchSchedule,
    ExpertTiling,
    GemmCombineSchedule,
)
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.errors import ShapeError, Unsupported
from mkernel.plan.model import (
    BLOCK,
    DTYPE_BYTES,
    E4M3,
    CommonPart,
    DispatchShape,
    GemmCombineShape,
    MoeShape,
    Prediction,
    Schedule,
)
from mkernel.plan.predict import payloads, predict
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest, TooLarge
from mkernel.plan.standard import by_rows, choose
from mkernel.settings import load_as

TILE_ROWS = 256
"""Rows of a cluster's tile; as in kernels/moe/tables.cuh."""
SUM_BLOCKS_A_CORE = 8
"""Blocks of 256 threads that a multiprocessor runs at a time."""
MOST_ROW_BYTES = 1 << 35
"""Exclusive bound on the bytes of a product's rows: kernels count them by 16 bytes, in 31 bits."""
MOST_WORDS = (1 << 31) - 1
"""The most words of a routing's tables (kernels/moe/tables.cuh)."""
MOST_EXPERTS = (192 << 10) // 12
"""The most experts of a rank, which kernels count in shared memory (kernels/moe/routing.cu)."""


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of an MoE op. A rank's tokens are one chunk, whatever chunk is requested."""
    plan = request.plan
    check_size(plan)
    check_scaled(plan)
    found = by_rows(request, chunks=1)
    processors = found.pipeline.compute_blocks
    # Between nodes a block of another kernel occupies a multiprocessor while tokens land.
    blocks = max(2, processors // 2 * 2 - (2 if plan.nodes > 1 else 0))
    sums = processors * SUM_BLOCKS_A_CORE
    made: Schedule
    if isinstance(plan.shape, MoeShape | DispatchShape):
        pushing, considered = push_blocks(plan, processors)
        pipeline = replace(found.pipeline, whole_tokens=pushing == 0)
        times = found.prediction
        if request.constants is not None and request.measured is None:
            times = predict(plan, request.links, pipeline, request.constants)
        found = Scheduled(found.schedule, pipeline, times, found.alternatives + considered)
    if isinstance(plan.shape, DispatchShape):
        made = RowsSchedule(blocks=sums, push_blocks=pushing)
    elif isinstance(plan.shape, MoeShape):
        early = early_tiles(plan, processors, found.prediction, pushing)
        made = DispatchSchedule(
            # The push needs room beside early tiles; it has ended before any others begin.
            blocks=max(2, blocks - pushing) if early else blocks,
            push_blocks=pushing,
            early_tiles=early,
            early_rows=early_rows(plan),
            permutes=permutes(plan),
            tiling=tiling(plan.shape.hidden) if permutes(plan) and plan.scales is None else "deep",
        )
    elif isinstance(plan.shape, GemmCombineShape):
        made = GemmCombineSchedule(
            tiling="deep" if plan.scales or reads_weights(plan) else tiling(plan.shape.features),
            blocks=blocks,
            sum_blocks=sums,
            returns=found.pipeline.returns,
        )
    else:
        made = CombineSchedule(sum_blocks=sums)
    return found._replace(schedule=made)


def row_bytes(width: int, *, scaled: bool) -> int:
    """Return the bytes from one row of ``width`` elements to the next. ``scaled``: they are e4m3, and
    have their scales behind each row, which is padded to 16 bytes."""
    if not scaled:
        return width * DTYPE_BYTES["bfloat16"]
    behind = width // BLOCK * DTYPE_BYTES["float32"]
    return (width * DTYPE_BYTES[E4M3] + behind + 15) // 16 * 16


def check_scaled(plan: CommonPart) -> None:
    """Raise Unsupported or ShapeError for a call of e4m3 experts, or with a routing of an earlier
    dispatch, that kernels cannot run."""
    routed = isinstance(plan.shape, MoeShape | DispatchShape) and plan.shape.routed
    if routed and plan.nodes > 1:
        raise Unsupported(
            "accelerator 'hopper' uses a routing again (handle=) in worlds of one node; "
            f"this one has {plan.nodes}"
        )
    if plan.scales is None:
        return
    if plan.nodes > 1:
        raise Unsupported(
            f"accelerator 'hopper' multiplies e4m3 operands of {plan.op} in worlds of one node; "
            f"this one has {plan.nodes}"
        )
    shape = plan.shape
    # A tile's columns of the gate have one scale for each block of K, and so have those of up.
    if isinstance(shape, MoeShape) and shape.activation is not None and shape.features % BLOCK:
        legal = f"a multiple of {BLOCK}, with scales by blocks and an activation"
        raise ShapeError("features", shape.features, legal)


def check_size(plan: CommonPart) -> None:
    """Raise TooLarge if kernels could not number the rows, places or experts of a dispatch."""
    shape, world = plan.shape, plan.world_size
    if not isinstance(shape, MoeShape | DispatchShape):
        return
    places, experts = world * shape.tokens * shape.top_k, shape.experts // world
    words = 3 * places + 6 * most_tiles(shape, world) + 8
    nbytes = world * shape.tokens * row_bytes(shape.hidden, scaled=plan.scales is not None)
    for what, count, most in (
        ("bytes of all ranks' tokens", nbytes, MOST_ROW_BYTES - 1),
        ("words of routing", words, MOST_WORDS),
        ("experts on a rank", experts, MOST_EXPERTS),
    ):
        if count > most:
            raise TooLarge(
                f"{plan.op} of {shape.tokens} tokens of top-{shape.top_k} on each of {world} ranks: "
                f"{count} {what}; at most {most}; call it for fewer tokens at a time"
            )


def most_tiles(shape: MoeShape | DispatchShape, world: int) -> int:
    """Return how many tiles a routing has room for; as in kernels/moe/tables.cuh."""
    return world * shape.tokens * shape.top_k // TILE_ROWS + 3 * (shape.experts // world) + 1


class _Product:
    """The predicted time of a rank's grouped product, in microseconds, for balanced routing."""

    def __init__(self, plan: CommonPart) -> None:
        shape, element = plan.shape, DTYPE_BYTES[plan.dtype]
        self.rates = machine().of_plan(plan).experts
        assert isinstance(shape, MoeShape | GemmCombineShape)
        self._rows = shape.tokens * shape.top_k
        experts = min(shape.experts / plan.world_size, self._rows)
        self._row_bytes = row_bytes(shape.hidden, scaled=plan.scales is not None)
        self._times = self.rates.e4m3_times if plan.scales is not None else 1.0
        columns = shape.columns if isinstance(shape, MoeShape) else shape.features
        weights = experts * shape.hidden * columns * element
        self._work = 2.0 * self._rows * shape.hidden * columns
        self.weights_us = self._memory_us(weights)

    def us(self, tflops: float) -> float:
        """Return the time at that rate, which is one of 16-bit operands, if rows are read as they are
        multiplied."""
        return max(self.weights_us, self._work / (self._times * tflops * 1e6))

    def permuted_us(self) -> float:
        """Return the time if rows are copied into order first, beside the product."""
        how = self.rates
        copied = self.weights_us + self._memory_us(2.0 * self._rows * self._row_bytes)
        product = self._work / (self._times * how.permuted_tflops * 1e6)
        return how.permute_us + max(copied, product)

    def _memory_us(self, nbytes: float) -> float:
        return nbytes / (self.rates.memory_gbs * 1e3)


def permutes(plan: CommonPart) -> bool:
    """Return whether rows are copied into order first: the product is then faster, but moves more
    bytes."""
    product = _Product(plan)
    return product.permuted_us() < product.us(product.rates.gathered_tflops)


def reads_weights(plan: CommonPart) -> bool:
    """Return whether a product takes as long as reading its weights."""
    product = _Product(plan)
    return product.us(product.rates.ready_tflops) <= product.weights_us


def tiling(k: int) -> ExpertTiling:
    """Return the tiling for many rows of ``k`` elements."""
    least, most = machine().experts.deep_k
    return "deep" if least <= k <= most else "wide"


def push_blocks(plan: CommonPart, processors: int) -> tuple[int, tuple[Alternative, ...]]:
    """Choose the blocks that send each token once to each rank that wants it; 0: copies of all
    tokens to every rank.

    Blocks are chosen if they are predicted to be faster, or requested (:class:`HopperSettings`).
    Also returns both alternatives, if there are two: between nodes tokens always travel whole."""
    wished = load_as(HopperSettings).tokens
    if plan.world_size == 1 or plan.nodes > 1 or wished == "whole":
        return 0, ()
    blocks = max(2, min(machine().experts.push_blocks, processors // 8 * 2))
    if wished == "wanted":
        return blocks, ()
    return choose(
        "tokens",
        (0, blocks),
        lambda pushing: _dispatch_us(plan, processors, pushing),
        lambda pushing: "wanted" if pushing else "whole",
    )


def _dispatch_us(plan: CommonPart, processors: int, pushing: int) -> float:
    """Predict a balanced dispatch whose tokens travel by ``pushing`` blocks, or by copy engines. If
    experts have many own rows, these are multiplied while the others travel, beside the blocks that
    push."""
    assert isinstance(plan.shape, MoeShape | DispatchShape)
    before = 0.0 if plan.shape.routed else machine().experts.route_us
    if isinstance(plan.shape, DispatchShape):
        return max(travel_us(plan, pushing), before)
    product = _Product(plan)
    multiplied = min(product.us(product.rates.gathered_tflops), product.permuted_us())
    own = 0.0
    if _many_own_rows(plan):
        multiplied *= processors / (processors - pushing)
        own = multiplied / plan.world_size
    return max(travel_us(plan, pushing), before + own) + multiplied - own


def travel_us(plan: CommonPart, pushing: int) -> float:
    """Predict the time until a rank's tokens are at all others of its node: by ``pushing`` blocks,
    each token once to each rank that wants it (:func:`mkernel.plan.predict.payloads`), or
    whole by copy engines, to one rank after another."""
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, MoeShape | DispatchShape)
    copies = machine().of_plan(plan).copies
    nbytes = payloads(plan.op, shape, plan.dtype, world, whole_tokens=pushing == 0).gather
    if pushing == 0:
        return (world - 1) * copies.choose("put", round(nbytes), 0, flagged=True).microseconds
    usual = machine().experts.push_blocks
    sent = copies.microseconds("put", "plain", usual, round((world - 1) * nbytes))
    return sent * max(1.0, usual / pushing)


def _many_own_rows(plan: CommonPart) -> bool:
    """Return whether an expert gets a tile of rows from one rank."""
    shape = plan.shape
    assert isinstance(shape, MoeShape)
    return shape.tokens * shape.top_k / shape.experts >= early_rows(plan)


def early_tiles(
    plan: CommonPart, processors: int, prediction: Prediction | None, pushing: int = 0
) -> int:
    """Return the number of tiles of own tokens that are multiplied while other ranks' tokens
    travel; 0 if an expert gets few rows. ``prediction``: that of the plan; ``pushing``:
    :func:`push_blocks`."""
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, MoeShape)
    rows = shape.tokens * shape.top_k / shape.experts  # of one expert, from one rank
    if world == 1 or not _many_own_rows(plan):
        return 0
    travelling_us = travel_us(plan, pushing)
    if plan.nodes > 1 and prediction is not None:
        travelling_us = prediction.comm_us
    how = machine().of_plan(plan)
    rate = processors * how.constants.bfloat16_tflops_per_core * 1e6  # flop a microsecond
    if plan.scales is not None:
        rate *= how.experts.e4m3_times
    weights = shape.hidden * shape.columns  # of one expert
    height = min(rows // early_rows(plan) * early_rows(plan), TILE_ROWS)
    read_us = weights * DTYPE_BYTES[plan.dtype] / (how.experts.memory_gbs * 1e3)
    return math.ceil(travelling_us / max(2.0 * height * weights / rate, read_us))


def early_rows(plan: CommonPart) -> int:
    """Return the multiple of own rows of an expert that makes tiles which come first. Its other
    rows are separate tiles, and need the weights again. So these are whole tiles unless tokens take
    long to arrive."""
    return machine().experts.far_early_rows if plan.nodes > 1 else TILE_ROWS
