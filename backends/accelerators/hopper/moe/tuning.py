"""The schedule of the MoE ops with a grouped product.

All functions are pure: they read a plan's sizes and ``machine.json``. Tokens travel as for a dispatch
alone (:mod:`mkernel.backends.accelerators.cuda.moe.tuning`).

The grouped product gathers rows by 16-byte copies where it is bound by reading weights, because bulk
tensor copies of single rows are slower; where the product itself counts, rows are first copied into
memory in their order. Experts in e4m3 have one tiling.
"""

from __future__ import annotations

import math

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.moe import tuning as cuda
from mkernel.backends.accelerators.cuda.moe.tuning import (
    SUM_BLOCKS_A_CORE,
    TILE_ROWS,
    check_scaled,
    check_size,
    crossing_of,
    returning,
    row_bytes,
    travel_us,
    whole_sums,
    with_tokens,
)
from mkernel.backends.accelerators.hopper.schedule import (
    DispatchSchedule,
    ExpertTiling,
    GemmCombineSchedule,
)
from mkernel.plan.model import (
    DTYPE_BYTES,
    CommonPart,
    GemmCombineShape,
    MoeShape,
    Prediction,
    Schedule,
)
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of an MoE op. Chunks are as for a dispatch alone."""
    plan = request.plan
    if not isinstance(plan.shape, MoeShape | GemmCombineShape):
        return cuda.schedule(request)
    check_size(plan)
    check_scaled(plan)
    found = by_rows(request, chunks=1, whole_tokens=whole_sums(plan))
    processors = found.pipeline.compute_blocks
    made: Schedule
    if isinstance(plan.shape, MoeShape):
        found, pushing = with_tokens(request, found, push_blocks)
        early = early_tiles(plan, processors, found.prediction, pushing)
        crossing = crossing_of(plan, found.pipeline)
        # The push needs room beside early tiles; it has ended before any others begin. Between nodes it
        # ends before the product begins, but the kernel that lands tokens runs beside it.
        beside = crossing["land_blocks"] if crossing else pushing if early else 0
        made = DispatchSchedule(
            blocks=max(2, processors // 2 * 2 - beside),
            push_blocks=pushing,
            early_tiles=early,
            early_rows=early_rows(plan),
            permutes=permutes(plan),
            tiling=tiling(plan.shape.hidden) if permutes(plan) and plan.scales is None else "deep",
            **crossing,
        )
    else:
        assert isinstance(plan.shape, GemmCombineShape)
        made = GemmCombineSchedule(
            tiling="deep" if plan.scales or reads_weights(plan) else tiling(plan.shape.features),
            # Between nodes a block of another kernel occupies a multiprocessor while weights land.
            blocks=max(2, processors // 2 * 2 - (2 if plan.nodes > 1 else 0)),
            sum_blocks=processors * SUM_BLOCKS_A_CORE,
            returns=found.pipeline.returns,
            **returning(plan, found.pipeline, request.chunk),
        )
    return found._replace(schedule=made)


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
    """Choose the blocks that push tokens by the time of the whole dispatch, its product included; as of
    :func:`mkernel.backends.accelerators.cuda.moe.tuning.push_blocks`."""
    return cuda.push_blocks(plan, processors, _dispatch_us)


def _dispatch_us(plan: CommonPart, processors: int, pushing: int) -> float:
    """Predict a balanced dispatch whose tokens travel by ``pushing`` blocks, or by copy engines. If
    experts have many own rows, these are multiplied while the others travel, beside the blocks that
    push."""
    assert isinstance(plan.shape, MoeShape)
    before = 0.0 if plan.shape.routed else machine().experts.route_us
    product = _Product(plan)
    multiplied = min(product.us(product.rates.gathered_tflops), product.permuted_us())
    own = 0.0
    if _many_own_rows(plan):
        multiplied *= processors / (processors - pushing)
        own = multiplied / plan.world_size
    return max(travel_us(plan, pushing), before + own) + multiplied - own


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
