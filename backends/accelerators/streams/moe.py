"""MoE: tokens go to the ranks of their experts, once a rank; results come home, one row a place.

Dispatch: ids of all ranks are exchanged first (they are small), so every rank builds the tables by
itself and no sizes need to be told. Combine: rows travel in their own dtype and are weighted and
added at home, in slot order, in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import Arrivals, exchange
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.routing import Routing, route
from mkernel.backends.accelerators.streams.schedule import DispatchSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import ShapeError
from mkernel.plan.model import CombineShape


def dispatch(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Returns ``outputs``, ``counts`` and, for the combine, ``state``."""
    x, w, rank = call.tensors["x"], call.tensors["w"], call.rank
    ids = _everyones(call, streams, call.tensors["topk_ids"].to(torch.int32))
    with streams.compute():
        routing = route(ids, rank, len(w), real=streams.communicates)
        packed = torch.split(x[routing.outgoing], routing.tokens_to)
        tokens = streams.scratch("tokens", (sum(routing.tokens_from), x.shape[1]), x.dtype)
        parts = torch.split(tokens, routing.tokens_from)
        if streams.communicates:
            parts[rank].copy_(packed[rank])
    arrivals = exchange(call, streams, packed.__getitem__, parts.__getitem__)

    dtype = getattr(torch, call.plan.out_dtype)
    outputs = x.new_empty((len(routing.row_token), w.shape[2]), dtype=dtype)
    factors: dict[int, Factor] = {}
    for source in _as_they_come(call, streams, arrivals):
        with streams.compute():
            for expert, start, end in _segments(routing, source):
                if expert not in factors:
                    factors[expert] = Factor(w[expert], dtype)
                rows = tokens[routing.row_token[start:end]]
                factors[expert].product(rows, outputs[start:end])
    return {"outputs": outputs, "counts": routing.counts, "state": routing}


def combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out``."""
    y, weights, out = (call.tensors[name] for name in ("y", "topk_weights", "out"))
    routing: Routing = call.options["state"]
    _check_experts(call, len(routing.counts))
    with streams.compute():
        packed = torch.split(y[routing.returning], routing.rows_to)
        rows = streams.scratch("rows", (sum(routing.rows_from), y.shape[1]), y.dtype)
        parts = torch.split(rows, routing.rows_from)
        if routing.real:
            parts[call.rank].copy_(packed[call.rank])
    if routing.real:
        exchange(call, streams, packed.__getitem__, parts.__getitem__)
        streams.finish()
    with streams.compute():
        places = routing.homecoming.view(weights.shape)
        total = rows[places[:, 0]].float() * weights[:, :1]
        for slot in range(1, weights.shape[1]):
            total.addcmul_(rows[places[:, slot]].float(), weights[:, slot : slot + 1])
        out.copy_(total)
    return {}


def _check_experts(call: Call, there: int) -> None:
    shape, world = call.plan.shape, call.plan.world_size
    assert isinstance(shape, CombineShape)
    if there * world != shape.experts:
        raise ShapeError("state", f"of {there} experts a rank", f"{shape.experts} on {world} ranks")


def _everyones(call: Call, streams: CallStreams, own: torch.Tensor) -> torch.Tensor:
    """``own`` of every rank [W, ...]; own ones in the place of others' in a compute-only view."""
    gathered = own.expand(call.plan.world_size, *own.shape).contiguous()
    exchange(call, streams, lambda target: own, gathered.__getitem__)
    streams.finish()
    streams.host_waits()  # sizes will be read: see `route`
    return gathered


def _as_they_come(call: Call, streams: CallStreams, arrivals: Arrivals) -> Iterator[int | None]:
    """Sources whose tokens are there now. None: all of them, at once."""
    by_source = call.plan.part(DispatchSchedule).as_they_arrive and not streams.sequential
    if by_source:
        yield call.rank
    parts = Counter(source for source, *_ in arrivals)
    for source, _, _, message in arrivals:
        streams.wait(message)
        parts[source] -= 1
        if by_source and not parts[source]:
            yield source
    if not by_source:
        yield None


def _segments(routing: Routing, source: int | None) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of the output rows of one source, or of all."""
    start = 0
    for expert in range(len(routing.rows_by[0])):
        sizes = [rows[expert] for rows in routing.rows_by]
        edges = list(accumulate(sizes, initial=start))
        low, high = (0, -1) if source is None else (source, source + 1)
        if edges[low] < edges[high]:
            yield expert, edges[low], edges[high]
        start = edges[-1]
