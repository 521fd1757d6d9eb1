"""All-to-all exchange: every rank sends to every other, in rotation or all together, in chunks, all
posted at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message, Parcel, Sent
from mkernel.backends.accelerators.streams.schedule import ExchangeSchedule, RotatingSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import LaunchPlan


def chunks(rows: int, step: int) -> list[tuple[int, int]]:
    """Return [start, end) of each chunk of ``step`` rows; empty if there are no rows."""
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def share(rows: int, world: int, rank: int) -> tuple[int, int]:
    """Return [start, end) of a rank's rows: as even as possible, with one more for the first ranks."""
    each, more = divmod(rows, world)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def rotation(plan: LaunchPlan, rank: int) -> tuple[tuple[int, int], ...]:
    """Return (source to consume from, rank that consumes from here) in each step of the plan's
    order, own rows left out.

    The order is a rotation: in every step each rank has one partner on either side, so messages
    that all ranks post step by step always match.
    """
    order = plan.order(plan.part(RotatingSchedule).order)
    return tuple(zip(order[rank][1:], order.consumers(rank)[1:], strict=True))


Among = Literal["world", "node", "place"]
"""The ranks of an exchange: all, those of the own node, or those in the own place of every node."""


def _pairs(plan: LaunchPlan, rank: int, among: Among) -> tuple[tuple[int, int], ...]:
    """Return those of the rotation whose source is among these; the consumer then is one too."""
    found, each = rotation(plan, rank), plan.ranks_per_node
    if among == "node":
        return tuple(pair for pair in found if pair[0] // each == rank // each)
    return tuple(pair for pair in found if among == "world" or pair[0] % each == rank % each)


Part = tuple[int, int, torch.Tensor]
"""(peer, number of the first row, rows)."""
Arrivals = list[tuple[int, int, int, Message]]
"""(source, first row, end row, message), in the order in which they are to be consumed."""


def exchange(
    call: Call,
    streams: CallStreams,
    outgoing: Callable[[int], torch.Tensor],
    incoming: Callable[[int], torch.Tensor],
    among: Among = "world",
) -> Arrivals:
    """Post all messages of one exchange; in a sequential view they have arrived on return.

    Args:
        outgoing: returns the rows for a rank, contiguous.
        incoming: returns the tensor that receives the rows of a rank, contiguous. If the streams
            are one-sided, it is a place of a landing, for this rank too.
        among: the ranks that take part.

    A chunk has the plan's number of rows; both ends must know the number of rows.
    """
    arrivals: Arrivals = []
    if not streams.communicates:
        return arrivals
    pairs = _pairs(call.plan, call.rank, among)
    how = call.plan.part(ExchangeSchedule)
    step = how.rows_per_chunk
    nothing: list[Part] = []
    landing = incoming(call.rank) if streams.one_sided else None
    for together in (pairs,) if how.peers_together else [(pair,) for pair in pairs]:
        sends = _rounds([(target, outgoing(target)) for _, target in together], step)
        places = _rounds([(source, incoming(source)) for source, _ in together], step)
        for number, (there, here) in enumerate(zip_longest(sends, places, fillvalue=nothing)):
            message = streams.post(
                [
                    Sent(target, rows, None if landing is None else landing[at : at + len(rows)])
                    for target, at, rows in there
                ],
                [(source, rows) for source, _, rows in here],
                number,
            )
            arrivals += [(source, at, at + len(rows), message) for source, at, rows in here]
    if streams.sequential:
        streams.finish()
    return arrivals


def take(
    streams: CallStreams,
    arrivals: Arrivals,
    landed: Sequence[torch.Tensor] | torch.Tensor,
    places: Sequence[torch.Tensor] | torch.Tensor,
) -> None:
    """Copy each source's rows, as they arrive, from their landing to their final place."""
    for source, start, end, message in arrivals:
        streams.wait(message)
        with streams.compute():
            places[source][start:end] = landed[source][start:end]


def _rounds(parcels: Sequence[Parcel], step: int) -> list[list[Part]]:
    """Return every parcel's first chunk of ``step`` rows, then every parcel's second, ..."""
    cut = [
        [(peer, start, rows[start:end]) for start, end in chunks(len(rows), step)]
        for peer, rows in parcels
    ]
    return [[part for part in parts if part is not None] for parts in zip_longest(*cut)]
