"""Decisions that closed forms cannot tell apart: each option of a whole plan is simulated.

The order in which others' rows are consumed, and the rows of a chunk where a backend cuts by rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mkernel.plan.decide import Alternative, choose
from mkernel.plan.model import LaunchPlan
from mkernel.plan.order import Runs
from mkernel.plan.simulate import simulate
from mkernel.topology.cost import MachineConstants

_DETAIL = 1000
"""About how many messages a simulation has: enough to compare, and as long for any world."""


def tune(
    made: LaunchPlan,
    rows: Sequence[int],
    orders: Sequence[Runs],
    constants: MachineConstants,
    one_kernel_per_chunk: bool,
) -> tuple[LaunchPlan, tuple[Alternative, ...]]:
    """The plan with its order and rows a chunk decided, and all options with their simulated times.

    Args:
        made: every other decision of it stands.
        rows: a chunk may have, the default first, which stands where nothing gains; empty where chunks
            are not made of rows.
        orders: of sources, the default first. Where nodes or their ranks are one they are all the same.
        one_kernel_per_chunk: as the backend's capabilities say.
    """

    def time_us(option: LaunchPlan) -> float:
        return simulate(
            option, constants, detail=_DETAIL, one_kernel_per_chunk=one_kernel_per_chunk
        ).time_us

    cuts = [made.model_copy(update={"rows_per_chunk": each}) for each in rows] or [made]
    made, considered = choose(
        "chunk", cuts, time_us, lambda option: f"{option.rows_per_chunk} rows", "simulated"
    )
    options = [
        made.model_copy(update={"order": made.order.model_copy(update={"runs": runs})})
        for runs in (orders if made.nodes > 1 and made.ranks_per_node > 1 else orders[:1])
    ]
    made, more = choose("order", options, time_us, lambda option: option.order.runs, "simulated")
    return made, considered + more
