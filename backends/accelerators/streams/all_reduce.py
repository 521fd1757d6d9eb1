"""AllReduce: rows of x go to their owners, who add them in rank order and send the sums to every
rank.

Sums are float32 (float64 for float64 inputs), or the tree of invariant results, and rounded once, by
their owner, so every rank holds the same bits. M need not be a multiple of W. ``out`` may be ``x``: a
row of it is written only once the row's owner, or this rank itself, has the values that x held there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import exchange, share, take
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.norm import add_and_normalise
from mkernel.backends.contracts.tree import tree_sum
from mkernel.plan.model import NormStep


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out``; with a norm, ``residual_out`` too."""
    x, out = call.tensors["x"], call.tensors["out"]
    shares = shares_of(call, len(x))
    _sum_own(call, streams, [x[slice(*rows)] for rows in shares], out[slice(*shares[call.rank])])
    spread(call, streams, [out[slice(*rows)] for rows in shares])
    return {}


def shares_of(call: Call, rows: int) -> list[tuple[int, int]]:
    """Return [start, end) of the rows of each rank."""
    world = call.plan.world_size
    return [share(rows, world, rank) for rank in range(world)]


def spread(call: Call, streams: CallStreams, places: Sequence[torch.Tensor]) -> None:
    """Send each rank's sums to every rank, and run the plan's norm step after that.

    Args:
        places: the rows of each rank in ``out``; this rank's own hold sums.
    """
    own, landed = places[call.rank], places
    if streams.one_sided:  # peers can write only to a landing
        landed = [
            rows[: len(place)]
            for rows, place in zip(streams.landing("results"), places, strict=True)
        ]
    arrivals = exchange(call, streams, lambda target: own, landed.__getitem__)
    if landed is not places:
        take(streams, arrivals, landed, places)
    if call.plan.norm is not None and call.plan.norm.step == "launch":
        _normalise(call, streams, call.plan.norm)


def _sum_own(
    call: Call, streams: CallStreams, terms: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Compute out = the sum over ranks of this rank's share. ``terms``: this rank's terms, by the
    rank that adds them up."""
    rank, slots, invariant = call.rank, streams.landing("slots"), call.plan.invariant
    own = terms[rank]
    arrivals = exchange(
        call,
        streams,
        terms.__getitem__,
        lambda source: slots[source] if source == rank else slots[source, : len(own)],
    )
    for *_, message in arrivals:
        streams.wait(message)
    with streams.compute():
        given = [
            own if source == rank else slots[source, : len(own)] for source in range(len(terms))
        ]
        if invariant is not None:
            partial = getattr(torch, invariant.partial_dtype or "float32")
            out.copy_(tree_sum([each.to(partial) for each in given]))
            return
        first, *others = given
        total = streams.scratch("total", own.shape, getattr(torch, call.plan.sums))
        total.copy_(first)
        for other in others:
            total.add_(other)
        out.copy_(total)


def _normalise(call: Call, streams: CallStreams, norm: NormStep) -> None:
    """Add the residual to every row of ``out`` and normalise it, once all rows have arrived and own
    ones have been sent."""
    if streams.communicates:
        streams.finish()
    tensors = call.tensors
    with streams.compute():
        add_and_normalise(
            tensors["out"],
            [tensors["residual"]] if norm.residual else [],
            tensors["norm_weight"],
            norm.eps,
            tensors["out"],
            tensors["residual_out"],
            invariant=call.plan.invariant is not None,
        )
