"""Every rank sends something to every other: in rotation, in chunks, all posted at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkernel.backends.accelerators.streams.lanes import Lanes, Message
from mkernel.backends.accelerators.streams.rows import chunks, rotation
from mkernel.backends.base import Call

Arrivals = dict[int, list[tuple[int, int, Message]]]
"""By source, in the order in which they are to be consumed: (first row, end row, message)."""


def exchange(
    call: Call,
    lanes: Lanes,
    outgoing: Callable[[int], torch.Tensor],
    incoming: Callable[[int], torch.Tensor],
) -> Arrivals:
    """Post all messages of one exchange; in a sequential view they have arrived on return.

    Args:
        outgoing: rows for a rank; incoming: where to put the rows of a rank. Contiguous. A chunk
            has the plan's number of rows; both ends must know how many rows there are.
    """
    arrivals: Arrivals = {}
    if not lanes.communicates:
        return arrivals
    step = call.plan.rows_per_chunk
    for source, target in rotation(call.plan, call.rank):
        there, here = outgoing(target), incoming(source)
        sends = [(target, there[start:end]) for start, end in chunks(len(there), step)]
        places = chunks(len(here), step)
        arrivals[source] = []
        for number in range(max(len(sends), len(places))):
            receives = [(source, here[start:end]) for start, end in places[number : number + 1]]
            message = lanes.post(sends[number : number + 1], receives, number)
            arrivals[source] += [(*place, message) for place in places[number : number + 1]]
    if lanes.sequential:
        lanes.finish()
    return arrivals
