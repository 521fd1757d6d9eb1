"""What a launch on simulated NPUs does: chunks, tiles and cores.

The order in which ranks are consumed is the kernels' own (``kernels/consumption.hpp``): those of the
node first, then the others.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mkernel.plan.chunking import tiling
from mkernel.plan.model import MoeShape, OpName
from mkernel.plan.pipeline import Chunking, Tiling
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.schedule import Schedule
from mkernel.plan.standard import by_rows, by_tiles

VECTORS_PER_CUBE = 2
"""Vector cores of the compute kernel beside each of its cube cores, where it has any."""


class GemmSchedule(Schedule):
    """How a GEMM op runs. ``chunking`` is of what a rank sends. ``cube_cores`` multiply;
    ``comm_cores``, vector cores, communicate."""

    kind: Literal["ascend.gemm"] = "ascend.gemm"
    chunking: Chunking
    cube_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class DispatchSchedule(Schedule):
    """How MoE dispatch+GEMM runs. Tokens travel in chunks of ``rows_per_chunk`` of their rank;
    ``tiling`` is that of the products. ``cube_cores`` multiply; of the vector cores ``comm_cores``
    send, and ``vector_cores`` build tables and spread tokens."""

    kind: Literal["ascend.moe_dispatch"] = "ascend.moe_dispatch"
    rows_per_chunk: int = Field(ge=1)
    tiling: Tiling
    cube_cores: int = Field(ge=1)
    vector_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class CombineSchedule(Schedule):
    """How MoE combine runs. Results go home in chunks of ``rows_per_chunk`` tokens of the home rank.
    Vector cores do it all: ``comm_cores`` send, ``vector_cores`` add up what came."""

    kind: Literal["ascend.moe_combine"] = "ascend.moe_combine"
    rows_per_chunk: int = Field(ge=1)
    vector_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


class AttentionSchedule(Schedule):
    """How ring attention runs. Keys and values travel in chunks of ``rows_per_chunk`` positions.
    ``cube_cores`` multiply, each with VECTORS_PER_CUBE vector cores for its softmax; ``comm_cores``,
    further vector cores, send."""

    kind: Literal["ascend.ring_attention"] = "ascend.ring_attention"
    rows_per_chunk: int = Field(ge=1)
    cube_cores: int = Field(ge=1)
    comm_cores: int = Field(ge=1)


_BY_ROWS: dict[OpName, type[DispatchSchedule | CombineSchedule | AttentionSchedule]] = {
    "moe_dispatch_gemm": DispatchSchedule,
    "moe_combine": CombineSchedule,
    "ring_attention": AttentionSchedule,
}


def schedule(request: ScheduleRequest) -> Scheduled:
    """GEMM ops in chunks of tiles, the others in chunks of rows."""
    plan = request.plan
    made = _BY_ROWS.get(plan.op)
    found = by_tiles(request) if made is None else by_rows(request)
    decided = found.schedule.model_dump(exclude={"kind", "order"})
    decided |= cores(
        plan.op,
        found.pipeline.compute_blocks,
        found.pipeline.comm_blocks,
        request.capabilities.comm_cores,
    )
    if isinstance(plan.shape, MoeShape):
        decided["tiling"] = tiling(plan.dtype)
    return found._replace(schedule=(made or GemmSchedule)(**decided))


def cores(op: OpName, cube: int, comm: int, vectors: int) -> dict[str, int]:
    """The fields of a schedule that give its kernels cores.

    Args:
        cube, comm: cores for each kernel as the cost model has them; vectors: vector cores of the chip,
            which both kernels of MoE and of attention share. In MoE at most half of them communicate;
            in attention all but those of one cube core, and so there may be fewer cube cores.
    """
    if op == "ring_attention":
        comm = min(comm, vectors - VECTORS_PER_CUBE)
        cube = min(cube, (vectors - comm) // VECTORS_PER_CUBE)
        return {"cube_cores": cube, "comm_cores": comm}
    if op not in _BY_ROWS:
        return {"cube_cores": cube, "comm_cores": comm}
    comm = min(comm, vectors // 2)
    shared = {"vector_cores": min(VECTORS_PER_CUBE * cube, vectors - comm), "comm_cores": comm}
    return shared if op == "moe_combine" else {"cube_cores": cube, **shared}
