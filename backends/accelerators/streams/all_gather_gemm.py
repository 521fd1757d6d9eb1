"""AllGather+GEMM: every rank's rows of a go to every rank, which multiplies them as they arrive.

Own rows come first, then the others' in the plan's order, with one wait per chunk. No sums cross
ranks. Scales of e4m3 rows are sent ahead of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import (
    Arrivals,
    chunks,
    exchange,
    rotation,
    take,
)
from mkernel.backends.accelerators.streams.scaled import Rows, as_bytes, own_rows, products
from mkernel.backends.accelerators.streams.schedule import GatherSchedule
from mkernel.backends.contracts.accelerator import Call


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out`` and, if it is given, ``gathered``."""
    how = call.plan.part(GatherSchedule)
    a, out = call.tensors["a"], call.tensors["out"]
    shape = (call.plan.world_size, *a.shape)
    kept = call.tensors.get("gathered")
    whole = None if kept is None else kept.view(shape)
    gathered = streams.landing("gathered") if whole is None or streams.one_sided else whole
    results = out.view(shape[0], shape[1], out.shape[1])

    own = own_rows(call)
    scales, ahead = _scales(call, streams, own)
    flat, sent = as_bytes(gathered), as_bytes(a)
    arrivals = exchange(call, streams, lambda target: sent, flat.__getitem__)
    streams.hold(how.head_start_cycles)
    with streams.compute():
        multiply = products(call, out.dtype)
        if whole is not None:
            whole[call.rank] = a
    for start, end in chunks(len(a), -(-len(a) // streams.in_flight)):
        with streams.product():
            multiply(own.part(start, end), results[call.rank, start:end])
    for source, start, end, message in arrivals:
        for one in [one for one in ahead if one[0] == source]:
            streams.wait(one[3])
        with streams.product(message):
            theirs = Rows(gathered[source], None if scales is None else scales[source])
            multiply(theirs.part(start, end), results[source, start:end])
    if whole is not None and gathered is not whole:
        take(streams, arrivals, gathered, whole)
    kept_scales = call.tensors.get("gathered_scale")
    if kept_scales is not None and scales is not None and own.scale is not None:
        places = kept_scales.view(scales.shape)
        take(streams, ahead, scales, places)
        with streams.compute():
            places[call.rank] = own.scale
    if not streams.communicates:
        with streams.compute():
            for source, _ in rotation(call.plan, call.rank):
                multiply(own, results[source])
    return {}


def _scales(call: Call, streams: CallStreams, own: Rows) -> tuple[torch.Tensor | None, Arrivals]:
    """Return the landing of the scales of all ranks' e4m3 rows, [source, rows, columns], and their
    messages."""
    scale = own.scale
    if scale is None:
        return None, []
    landed = streams.landing("scales")
    return landed, exchange(call, streams, lambda target: scale, landed.__getitem__)
