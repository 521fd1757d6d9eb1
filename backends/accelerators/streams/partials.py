"""Partial sums of a @ b: computed for each owner of rows, sent there, added in rank order.

Both ops that reduce use it. Rows of the next ranks first, own rows last, so that messages travel
while the rest is computed. Partials stay float32 all the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkernel.backends.accelerators.streams.lanes import Lanes
from mkernel.backends.accelerators.streams.matmul import Factor
from mkernel.backends.accelerators.streams.rows import chunks, rotation
from mkernel.backends.base import Call


def reduced(call: Call, lanes: Lanes, shares: Sequence[tuple[int, int]], out: torch.Tensor) -> None:
    """out = this rank's rows of the sum over ranks of a @ b.

    Args:
        shares: [start, end) of the rows of each rank. out: [rows of this rank's share, N].
    """
    a, rank = call.tensors["a"], call.rank
    step = call.plan.rows_per_chunk
    factor = Factor(call.tensors["b"], torch.float32)
    first, last = shares[rank]
    slots = a.new_empty((call.plan.world_size, last - first, out.shape[1]), dtype=torch.float32)

    waiting = []
    for target, source in rotation(call.plan, rank):
        start, end = shares[target]
        partial = slots.new_empty((end - start, out.shape[1]))
        # Chunks of both directions are paired by number; either side may have one row more.
        mine, theirs = chunks(end - start, step), chunks(last - first, step)
        for number in range(max(len(mine), len(theirs))):
            sends, receives = [], []
            if number < len(mine):
                low, high = mine[number]
                with lanes.compute():
                    factor.product(a[start + low : start + high], partial[low:high])
                sends = [(target, partial[low:high])]
            if number < len(theirs):
                low, high = theirs[number]
                receives = [(source, slots[source, low:high])]
            waiting.append((sends, receives, number))
            if lanes.communicates and not lanes.sequential:
                lanes.post(*waiting.pop())
    with lanes.compute():
        factor.product(a[first:last], slots[rank])
    if lanes.communicates:
        for parcels in waiting:  # a sequential view: all compute is done
            lanes.post(*parcels)
        lanes.finish()
    with lanes.compute():
        total = out if out.dtype == torch.float32 else slots[0]
        if total is out:
            total.copy_(slots[0])
        for source in range(1, call.plan.world_size):
            total.add_(slots[source])
        if total is not out:
            out.copy_(total)
