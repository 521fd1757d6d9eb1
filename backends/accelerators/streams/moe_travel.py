"""Movement of MoE's rows: tokens to the ranks of their experts, results back.

Results return by slot, one row per place, and are weighted and added on the token's rank; or by
rank, as the weighted sum of a token's results on that rank, one row per token. Sums are in the
dtype of the weights, float32 (float64 for float64 inputs), in the order of slots, and of ranks; those
of invariant results are added by the tree, whose leaves are groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import Arrivals, exchange
from mkernel.backends.accelerators.streams.routing import Routing
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.tree import tree_sum
from mkernel.plan.invariance import group_of
from mkernel.plan.model import CombineShape, GemmCombineShape, MoeShape


class Groups(NamedTuple):
    """The leaves of invariant sums over slots: groups of experts.

    ``of`` [T, k]: the group of each slot's expert, any for slots without a row; ``number`` of groups;
    ``partial``: the dtype to which leaves and nodes are rounded.
    """

    of: torch.Tensor
    number: int
    partial: torch.dtype


def partial_of(call: Call) -> torch.dtype | None:
    """Return the dtype of nodes of a call's invariant sums; None: its sums are others."""
    invariant = call.plan.invariant
    return None if invariant is None else getattr(torch, invariant.partial_dtype or "float32")


def groups_of(call: Call, ids: torch.Tensor, part: int = 0, parts: int = 1) -> Groups | None:
    """Return the groups of slots [T, k] with these experts, of one of so many equal parts of the ranks,
    such as a node; None: results are not invariant."""
    invariant, partial, shape = call.plan.invariant, partial_of(call), call.plan.shape
    if invariant is None or partial is None:
        return None
    assert isinstance(shape, MoeShape | CombineShape | GemmCombineShape)
    count = invariant.segments // parts
    of = group_of(ids.long(), shape.experts, invariant.segments) - part * count
    return Groups(of.clamp(0, count - 1), count, partial)


def send_tokens(
    call: Call, streams: CallStreams, routing: Routing, rows: torch.Tensor
) -> tuple[torch.Tensor, Arrivals]:
    """Send rows of tokens to where the dispatch sent them; return the rows that arrive from all
    ranks, and their messages."""
    with streams.compute():
        packed = torch.split(rows[routing.outgoing], routing.tokens_to)
        landed = rows.new_empty((sum(routing.tokens_from), rows.shape[1]))
        parts = torch.split(landed, routing.tokens_from)
        parts[call.rank].copy_(packed[call.rank])
    return landed, exchange(call, streams, packed.__getitem__, parts.__getitem__)


def return_by_slot(
    call: Call,
    streams: CallStreams,
    routing: Routing,
    y: torch.Tensor,
    weights: torch.Tensor,
    groups: Groups | None,
) -> torch.Tensor:
    """Return the weighted sum of each token's rows of ``y``, [T, D] in the dtype of ``weights`` [T,
    k]."""
    with streams.compute():
        packed = torch.split(y[routing.returning], routing.rows_to)
        rows, parts = landing(streams, packed, routing.rows_from, call.rank)
    exchange(call, streams, packed.__getitem__, parts.__getitem__)
    streams.finish()
    with streams.compute():
        return weighted_sums(rows, routing.homecoming.view(weights.shape), weights, groups)


def landing(
    streams: CallStreams, packed: Sequence[torch.Tensor], sizes: Sequence[int], own: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return memory for ``sizes`` rows from each rank, which the own ones of ``packed`` [.., D] are in,
    with a row of zeros behind them for places without a row; and its parts, by rank."""
    there = sum(sizes)
    rows = streams.scratch("rows", (there + 1, packed[own].shape[1]), packed[own].dtype)
    rows[there] = 0
    parts = torch.split(rows[:there], list(sizes))
    parts[own].copy_(packed[own])
    return rows, parts


def weighted_sums(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, groups: Groups | None = None
) -> torch.Tensor:
    """Return the weighted sum of the rows [.., D] at ``places`` [T, k], in the order of slots, by
    ``groups`` where there are some, and in the dtype of ``weights`` [T, k]. The last row is zero and
    belongs to slots without one."""
    weights = weights.masked_fill(places == len(rows) - 1, 0)  # they may be no numbers
    if groups is not None:
        tokens = torch.arange(len(places), device=rows.device)
        leaves = weights.new_zeros((groups.number, len(places), rows.shape[1]))
        for slot in range(weights.shape[1]):  # addcmul's bits may depend on an element's place
            terms = rows[places[:, slot]].to(weights.dtype) * weights[:, slot : slot + 1]
            leaves[groups.of[:, slot], tokens] += terms
        return tree_sum([*leaves.to(groups.partial)]).to(weights.dtype)
    total = rows[places[:, 0]].to(weights.dtype) * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total.addcmul_(rows[places[:, slot]].to(weights.dtype), weights[:, slot : slot + 1])
    return total


def return_by_rank(
    call: Call, streams: CallStreams, routing: Routing, of_tokens: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Send ``of_tokens``, one row per token that came here, back to the tokens' ranks; return the
    rows that arrive from each rank."""
    with streams.compute():
        home = of_tokens.new_empty((len(routing.outgoing), of_tokens.shape[1]))
        there = torch.split(of_tokens, routing.tokens_from)
        back = torch.split(home, routing.tokens_to)
        back[call.rank].copy_(there[call.rank])
    exchange(call, streams, there.__getitem__, back.__getitem__)
    return back


def add_ranks(
    call: Call, routing: Routing, back: Sequence[torch.Tensor], total: torch.Tensor
) -> torch.Tensor:
    """Return ``total``, which is zeros, plus the rows that returned from each rank."""
    which = torch.split(routing.outgoing, routing.tokens_to)
    return add_at(call, zip(which, back, strict=True), total)


def add_at(
    call: Call, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], total: torch.Tensor
) -> torch.Tensor:
    """Return ``total``, which is zeros, plus parts in order, each some rows, of which no two are the
    same, and what is added to them. Invariant sums are added by the tree."""
    partial, terms = partial_of(call), []
    for which, rows in parts:
        if partial is None:
            total[which] += rows
        else:
            terms.append(torch.zeros_like(total, dtype=partial))
            terms[-1][which] = rows.to(partial)
    return total if partial is None else tree_sum(terms).to(total.dtype)


def sum_by_token(
    routing: Routing,
    rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    groups: Groups | None = None,
) -> torch.Tensor:
    """Return the sum of each token's rows here, in the order of its slots, or by ``groups``; the last
    row belongs to no token. ``weights`` [tokens, k] of the tokens that came here."""
    count = len(rows) - 1
    places = routing.row_token.new_full((sum(routing.tokens_from), routing.top_k), count)
    places[routing.row_token, routing.row_slot] = torch.arange(count, device=rows.device)
    if weights is not None:
        return weighted_sums(rows, places, weights, groups)
    total = rows[places[:, 0]]
    for slot in range(1, routing.top_k):
        total += rows[places[:, slot]]
    return total
