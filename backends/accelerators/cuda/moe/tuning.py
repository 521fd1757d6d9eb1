"""The schedule of MoE dispatches and combines, and of products between them that torch makes.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).

Tokens travel within a node in one of two ways. Copy engines bring all of them to every rank and take
no multiprocessor; with two to four ranks and top-8 that is hardly more than what is wanted. A kernel
of ``push_blocks`` blocks sends each token only to the ranks that have an expert of it, with uniform
routing to a share 1 - (1 - 1/W)^k of them. The shorter predicted time decides;
``MKERNEL_<ACCELERATOR>_TOKENS`` names one.

Between nodes only what is wanted travels, in pieces of the order in which experts are multiplied
(kernels/moe/crossing_lists.hpp), and so it does inside the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import (
    MOST_PIECES,
    CombineSchedule,
    LibraryCombineSchedule,
    RowsSchedule,
)
from mkernel.backends.accelerators.cuda.settings import settings_of
from mkernel.errors import ShapeError, Unsupported
from mkernel.plan.model import (
    BLOCK,
    DTYPE_BYTES,
    E4M3,
    CombineShape,
    CommonPart,
    DispatchShape,
    DtypeName,
    GemmCombineShape,
    MoeShape,
    Schedule,
)
from mkernel.plan.pipeline import Pipeline
from mkernel.plan.predict import payloads, predict
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest, TooLarge
from mkernel.plan.standard import by_rows, choose
from mkernel.plan.traffic import Moe, relay_bytes

TILE_ROWS = 256
"""Rows of a cluster's tile; as in kernels/moe/tables.cuh."""
SUM_BLOCKS_A_CORE = 8
"""Blocks of 256 threads that a multiprocessor runs at a time."""
MOST_ROW_BYTES = 1 << 35
"""Exclusive bound on the bytes of a product's rows: kernels count them by 16 bytes, in 31 bits."""
MOST_WORDS = (1 << 31) - 1
"""The most words of a routing's tables (kernels/moe/tables.cuh)."""
LEAST_PIECE_BYTES = 1 << 18
"""The least bytes of a piece that crosses between nodes: each costs a message and a wait."""
LAND_BLOCKS = 8
"""The blocks that copy what comes from other nodes, or pass it on; without copies a pair waits."""
MOST_EXPERTS = (96 << 10) // 12
"""The most experts of a rank, which kernels count in shared memory (kernels/moe/routing.cu)."""
MOST_GROUPS = 1023
"""The most experts of a rank that torch multiplies in one product."""


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of an MoE op. Within a node a rank's tokens are one chunk, whatever chunk is
    requested."""
    plan = request.plan
    check_size(plan)
    check_scaled(plan)
    found = by_rows(request, chunks=1, whole_tokens=whole_sums(plan))
    blocks = found.pipeline.compute_blocks * SUM_BLOCKS_A_CORE
    if isinstance(plan.shape, MoeShape | GemmCombineShape):
        _check_groups(plan, plan.shape.experts // plan.world_size)
    if isinstance(plan.shape, MoeShape | DispatchShape):
        found, pushing = with_tokens(request, found, push_blocks)
        crossing = crossing_of(plan, found.pipeline)
        return found._replace(schedule=RowsSchedule(blocks=blocks, push_blocks=pushing, **crossing))
    home = returning(plan, found.pipeline, request.chunk)
    if isinstance(plan.shape, GemmCombineShape):
        made: Schedule = LibraryCombineSchedule(
            sum_blocks=blocks, returns=found.pipeline.returns, **home
        )
        return found._replace(schedule=made)
    return found._replace(schedule=CombineSchedule(sum_blocks=blocks, **home))


def with_tokens(
    request: ScheduleRequest,
    found: Scheduled,
    choice: Callable[[CommonPart, int], tuple[int, tuple[Alternative, ...]]],
) -> tuple[Scheduled, int]:
    """Return a dispatch's schedule with what is predicted if tokens travel as ``choice`` has it, and
    the blocks that push them."""
    plan = request.plan
    pushing, considered = choice(plan, found.pipeline.compute_blocks)
    pipeline = replace(found.pipeline, whole_tokens=pushing == 0 and plan.nodes == 1)
    if plan.nodes > 1:
        pipeline = replace(pipeline, rows_per_chunk=piece_rows(plan, request.chunk))
    times = found.prediction
    if request.constants is not None and request.measured is None:
        times = predict(plan, request.links, pipeline, request.constants)
    return Scheduled(found.schedule, pipeline, times, found.alternatives + considered), pushing


def piece_rows(plan: CommonPart, chunk: int | None) -> int:
    """Return the rows of a piece of a rank's tokens, or of sums, for another node. ``chunk``: the rows
    that are requested; None: pieces of at least ``LEAST_PIECE_BYTES``. There are ``MOST_PIECES`` at
    most."""
    shape = plan.shape
    assert isinstance(shape, Moe)
    width = shape.features if isinstance(shape, CombineShape) else shape.hidden
    least = chunk or -(-LEAST_PIECE_BYTES // row_bytes(width, scaled=False))
    return min(shape.tokens, max(least, -(-shape.tokens // MOST_PIECES)))


def whole_sums(plan: CommonPart) -> bool:
    """Return whether sums of all tokens come home, as they do between nodes."""
    return plan.nodes > 1 and isinstance(plan.shape, CombineShape | GemmCombineShape)


def returning(plan: CommonPart, pipeline: Pipeline, chunk: int | None) -> dict[str, Any]:
    """Return the fields of a :class:`ReturnSchedule`. ``chunk``: as of :func:`piece_rows`."""
    shape = plan.shape
    assert isinstance(shape, CombineShape | GemmCombineShape)
    if plan.nodes == 1:
        return {}
    found: dict[str, Any] = {"pieces": -(-shape.tokens // piece_rows(plan, chunk))}
    if pipeline.exchange == "direct":
        return found
    sums = sums_dtype(plan)
    kept = relay_bytes(plan.op, shape, plan.dtype, plan.nodes, sums)
    return {**found, "exchange": "hierarchical", "relay_bytes": kept, "node_sums": sums}


def sums_dtype(plan: CommonPart) -> DtypeName:
    """Return the dtype in which sums by rank travel, and those of a node."""
    if isinstance(plan.shape, GemmCombineShape):
        return plan.shape.partial_dtype
    return "float32" if plan.invariant is None else plan.out_dtype


def crossing_of(plan: CommonPart, pipeline: Pipeline) -> dict[str, Any]:
    """Return the fields of a :class:`TokenSchedule` that say how tokens cross between nodes."""
    shape, exchange = plan.shape, pipeline.exchange
    assert isinstance(shape, MoeShape | DispatchShape)
    if plan.nodes == 1:
        return {}
    relays = exchange == "hierarchical"
    rows = pipeline.rows_per_chunk or shape.tokens
    return {
        "exchange": exchange,
        "pieces": -(-shape.tokens // rows),
        "land_blocks": LAND_BLOCKS if relays or plan.routes.staged else 2,
        "relay_bytes": relay_bytes(plan.op, shape, plan.dtype, plan.nodes) if relays else 0,
    }


def _check_groups(plan: CommonPart, experts: int) -> None:
    """Raise Unsupported for more experts of a rank than torch's product takes."""
    if experts > MOST_GROUPS:
        raise Unsupported(
            f"{plan.op} with {experts} experts on a rank: torch multiplies at most {MOST_GROUPS} "
            "at once"
        )


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
            f"accelerator {plan.accelerator!r} uses a routing again (handle=) in worlds of one node; "
            f"this one has {plan.nodes}"
        )
    if plan.scales is None:
        return
    if plan.nodes > 1:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} multiplies e4m3 operands of {plan.op} in worlds of one "
            f"node; this one has {plan.nodes}"
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


