"""MoE: tokens go to the ranks of their experts, once per rank, and results return.

Between nodes the exchange is direct, as follows, or goes by relays (:mod:`.relay`).

Dispatch: the ids of all ranks are exchanged first (they are small), so every rank builds the tables
by itself and no sizes go on the wire. Tokens that are multiplied in e4m3 are quantised before they
travel, once each, and their scales travel behind them. Tokens travel as soon as the tables state
their destinations; or all tokens go to every rank right after the ids, while the host waits for the
ids and builds the tables.

Combine: rows travel in their own dtype, one per place, and are weighted and added on the token's
rank, in slot order, in float32. GEMM+combine: the experts' products come first, followed by a
combine; or the weighted sum of a token's results on this rank travels, one row per token, and sums
are added in rank order. Invariant results are the same in every way (:mod:`mkernel.plan.invariance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from mkernel.backends.accelerators.streams import relay
from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message
from mkernel.backends.accelerators.streams.exchange import Arrivals, exchange
from mkernel.backends.accelerators.streams.matmul import grouped_product
from mkernel.backends.accelerators.streams.moe_travel import (
    Groups,
    add_ranks,
    groups_of,
    return_by_rank,
    return_by_slot,
    send_tokens,
    sum_by_token,
)
from mkernel.backends.accelerators.streams.routing import (
    Relays,
    Remembered,
    Routing,
    recall,
    relays,
    remember,
    route,
)
from mkernel.backends.accelerators.streams.scaled import (
    Rows,
    expert_factor,
    joined,
    parted,
    rows_of_experts,
)
from mkernel.backends.accelerators.streams.schedule import (
    DispatchSchedule,
    GemmCombineSchedule,
    HomeSchedule,
    TokenSchedule,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.invariant_product import in_blocks
from mkernel.backends.contracts.scaled import quantised_blocks
from mkernel.errors import CapacityExceeded, ShapeError
from mkernel.plan.model import (
    BLOCK,
    E4M3,
    Activation,
    CombineShape,
    DispatchShape,
    GemmCombineShape,
    MoeShape,
)


def routing_words(world: int, tokens: int, top_k: int) -> int:
    """Return the number of words of the ids of all ranks, plus one for the number of rows of the
    outputs."""
    return world * tokens * top_k + 1


def dispatch(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Return ``outputs`` and ``counts``, and the ``scales`` of e4m3 outputs; fill ``routing``, unless
    an earlier dispatch did."""
    return _results(call, streams, *_tokens(call, streams))


