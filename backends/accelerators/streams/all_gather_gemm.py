"""AllGather+GEMM: every rank's rows of a go to every rank, which multiplies them as they arrive.

Own rows first, then the others' in the plan's order, one wait a chunk. No sums cross ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.lanes import Lanes
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.rows import chunks, rotation
from mkernel.backends.base import Call


def run(call: Call, lanes: Lanes) -> Mapping[str, Any]:
    """Fills ``out`` and, where it is given, ``gathered``."""
    a, b, out = (call.tensors[name] for name in ("a", "b", "out"))
    rows, world = len(a), call.plan.world_size
    kept = call.tensors.get("gathered")
    gathered = kept if kept is not None else a.new_empty(rows * world, a.shape[1])

    arrivals = []
    if lanes.communicates:
        for source, target in rotation(call.plan, call.rank):
            for number, (start, end) in enumerate(chunks(rows, call.plan.rows_per_chunk)):
                here = slice(source * rows + start, source * rows + end)
                message = lanes.post([(target, a[start:end])], [(source, gathered[here])], number)
                arrivals.append((here, message))
    lanes.settle([message for _, message in arrivals])

    own = slice(call.rank * rows, (call.rank + 1) * rows)
    with lanes.compute():
        factor = Factor(b, out.dtype)
        factor.product(a, out[own])
        if kept is not None:
            kept[own] = a
    for here, message in arrivals:
        lanes.wait(message)
        with lanes.compute():
            factor.product(gathered[here], out[here])
    if not lanes.communicates:
        with lanes.compute():
            for source, _ in rotation(call.plan, call.rank):
                factor.product(a, out[source * rows : (source + 1) * rows])
    return {}
