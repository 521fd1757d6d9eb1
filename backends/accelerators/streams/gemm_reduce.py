"""GEMM+ReduceScatter and GEMM+AllReduce: partial sums of a @ b go to the owners of their rows, who add
them up in rank order; for AllReduce they then send their rows to every rank.

Rows of the next ranks first, own rows last, so that messages travel while the rest is computed.
Partials stay float32 (of float64, float64) all the way. Rows are rounded once, by their owner, so every
rank of an AllReduce holds the same bits. There M needs not divide by W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Sent
from mkernel.backends.accelerators.streams.exchange import exchange, take
from mkernel.backends.accelerators.streams.rows import chunks, rotation, share
from mkernel.backends.accelerators.streams.scaled import own_rows, products
from mkernel.backends.accelerators.streams.schedule import RotatingSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.norm import add_and_normalise
from mkernel.plan.model import NormStep


def scatter(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out``, this rank's M/W rows."""
    _reduced(call, streams, _shares(call), call.tensors["out"])
    return {}


def all_reduce(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out``."""
    out, shares = call.tensors["out"], _shares(call)
    places = [out[slice(*rows)] for rows in shares]
    own = places[call.rank]
    _reduced(call, streams, shares, own)
    landed = places
    if streams.one_sided:  # others can write to nothing but a landing
        landed = [
            rows[: len(place)]
            for rows, place in zip(streams.landing("results"), places, strict=True)
        ]
    arrivals = exchange(call, streams, lambda target: own, landed.__getitem__)
    if landed is not places:
        take(streams, arrivals, landed, places)
    if call.plan.norm is not None and call.plan.norm.step == "launch":
        _normalise(call, streams, call.plan.norm)
    return {}


def _normalise(call: Call, streams: CallStreams, norm: NormStep) -> None:
    """The residual is added to every row of ``out``, which is then normalised, once all have come and
    own ones have been sent."""
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
        )


def _shares(call: Call) -> list[tuple[int, int]]:
    """[start, end) of the rows of each rank."""
    world = call.plan.world_size
    return [share(call.plan.gemm.m, world, rank) for rank in range(world)]


def _reduced(
    call: Call, streams: CallStreams, shares: Sequence[tuple[int, int]], out: torch.Tensor
) -> None:
    """out [rows of this rank's share, N] = these rows of the sum over ranks of a @ b."""
    a, rank = own_rows(call), call.rank
    step = call.plan.part(RotatingSchedule).rows_per_chunk
    first, last = shares[rank]
    width, rows = out.shape[1], last - first
    landing = streams.landing("slots")  # of as many rows as any rank has
    multiply = products(call, landing.dtype)
    slots = landing[:, :rows]

    waiting = []
    for target, source in rotation(call.plan, rank):
        start, end = shares[target]
        partial = streams.scratch(f"partial{target}", (end - start, width), landing.dtype)
        # Chunks of both directions are paired by number; either side may have one row more.
        mine, theirs = chunks(end - start, step), chunks(rows, step)
        for number in range(max(len(mine), len(theirs))):
            sends, receives = [], []
            if number < len(mine):
                low, high = mine[number]
                with streams.compute():
                    multiply(a.part(start + low, start + high), partial[low:high])
                sends = [Sent(target, partial[low:high], landing[rank, low:high])]
            if number < len(theirs):
                low, high = theirs[number]
                receives = [(source, slots[source, low:high])]
            waiting.append((sends, receives, number))
            if streams.communicates and not streams.sequential:
                streams.post(*waiting.pop())
    with streams.compute():
        multiply(a.part(first, last), slots[rank])
    if streams.communicates:
        for parcels in waiting:  # a sequential view: all compute is done
            streams.post(*parcels)
        streams.finish()
    with streams.compute():
        total, *others = slots
        for other in others[:-1]:
            total.add_(other)
        if others:
            torch.add(total, others[-1], out=out)  # a float32 sum, rounded once
        else:
            out.copy_(total)
