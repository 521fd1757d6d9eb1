"""Backward of MoE: the movements of the dispatch and of the combine are each other's transposes.

Dispatch: tokens go to their experts again, for the gradients of the weights; gradients of tokens
are added on the ranks of the experts, one row per token, and return to the token's rank, which adds
those of different ranks in rank order. Combine: dO goes where its tokens went, with their weights,
and the gradients of the weights return. Sums are float32 (float64 for float64 inputs), in a fixed
order, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import exchange
from mkernel.backends.accelerators.streams.matmul import mixed_product
from mkernel.backends.accelerators.streams.moe import groups_here, routing_of, segments
from mkernel.backends.accelerators.streams.moe_travel import (
    add_ranks,
    return_by_rank,
    send_tokens,
    sum_by_token,
)
from mkernel.backends.accelerators.streams.routing import Routing
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.invariant_product import InvariantFactor
from mkernel.backends.contracts.norm import row_sum


def dispatch(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``grad_x`` and ``grad_w``."""
    x, w, gradients, of_x, of_w = (
        call.tensors[name] for name in ("x", "w", "grad_outputs", "grad_x", "grad_w")
    )
    routing = routing_of(call, streams, "grad_outputs")
    tokens, arrivals = send_tokens(call, streams, routing, x)
    with streams.compute():
        shape = len(routing.row_token) + 1, x.shape[1]
        sums = getattr(torch, call.plan.sums)
        rows = torch.zeros(shape, dtype=sums, device=x.device)  # the last one stays zero
        for expert, start, end in segments(routing, None):
            _product_of_rows(call, gradients[start:end], w[expert].t(), rows[start:end])
        groups = groups_here(call, routing)
        ones = rows.new_ones((sum(routing.tokens_from), routing.top_k)) if groups else None
        of_tokens = sum_by_token(routing, rows, ones, groups)
    back = return_by_rank(call, streams, routing, of_tokens)
    for *_, message in arrivals:
        streams.wait(message)
    with streams.compute():
        of_w.zero_()
        for expert, start, end in segments(routing, None):
            used = tokens[routing.row_token[start:end]]
            mixed_product(used.t(), gradients[start:end], of_w[expert])
    streams.finish()
    with streams.compute():
        of_x.copy_(add_ranks(call, routing, back, torch.zeros_like(of_x, dtype=rows.dtype)))
    return {}


def _product_of_rows(call: Call, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = a @ b; what has a row's bits by itself, where results are invariant."""
    if call.plan.invariant is None:
        mixed_product(a, b, out)
    else:
        InvariantFactor(b).product(a, out)


def _sums_of_rows(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row [R, D], as [R, 1]."""
    if call.plan.invariant is None:
        return rows.sum(1, keepdim=True)
    return row_sum(rows)


def combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``grad_y`` and ``grad_weights``."""
    y, weights, gradient, of_y, of_weights = (
        call.tensors[name] for name in ("y", "topk_weights", "grad_out", "grad_y", "grad_weights")
    )
    routing = routing_of(call, streams, "y")
    tokens, _ = send_tokens(call, streams, routing, gradient)
    their_weights, _ = send_tokens(call, streams, routing, weights)
    streams.finish()
    with streams.compute():
        count = len(routing.row_token)
        rows = tokens[routing.row_token].to(weights.dtype)
        own = their_weights[routing.row_token, routing.row_slot]
        of_y[:count] = rows * own[:, None]
        of_y[count:].zero_()
        products = _sums_of_rows(call, rows * y[:count].to(weights.dtype))
    _weights_home(call, streams, routing, products, of_weights)
    return {}


def gemm_combine(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``grad_h``, ``grad_w2`` and ``grad_weights``.

    With g[r] = dO[token] @ w2^T of row r and p its place: dh[r] = weight[p] g[r], dweight[p] = g[r]
    . h[r], so that the results of the forward pass are not needed again."""
    h, w2, weights, gradient = (
        call.tensors[name] for name in ("h", "w2", "topk_weights", "grad_out")
    )
    of_h, of_w2, of_weights = (call.tensors[f"grad_{name}"] for name in ("h", "w2", "weights"))
    routing = routing_of(call, streams, "h")
    tokens, _ = send_tokens(call, streams, routing, gradient)
    their_weights, _ = send_tokens(call, streams, routing, weights)
    streams.finish()
    with streams.compute():
        count, sums = len(routing.row_token), weights.dtype
        own = their_weights[routing.row_token, routing.row_slot][:, None]
        rows = tokens[routing.row_token]
        back = torch.empty((count, h.shape[1]), dtype=sums, device=h.device)
        for expert, start, end in segments(routing, None):
            _product_of_rows(call, rows[start:end], w2[expert].t(), back[start:end])
        products = _sums_of_rows(call, back * h[:count].to(sums))
        of_h[:count] = back.mul_(own)
        of_h[count:].zero_()
    _weights_home(call, streams, routing, products, of_weights)
    with streams.compute():
        weighted = (rows.to(sums) * own).to(h.dtype)
        of_w2.zero_()
        for expert, start, end in segments(routing, None):
            mixed_product(h[start:end].t(), weighted[start:end], of_w2[expert])
    return {}


def _weights_home(
    call: Call, streams: CallStreams, routing: Routing, products: torch.Tensor, out: torch.Tensor
) -> None:
    """Move a number for each row [R, 1] to its place in ``out`` [T, k]; places without a row get 0."""
    with streams.compute():
        there = torch.split(products[routing.returning], routing.rows_to)
        home = products.new_zeros((sum(routing.rows_from) + 1, 1))  # the last: places without a row
        back = torch.split(home[:-1], routing.rows_from)
        back[call.rank].copy_(there[call.rank])
    exchange(call, streams, there.__getitem__, back.__getitem__)
    streams.finish()
    with streams.compute():
        out.copy_(home[routing.homecoming].view(out.shape))
