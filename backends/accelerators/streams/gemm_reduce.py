"""GEMM+ReduceScatter and GEMM+AllReduce: partial sums of a @ b go to the owners of their rows, who
add them in rank order; for AllReduce they then send their rows to every rank.

Rows of the next ranks come first and own rows last, so that messages travel while the rest is
computed. Partials stay float32 (float64 for float64 inputs) throughout; those of invariant results
are roots of the ranks' subtrees, in the partial dtype, and are added by the tree. Rows are rounded
once, by their owner, so every rank of an AllReduce holds the same bits. For AllReduce, M need not be a
multiple of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mkernel.backends.accelerators.streams.all_reduce import shares_of, spread
from mkernel.backends.accelerators.streams.call_streams import CallStreams, Sent
from mkernel.backends.accelerators.streams.exchange import chunks, rotation
from mkernel.backends.accelerators.streams.scaled import own_rows, products
from mkernel.backends.accelerators.streams.schedule import RotatingSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.tree import tree_sum


def scatter(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out``, this rank's M/W rows."""
    _reduced(call, streams, shares_of(call, call.plan.gemm.m), call.tensors["out"])
    return {}


def all_reduce(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out``; with a norm, ``residual_out`` too."""
    out, shares = call.tensors["out"], shares_of(call, call.plan.gemm.m)
    places = [out[slice(*rows)] for rows in shares]
    _reduced(call, streams, shares, places[call.rank])
    spread(call, streams, places)
    return {}


def _reduced(
    call: Call, streams: CallStreams, shares: Sequence[tuple[int, int]], out: torch.Tensor
) -> None:
    """Compute out [rows of this rank's share, N] = these rows of the sum over ranks of a @ b."""
    a, rank = own_rows(call), call.rank
    step = call.plan.part(RotatingSchedule).rows_per_chunk
    first, last = shares[rank]
    width, rows = out.shape[1], last - first
    landing = streams.landing("slots")  # with as many rows as the largest share
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
        if call.plan.invariant is not None:
            out.copy_(tree_sum(list(slots)))
            return
        total, *others = slots
        for other in others[:-1]:
            total.add_(other)
        if others:
            torch.add(total, others[-1], out=out)  # a float32 sum, rounded once
        else:
            out.copy_(total)
