"""Ring attention: keys and values go round the ring, one rank's block a step.

In each step a rank passes the block it has on to the next rank, and attends to it while the next
block travels. Blocks are taken in the order own, previous rank's, the one before it, …: fixed, so
results are deterministic. Causal: positions are cut in 2·W pieces and rank r holds pieces r and
2·W - 1 - r; a pair of pieces with the keys' above the queries' is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Sent
from mkernel.backends.accelerators.streams.online_softmax import OnlineSoftmax
from mkernel.backends.accelerators.streams.rows import chunks
from mkernel.backends.accelerators.streams.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import AttentionShape


@dataclass(frozen=True)
class _Cell:
    """Keys and values [2, B, Hkv, c, D] from position ``start`` of the ``slot``-th piece on."""

    slot: int
    start: int
    kv: torch.Tensor


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out`` and ``lse``."""
    q, k, v, out, lse = (call.tensors[name] for name in ("q", "k", "v", "out", "lse"))
    shape, world = call.plan.shape, call.plan.world_size
    if not isinstance(shape, AttentionShape):
        raise TypeError(f"a plan of {call.plan.op} has no attention shape")
    how = call.plan.part(AttentionSchedule)
    held = 2 if shape.causal else 1
    rows = q.shape[2] // held  # of a piece

    with streams.compute():
        grouped = q.view(q.shape[0], k.shape[1], -1, held, rows, q.shape[3])
        queries = [
            OnlineSoftmax(grouped[:, :, :, i], call.options["scale"], how.keys_at_once)
            for i in range(held)
        ]
        own = [
            _Cell(slot, start, torch.stack([each[:, :, slot * rows :][:, :, start:end]
                                            for each in (k, v)]))
            for slot in range(held)
            for start, end in chunks(rows, how.rows_per_chunk)
        ]  # fmt: skip
    blocks = _blocks(call, streams, own)
    if streams.sequential:
        blocks = iter(list(blocks))
    for source, cells in blocks:
        with streams.compute():
            for cell in cells:
                for i, query in enumerate(queries):
                    gap = 0
                    if shape.causal:
                        gap = _piece(call.rank, i, world) - _piece(source, cell.slot, world)
                    if gap >= 0:
                        masked = shape.causal and gap == 0
                        query.see(cell.kv[0], cell.kv[1], cell.start if masked else None)
    with streams.compute():
        results = out.view(grouped.shape)
        sums = lse.view(grouped.shape[:5])
        for i, query in enumerate(queries):
            results[:, :, :, i], sums[:, :, :, i] = query.result()
    return {}


def _piece(rank: int, slot: int, world: int) -> int:
    return 2 * world - 1 - rank if slot else rank


def _blocks(
    call: Call, streams: CallStreams, cells: list[_Cell]
) -> Iterator[tuple[int, list[_Cell]]]:
    """(whose, cells) of each step, passed on before they are handed out."""
    rank, world = call.rank, call.plan.world_size
    for step in range(world):
        passed = cells
        messages = []
        if streams.communicates and step < world - 1:
            passed = [_Cell(c.slot, c.start, torch.empty_like(c.kv)) for c in cells]
            messages = [
                streams.post(
                    [Sent((rank + 1) % world, cell.kv, None)],
                    [((rank - 1) % world, place.kv)],
                    number,
                )
                for number, (cell, place) in enumerate(zip(cells, passed, strict=True))
            ]
        yield (rank - step) % world, cells
        for message in messages:
            streams.wait(message)
        cells = passed