def arrival_us(plan: CommonPart, processors: int, pushing: int) -> float:
    """Predict the time until the tokens of a balanced dispatch have come, by ``pushing`` blocks or by
    copy engines, and ids are sorted."""
    shape = plan.shape
    assert isinstance(shape, MoeShape | DispatchShape)
    before = 0.0 if shape.routed else machine().experts.route_us
    return max(travel_us(plan, pushing), before)


def push_blocks(
    plan: CommonPart,
    processors: int,
    us: Callable[[CommonPart, int, int], float] = arrival_us,
) -> tuple[int, tuple[Alternative, ...]]:
    """Choose the blocks that send each token once to each rank that wants it; 0: copies of all
    tokens to every rank.

    Blocks are chosen if they are predicted to be faster, or if ``MKERNEL_<ACCELERATOR>_TOKENS`` names
    them. ``us``: predicts what is to be short, for so many blocks. Also returns both alternatives, if
    there are two: between nodes only what is wanted travels."""
    wished = settings_of(plan.accelerator).tokens
    if plan.ranks_per_node == 1 or (plan.nodes == 1 and wished == "whole"):
        return 0, ()
    blocks = max(2, min(machine().experts.push_blocks, processors // 8 * 2))
    if plan.nodes > 1 or wished == "wanted":
        return blocks, ()
    return choose(
        "tokens",
        (0, blocks),
        lambda pushing: us(plan, processors, pushing),
        lambda pushing: "wanted" if pushing else "whole",
    )


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
