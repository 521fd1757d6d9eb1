"""Decisions that closed forms cannot tell apart: each option of a whole pipeline is simulated.

The order in which others' rows are consumed, and the rows of a chunk where a backend cuts by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mkernel.plan.decide import Alternative, choose
from mkernel.plan.model import CommonPart
from mkernel.plan.order import Runs
from mkernel.plan.pipeline import Pipeline
from mkernel.plan.simulate import simulate
from mkernel.topology.cost import MachineConstants

_DETAIL = 1000
"""About how many messages a simulation has: enough to compare, and as long for any world."""


def tune(
    timed: CommonPart,
    usual: Pipeline,
    rows: Sequence[int],
    orders: Sequence[Runs],
    constants: MachineConstants,
) -> tuple[Pipeline, tuple[Alternative, ...]]:
    """The pipeline with its order and rows a chunk decided, and all options with their simulated times.

    Args:
        timed: the plan so far, with its predicted times. usual: every other decision of it stands.
        rows: a chunk may have, the default first, which stands where nothing gains; empty where chunks
            are not made of rows.
        orders: of sources, the default first. Where nodes or their ranks are one they are all the same.
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