def dispatch_rows(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Return ``rows`` and ``counts``, and the ``scales`` of e4m3 rows; fill ``routing``, unless an
    earlier dispatch did."""
    shape = call.plan.shape
    assert isinstance(shape, DispatchShape)
    routing, tokens, height = _tokens(call, streams)
    for *_, message in tokens.arrivals:
        streams.wait(message)
    with streams.compute():
        rows = tokens.tokens.new_empty((height, tokens.tokens.shape[1]))
        count = len(tokens.row_token)
        torch.index_select(tokens.tokens, 0, tokens.row_token, out=rows[:count])
        rows[count:].zero_()
        values, scales = parted(rows, shape.hidden)
        if scales is not None:
            scales[count:] = 1
    found = {"rows": values.contiguous(), "counts": routing.counts}
    return found if scales is None else {**found, "scales": scales}


class _Tokens(NamedTuple):
    """Tokens in transit, for each row the index of its token, and how many come from each rank."""

    tokens: torch.Tensor
    row_token: torch.Tensor
    arrivals: Iterable[tuple[int, int, int, Message]]
    rows: Sequence[int]


def _tokens(call: Call, streams: CallStreams) -> tuple[Routing, _Tokens, int]:
    """Start a dispatch, with the routing of an earlier one where the plan says so; return the tables,
    the tokens and the number of rows."""
    shape = call.plan.shape
    assert isinstance(shape, MoeShape | DispatchShape)
    if not shape.routed:
        return _sent(call, streams)
    routing, height = _known(call, streams)
    with streams.compute():
        x = joined(rows_of_experts(call, "x"))
    return routing, _wanted(call, streams, routing, x), height


def _sent(call: Call, streams: CallStreams) -> tuple[Routing, _Tokens, int]:
    """Start a dispatch and fill ``routing``; return the tables, the tokens and the number of rows."""
    rank, words, shape = call.rank, call.tensors["routing"], call.plan.shape
    assert isinstance(shape, MoeShape | DispatchShape)
    how = call.plan.part(TokenSchedule)
    with streams.compute():
        x = joined(rows_of_experts(call, "x"))
    ids, known = _everyones(call, streams, call.tensors["topk_ids"].to(torch.int32))
    if how.gathers == "whole":
        with streams.compute():
            tokens = streams.scratch("tokens", (call.plan.world_size * len(x), x.shape[1]), x.dtype)
            whole = tokens.view(-1, *x.shape)
            if streams.communicates:
                whole[rank].copy_(x)
        arrivals = exchange(call, streams, lambda target: x, whole.__getitem__)
    _host_knows(streams, known)
    with streams.compute():
        routing = route(ids, rank, shape.experts // call.plan.world_size)
        height = _height(call, streams, routing)
        words[-2] = height  # the world's mark follows it
        remember(words, Remembered(rank, height, routing))
    if how.gathers == "wanted":
        return routing, _wanted(call, streams, routing, x), height
    return routing, _Tokens(tokens, routing.row_source, arrivals, [len(x)] * len(whole)), height


def _wanted(call: Call, streams: CallStreams, routing: Routing, x: torch.Tensor) -> _Tokens:
    """Send each token once to each rank that wants it, or to each node."""
    if call.plan.part(TokenSchedule).relays:
        tokens, passed = relay.send_tokens(call, streams, _relays(call, routing), routing, x)
        return _Tokens(tokens, routing.row_token, passed, routing.tokens_from)
    with streams.compute():
        packed = torch.split(x[routing.outgoing], routing.tokens_to)
        tokens = streams.scratch("tokens", (sum(routing.tokens_from), x.shape[1]), x.dtype)
        parts = torch.split(tokens, routing.tokens_from)
        if streams.communicates:
            parts[call.rank].copy_(packed[call.rank])
    arrivals = exchange(call, streams, packed.__getitem__, parts.__getitem__)
    return _Tokens(tokens, routing.row_token, arrivals, routing.tokens_from)


def _results(
    call: Call, streams: CallStreams, routing: Routing, tokens: _Tokens, height: int
) -> Mapping[str, Any]:
    """Return the results of a dispatch, with outputs of so many rows."""
    shape = call.plan.shape
    assert isinstance(shape, MoeShape)
    count = len(routing.row_token)
    dtype = getattr(torch, call.plan.out_dtype)
    outputs = tokens.tokens.new_empty((height, shape.features), dtype=dtype)
    quantises = call.plan.out_dtype == E4M3
    products = outputs[:count]
    if shape.activation is not None or quantises:
        with streams.compute():
            sums = getattr(torch, call.plan.sums)
            products = streams.scratch("products", (count, shape.columns), sums)
    _multiply(call, streams, routing, tokens, products)
    found = {"outputs": outputs, "counts": routing.counts}
    with streams.compute():
        results = products.new_empty((count, shape.features)) if quantises else outputs[:count]
        if shape.activation is not None:
            activate(shape.activation, products, results, call.plan.invariant is not None)
        elif quantises:
            results = products
        if quantises:
            scale = found["scales"] = results.new_ones((height, shape.features // BLOCK))
            outputs[:count], scale[:count] = quantised_blocks(results)
        outputs[count:].zero_()
    return found


def _multiply(
    call: Call, streams: CallStreams, routing: Routing, rows: _Tokens, out: torch.Tensor
) -> None:
    """Compute out = rows @ their experts' weights."""
    w, how = call.tensors["w"], call.plan.part(DispatchSchedule)
    tokens, row_token, arrivals, heights = rows
    factors: dict[int, Callable[[Rows, torch.Tensor], None]] = {}
    for source in _as_they_come(call, streams, arrivals, heights):
        with streams.compute():
            if source is None:
                size = len(out), tokens.shape[1]
                packed = streams.scratch("rows", size, tokens.dtype)
                torch.index_select(tokens, 0, row_token, out=packed)
                _products(call, routing, "w", parted(packed, w.shape[1]), out, how.grouped)
                continue
            for expert, start, end in segments(routing, source):
                if expert not in factors:
                    factors[expert] = expert_factor(call, "w", expert, out.dtype)
                here = parted(tokens[row_token[start:end]], w.shape[1])
                factors[expert](here, out[start:end])


def _products(
    call: Call, routing: Routing, weight: str, rows: Rows, out: torch.Tensor, grouped: bool
) -> None:
    """Compute out = rows @ their experts' weights, the tensor of that name, all at once."""
    every = segments(routing, None)
    if call.plan.scales is None and call.plan.invariant is None:
        w = call.tensors[weight]
        grouped_product(rows.values, w, routing.counts, every, out, grouped=grouped)
        return
    for expert, start, end in every:
        expert_factor(call, weight, expert, out.dtype)(rows.part(start, end), out[start:end])


def combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out`` with the weighted sums of the experts' results."""
    y, weights, out = (call.tensors[name] for name in ("y", "topk_weights", "out"))
    routing = routing_of(call, streams, "y")
    total = _by_slot(call, streams, routing, y, weights)
    with streams.compute():
        out.copy_(total)
    return {}


def gemm_combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out`` with the weighted sums of the experts' products."""
    weights, out = call.tensors["topk_weights"], call.tensors["out"]
    how, shape = call.plan.part(GemmCombineSchedule), call.plan.shape
    assert isinstance(shape, GemmCombineShape)
    routing = routing_of(call, streams, "h")
    count = len(routing.row_token)
    travels = getattr(torch, shape.partial_dtype)
    by_rank = how.returns == "ranks"
    arrivals: Iterable[tuple[int, int, int, Message]]
    tables = _relays(call, routing) if how.relays and by_rank else None
    if tables is not None:
        their_weights, arrivals = relay.send_tokens(call, streams, tables, routing, weights)
    elif by_rank:
        their_weights, arrivals = send_tokens(call, streams, routing, weights)
    with streams.compute():
        h = rows_of_experts(call, "h", count)
        wide = by_rank and call.plan.invariant is None
        y = out.new_empty((count + 1, shape.hidden), dtype=weights.dtype if wide else travels)
        _products(call, routing, "w2", h, y[:count], how.grouped)
    if not by_rank:
        total = _by_slot(call, streams, routing, y, weights)
    else:
        for *_, message in arrivals:
            streams.wait(message)
        with streams.compute():
            y[count] = 0  # the row of slots that are none of this rank's
            groups = groups_here(call, routing)
            of_tokens = sum_by_token(routing, y, their_weights, groups).to(travels)
        if tables is not None:
            total = relay.return_by_rank(call, streams, tables, routing, of_tokens, weights)
        else:
            back = return_by_rank(call, streams, routing, of_tokens)
            streams.finish()
            with streams.compute():
                zeros = torch.zeros_like(out, dtype=weights.dtype)
                total = add_ranks(call, routing, back, zeros)
    with streams.compute():
        out.copy_(total)
    return {}


def _by_slot(
    call: Call, streams: CallStreams, routing: Routing, y: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's rows of ``y``, directly or by relays."""
    if not call.plan.part(HomeSchedule).relays:
        with streams.compute():
            groups = groups_of(call, _ids(call)[call.rank])
        return return_by_slot(call, streams, routing, y, weights, groups)
    return relay.return_by_slot(call, streams, _relays(call, routing), y, weights)


def groups_here(call: Call, routing: Routing) -> Groups | None:
    """Return the groups of slots of the tokens that came here."""
    tokens = routing.row_source.new_zeros(sum(routing.tokens_from))
    tokens[routing.row_token] = routing.row_source
    return groups_of(call, _ids(call).flatten(0, 1)[tokens], call.rank, call.plan.world_size)


def _relays(call: Call, routing: Routing) -> Relays:
    """Return the tables of relays that belong to those of the call's routing."""
    words, each = call.tensors["routing"], call.plan.ranks_per_node
    known = recall(words, call.rank)
    if known is not None and known.relays is not None:
        return known.relays
    made = relays(_ids(call), call.rank, each, len(routing.counts), routing)
    if known is not None:
        remember(words, known._replace(relays=made))
    return made


def routing_of(call: Call, streams: CallStreams, rows: str) -> Routing:
    """Return the tables of the dispatch whose ``routing`` the call has. ShapeError: the tensor
    ``rows`` belongs to another dispatch."""
    routing, height = _known(call, streams)
    given = call.tensors[rows]
    if len(given) != height:
        legal = f"[{height}, {given.shape[1]}], a row for each that the dispatch gave"
        raise ShapeError(rows, tuple(given.shape), legal)
    return routing


def _known(call: Call, streams: CallStreams) -> tuple[Routing, int]:
    """Return the tables of the dispatch whose ``routing`` the call has, and the rows of its outputs.
    ShapeError: it had other experts."""
    words, shape, world = call.tensors["routing"], call.plan.shape, call.plan.world_size
    assert isinstance(shape, MoeShape | DispatchShape | CombineShape | GemmCombineShape)
    known = recall(words, call.rank)
    if known is None:
        streams.host_waits()
        ids = _ids(call)
        found = route(ids, call.rank, shape.experts // world)
        known = Remembered(call.rank, int(words[-2]), found)  # the world's mark follows it
        remember(words, known)
    if len(known.routing.counts) * world != shape.experts:
        there = f"of {len(known.routing.counts)} experts a rank"
        raise ShapeError("routing", there, f"{shape.experts} on {world} ranks")
    return known.routing, known.height


def _height(call: Call, streams: CallStreams, routing: Routing) -> int:
    """Return the number of rows of the outputs. CapacityExceeded, on all ranks alike, if any rank
    has more rows than its capacity."""
    shape = call.plan.shape
    assert isinstance(shape, MoeShape | DispatchShape)
    if shape.capacity is None:
        return len(routing.row_token)
    most = max(routing.rows_on)
    if most > shape.capacity:
        streams.finish()  # messages may still write memory that is about to be freed
        raise CapacityExceeded(routing.rows_on.index(most), most, shape.capacity)
    return shape.capacity


def _ids(call: Call) -> torch.Tensor:
    """Return the ids of every rank, [W, T, k], as the call's ``routing`` keeps them."""
    shape, world = call.plan.shape, call.plan.world_size
    assert isinstance(shape, MoeShape | DispatchShape | CombineShape | GemmCombineShape)
    size = world, shape.tokens, shape.top_k
    return call.tensors["routing"][: prod(size)].view(size)


def _everyones(
    call: Call, streams: CallStreams, own: torch.Tensor
) -> tuple[torch.Tensor, Arrivals]:
    """Start to gather ``own`` of every rank [W, ...]; in a compute-only view own ones stand in for
    the others'."""
    gathered = _ids(call).copy_(own)
    if call.plan.part(TokenSchedule).relays:
        return gathered, relay.gather(call, streams, gathered)
    return gathered, exchange(call, streams, lambda target: own, gathered.__getitem__)


def _host_knows(streams: CallStreams, arrivals: Arrivals) -> None:
    """Wait on the host until these messages have arrived, because it will read their values; others
    may still be in transit."""
    for *_, message in arrivals:
        streams.wait(message)
    streams.host_waits()


def _as_they_come(
    call: Call,
    streams: CallStreams,
    arrivals: Iterable[tuple[int, int, int, Message]],
    rows: Sequence[int],
) -> Iterator[int | None]:
    """Yield sources whose tokens have arrived, of which ``rows`` says how many each sends. None: all of
    them, at once."""
    by_source = call.plan.part(DispatchSchedule).as_they_arrive and not streams.sequential
    if by_source:
        yield call.rank
    for source, _, end, message in arrivals:
        streams.wait(message)
        if by_source and end == rows[source]:
            yield source
    if not by_source:
        yield None


def segments(routing: Routing, source: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, start, end) of the output rows of one source, or of all."""
    start = 0
    for expert in range(len(routing.rows_by[0])):
        sizes = [rows[expert] for rows in routing.rows_by]
        edges = list(accumulate(sizes, initial=start))
        low, high = (0, -1) if source is None else (source, source + 1)
        if edges[low] < edges[high]:
            yield expert, edges[low], edges[high]
        start = edges[-1]


def activate(
    activation: Activation, sums: torch.Tensor, out: torch.Tensor, invariant: bool = False
) -> None:
    """Compute out [R, I] = silu(gate) * up from ``sums`` [R, 2I], whose first half of the columns
    is the gate; rounded once."""
    assert activation == "silu_and_mul"
    gate, up = sums.chunk(2, dim=1)
    silu = torch.nn.functional.silu
    out.copy_((in_blocks(silu, gate) if invariant else silu(gate)).mul_(up))
