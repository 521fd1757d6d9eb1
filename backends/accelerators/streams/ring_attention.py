"""Ring attention: keys and values go round the ring, one rank's block a step.

In each step a rank passes the block it has on to the next rank, and attends to it while the next
block travels. Blocks are taken in the order own, previous rank's, the one before it, …: fixed, so
results are deterministic. Causal: positions are cut in 2·W pieces and rank r holds pieces r and
2·W - 1 - r; a pair of pieces with the keys' above the queries' is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message, Sent
from mkernel.backends.accelerators.streams.online_softmax import OnlineSoftmax
from mkernel.backends.accelerators.streams.rows import chunks
from mkernel.backends.accelerators.streams.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import AttentionShape


@dataclass(frozen=True)
class Cell:
    """Keys and values [2, B, Hkv, c, D] from position ``start`` of the ``slot``-th piece on."""

    slot: int
    start: int
    kv: torch.Tensor


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out`` and ``lse``."""
    q, out, lse = (call.tensors[name] for name in ("q", "out", "lse"))
    how = call.plan.part(AttentionSchedule)
    with streams.compute():
        queries = [
            OnlineSoftmax(piece, call.options["scale"], how.keys_at_once)
            for piece in pieces(call, q)
        ]
        own = own_cells(call)
    steps = blocks(call, streams, own)
    if streams.sequential:
        steps = iter(list(steps))
    for source, cells in steps:
        with streams.compute():
            for i, cell, first_row in meetings(call, source, cells):
                k, v = cells[cell].kv
                queries[i].see(k, v, first_row)
    with streams.compute():
        for query, results, sums in zip(queries, pieces(call, out), pieces(call, lse), strict=True):
            attended, log_sums = query.result()
            results.copy_(attended)
            sums.copy_(log_sums)
    return {}


def held(call: Call) -> int:
    """How many pieces of the sequence a rank has."""
    if not isinstance(call.plan.shape, AttentionShape):
        raise TypeError(f"a plan of {call.plan.op} has no attention shape")
    return 2 if call.plan.shape.causal else 1


def pieces(call: Call, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [B, Hkv, G, P, ...] of each piece's queries, or of what there is of each query."""
    batch, heads, rows, *width = queries.shape
    groups, count = call.tensors["k"].shape[1], held(call)
    grouped = queries.view(batch, groups, heads // groups, count, rows // count, *width)
    return grouped.unbind(3)


def own_cells(call: Call) -> list[Cell]:
    """A rank's keys and values, cut as they travel."""
    k, v, count = call.tensors["k"], call.tensors["v"], held(call)
    rows = k.shape[2] // count
    return [
        Cell(slot, start, torch.stack([each[:, :, slot * rows :][:, :, start:end]
                                       for each in (k, v)]))
        for slot in range(count)
        for start, end in chunks(rows, call.plan.part(AttentionSchedule).rows_per_chunk)
    ]  # fmt: skip


def meetings(
    call: Call, source: int, cells: Sequence[Cell]
) -> Iterator[tuple[int, int, int | None]]:
    """(piece of queries here, cell, first row) of what meets of a rank's cells: the cell's key i is
    seen by rows from ``first row + i`` on; None: by all."""
    world, count = call.plan.world_size, held(call)
    for number, cell in enumerate(cells):
        for i in range(count):
            gap = (
                1 if count == 1 else _piece(call.rank, i, world) - _piece(source, cell.slot, world)
            )
            if gap >= 0:
                yield i, number, None if gap else cell.start


def _piece(rank: int, slot: int, world: int) -> int:
    return 2 * world - 1 - rank if slot else rank


def blocks(call: Call, streams: CallStreams, cells: list[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """(whose, cells) of each step, passed on before they are handed out."""
    rank, world = call.rank, call.plan.world_size
    for step in range(world):
        passed, messages = cells, list[Message]()
        if streams.communicates and step < world - 1:
            passed = [Cell(c.slot, c.start, torch.empty_like(c.kv)) for c in cells]
            messages = pass_on(call, streams, [c.kv for c in cells], [c.kv for c in passed])
        yield (rank - step) % world, cells
        for message in messages:
            streams.wait(message)
        cells = passed


def pass_on(
    call: Call, streams: CallStreams, own: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
) -> list[Message]:
    """Start to send tensors to the next rank, and to get as many from the one before."""
    rank, world = call.rank, call.plan.world_size
    return [
        streams.post([Sent((rank + 1) % world, one, None)], [((rank - 1) % world, place)], number)
        for number, (one, place) in enumerate(zip(own, places, strict=True))
    ]
