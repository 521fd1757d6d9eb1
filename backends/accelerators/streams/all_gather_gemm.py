"""AllGather+GEMM: every rank's rows of a go to every rank, which multiplies them as they arrive.

Own rows first, then the others' in the plan's order, one wait a chunk. No sums cross ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import exchange, take
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.rows import chunks, rotation
from mkernel.backends.accelerators.streams.schedule import GatherSchedule
from mkernel.backends.contracts.accelerator import Call


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out`` and, where it is given, ``gathered``."""
    how = call.plan.part(GatherSchedule)
    a, b, out = (call.tensors[name] for name in ("a", "b", "out"))
    shape = (call.plan.world_size, *a.shape)
    kept = call.tensors.get("gathered")
    whole = None if kept is None else kept.view(shape)
    gathered = streams.landing("gathered") if whole is None or streams.one_sided else whole
    results = out.view(shape[0], shape[1], out.shape[1])

    arrivals = exchange(call, streams, lambda target: a, gathered.__getitem__)
    streams.hold(how.head_start_cycles)
    with streams.compute():
        factor = Factor(b, out.dtype)
        if whole is not None:
            whole[call.rank] = a
    for start, end in chunks(len(a), -(-len(a) // streams.in_flight)):
        with streams.product():
            factor.product(a[start:end], results[call.rank, start:end])
    for source, start, end, message in arrivals:
        with streams.product(message):
            factor.product(gathered[source, start:end], results[source, start:end])
    if whole is not None and gathered is not whole:
        take(streams, arrivals, gathered, whole)
    if not streams.communicates:
        with streams.compute():
            for source, _ in rotation(call.plan, call.rank):
                factor.product(a, results[source])
    return {}
