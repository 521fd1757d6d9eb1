"""Backward of MoE: the movements of the dispatch and of the combine are each other's transposes.

Of the dispatch: tokens go to their experts again, for the gradients of the weights; gradients of tokens
are added up on the ranks of the experts, one row a token, and come home, where those of different ranks
are added in rank order. Of the combine: dO goes where its tokens went, with their weights, and the
gradients of these come home. Sums are float32 (of float64, float64), in a fixed order, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import Arrivals, exchange
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.moe import routing_of, segments
from mkernel.backends.accelerators.streams.routing import Routing
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import MoeShape


def dispatch(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``grad_x`` and ``grad_w``."""
    x, w, gradients, of_x, of_w = (
        call.tensors[name] for name in ("x", "w", "grad_outputs", "grad_x", "grad_w")
    )
    routing = routing_of(call, streams, "grad_outputs")
    tokens, arrivals = _sent(call, streams, routing, x)
    with streams.compute():
        shape = len(routing.row_token) + 1, x.shape[1]
        sums = getattr(torch, call.plan.sums)
        rows = torch.zeros(shape, dtype=sums, device=x.device)  # the last one stays zero
        for expert, start, end in segments(routing, None):
            Factor(w[expert].t(), rows.dtype).product(gradients[start:end], rows[start:end])
        of_tokens = _by_token(call, routing, rows)
        home = rows.new_empty((len(routing.outgoing), x.shape[1]))
        there = torch.split(of_tokens, routing.tokens_from)
        back = torch.split(home, routing.tokens_to)
        back[call.rank].copy_(there[call.rank])
    exchange(call, streams, there.__getitem__, back.__getitem__)
    for *_, message in arrivals:
        streams.wait(message)
    with streams.compute():
        of_w.zero_()
        for expert, start, end in segments(routing, None):
            used = tokens[routing.row_token[start:end]]
            Factor(gradients[start:end], of_w.dtype).product(used.t(), of_w[expert])
        total = torch.zeros_like(x, dtype=rows.dtype)
    streams.finish()
    with streams.compute():
        for which, part in zip(torch.split(routing.outgoing, routing.tokens_to), back, strict=True):
            total[which] += part  # of one rank no token comes twice
        of_x.copy_(total)
    return {}


def combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``grad_y`` and ``grad_weights``."""
    y, weights, gradient, of_y, of_weights = (
        call.tensors[name] for name in ("y", "topk_weights", "grad_out", "grad_y", "grad_weights")
    )
    routing = routing_of(call, streams, "y")
    tokens, _ = _sent(call, streams, routing, gradient)
    their_weights, _ = _sent(call, streams, routing, weights)
    streams.finish()
    with streams.compute():
        count = len(routing.row_token)
        rows = tokens[routing.row_token].to(weights.dtype)
        own = their_weights[routing.row_token, routing.row_slot]
        of_y[:count] = rows * own[:, None]
        of_y[count:].zero_()
        products = (rows * y[:count].to(weights.dtype)).sum(1, keepdim=True)
        there = torch.split(products[routing.returning], routing.rows_to)
        home = products.new_zeros((sum(routing.rows_from) + 1, 1))  # the last: places without a row
        back = torch.split(home[:-1], routing.rows_from)
        back[call.rank].copy_(there[call.rank])
    exchange(call, streams, there.__getitem__, back.__getitem__)
    streams.finish()
    with streams.compute():
        of_weights.copy_(home[routing.homecoming].view(of_weights.shape))
    return {}


def _sent(
    call: Call, streams: CallStreams, routing: Routing, rows: torch.Tensor
) -> tuple[torch.Tensor, Arrivals]:
    """Rows of tokens, under way to where the dispatch sent them: what comes from all ranks."""
    with streams.compute():
        packed = torch.split(rows[routing.outgoing], routing.tokens_to)
        landed = rows.new_empty((sum(routing.tokens_from), rows.shape[1]))
        parts = torch.split(landed, routing.tokens_from)
        parts[call.rank].copy_(packed[call.rank])
    return landed, exchange(call, streams, packed.__getitem__, parts.__getitem__)


def _by_token(call: Call, routing: Routing, rows: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows, in the order of its slots; the last row is no token's."""
    shape = call.plan.shape
    assert isinstance(shape, MoeShape)
    count = len(rows) - 1
    places = routing.row_token.new_full((sum(routing.tokens_from), shape.top_k), count)
    places[routing.row_token, routing.row_slot] = torch.arange(count, device=rows.device)
    total = rows[places[:, 0]]
    for slot in range(1, shape.top_k):
        total += rows[places[:, slot]]
    return total
