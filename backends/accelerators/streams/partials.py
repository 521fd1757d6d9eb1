"""Partial sums of a @ b: computed for each owner of rows, sent there, added in rank order.

Both ops that reduce use it. Rows of the next ranks first, own rows last, so that messages travel
while the rest is computed. Partials stay float32 all the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Sent
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.rows import chunks, rotation
from mkernel.backends.contracts.accelerator import Call


def reduced(
    call: Call, streams: CallStreams, shares: Sequence[tuple[int, int]], out: torch.Tensor
) -> None:
    """out = this rank's rows of the sum over ranks of a @ b.

    Args:
        shares: [start, end) of the rows of each rank. out: [rows of this rank's share, N].
    """
    a, rank = call.tensors["a"], call.rank
    step = call.plan.rows_per_chunk
    factor = Factor(call.tensors["b"], torch.float32)
    first, last = shares[rank]
    width, rows = out.shape[1], last - first
    landing = streams.landing("slots")  # of as many rows as any rank has
    slots = landing[:, :rows]

    waiting = []
    for target, source in rotation(call.plan, rank):
        start, end = shares[target]
        partial = streams.scratch(f"partial{target}", (end - start, width), torch.float32)
        # Chunks of both directions are paired by number; either side may have one row more.
        mine, theirs = chunks(end - start, step), chunks(rows, step)
        for number in range(max(len(mine), len(theirs))):
            sends, receives = [], []
            if number < len(mine):
                low, high = mine[number]
                with streams.compute():
                    factor.product(a[start + low : start + high], partial[low:high])
                sends = [Sent(target, partial[low:high], landing[rank, low:high])]
            if number < len(theirs):
                low, high = theirs[number]
                receives = [(source, slots[source, low:high])]
            waiting.append((sends, receives, number))
            if streams.communicates and not streams.sequential:
                streams.post(*waiting.pop())
    with streams.compute():
        factor.product(a[first:last], slots[rank])
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
