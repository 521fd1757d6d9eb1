"""Ring attention: keys and values go round the ring, one rank's block per step.

In each step a rank passes its current block on to the next rank, and attends to it while the next
block travels. Blocks are taken in the fixed order own, previous rank's, the one before it, …, so
results are deterministic. Causal: positions are cut into 2·W pieces and rank r holds pieces r and
2·W - 1 - r. So attention on the own keys is plainly causal; all queries see the first half of an
earlier rank's keys; the second half of the queries sees all of a later rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mkernel.backends.accelerators.streams import invariant_attention
from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message, Sent
from mkernel.backends.accelerators.streams.exchange import chunks
from mkernel.backends.accelerators.streams.merged_attention import MergedAttention
from mkernel.backends.accelerators.streams.schedule import AttentionSchedule
from mkernel.backends.accelerators.streams.torch_attention import attend, compute_dtype
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import AttentionShape
from mkernel.plan.shapes import checked_boundaries


class Part(NamedTuple):
    """Rows of the own queries that attend to rows of a rank's keys. ``causal``: the i-th of these
    queries sees the first i + 1 keys; otherwise each sees all of them."""

    queries: slice
    keys: slice
    causal: bool


class Queries(NamedTuple):
    """A call's queries in the form used for parts: scores are ``scale`` > 0 times their products
    with keys, and ``q`` is ``sign`` times the caller's."""

    q: Tensor
    scale: float
    sign: int


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``out`` and ``lse``."""
    if call.plan.invariant is not None:
        _invariant(call, streams)
        return {}
    with streams.compute():
        q, scale, _ = queries(call)
        documents = boundaries(call)
        merged = MergedAttention(call.tensors["out"], call.tensors["lse"])
    steps = blocks(call, streams)
    if streams.sequential:
        steps = iter(list(steps))
    for source, k, v in steps:
        with streams.compute():
            for part in parts(call, source, documents):
                seen = attend(
                    q[:, :, part.queries],
                    k[:, :, part.keys].to(q.dtype),
                    v[:, :, part.keys].to(q.dtype),
                    causal=part.causal,
                    scale=scale,
                )
                merged.add(part.queries, seen)
    with streams.compute():
        merged.finish()
    return {}


def _invariant(call: Call, streams: CallStreams) -> None:
    """Fill ``out`` and ``lse`` by tiles. All keys travel before the first row is computed."""
    sizes = shape(call)
    with streams.compute():
        documents = boundaries(call) or (0, sizes.sequence)
    steps = list(blocks(call, streams))
    with streams.compute():
        k, v = (_whole(call, [(source, each[at]) for source, *each in steps]) for at in range(2))
        q, scale = call.tensors["q"], float(call.options["scale"])
        at = torch.cat(
            [
                torch.arange(position, position + length, device=q.device)
                for _, position, length in pieces(call, call.rank)
            ]
        )
        for begin, end in pairwise(documents):
            mine = ((at >= begin) & (at < end)).nonzero().flatten()
            if not len(mine):
                continue
            last = at[mine] - begin if sizes.causal else torch.full_like(mine, end - begin - 1)
            for batch in range(sizes.batch):
                for head in range(sizes.kv_heads):
                    keys, values = (each[batch, head, begin:end] for each in (k, v))
                    heads = slice(*(sizes.heads // sizes.kv_heads * n for n in (head, head + 1)))
                    rows = q[batch, heads][:, mine].float() * scale
                    found = invariant_attention.attend(
                        rows.flatten(0, 1), last.repeat(len(rows)), keys, values
                    )
                    for name, each in zip(("out", "lse"), found, strict=True):
                        place = call.tensors[name][batch, heads]
                        place[:, mine] = each.view(rows.shape[:2] + each.shape[1:]).to(place.dtype)


def _whole(call: Call, parts: list[tuple[int, Tensor]]) -> Tensor:
    """Return the ranks' keys, or values, [B, Hkv, S, D] in the order of positions, in float32."""
    batch, heads, rows, width = parts[0][1].shape
    size = (batch, heads, rows * call.plan.world_size, width)
    whole = parts[0][1].new_empty(size, dtype=torch.float32)
    for source, part in parts:
        for row, position, length in pieces(call, source):
            whole[:, :, position : position + length] = part[:, :, row : row + length]
    return whole


def shape(call: Call) -> AttentionShape:
    """Return the plan's attention shape. TypeError for another op's plan."""
    if not isinstance(call.plan.shape, AttentionShape):
        raise TypeError(f"a plan of {call.plan.op} has no attention shape")
    return call.plan.shape


def queries(call: Call) -> Queries:
    """Return the queries with a positive scale: kernels take the largest score before they scale."""
    q, scale = call.tensors["q"], float(call.options["scale"])
    q, sign = q.to(compute_dtype(q)), (scale > 0) - (scale < 0)
    return Queries(q if sign == 1 else q * sign, abs(scale) or 1.0, sign)


def boundaries(call: Call) -> Sequence[int] | None:
    """Return the start of each document packed into the sequence, and the sequence's end. None:
    there are no documents.

    ArgumentError: the values are no such boundaries.
    """
    if not shape(call).documents:
        return None
    return checked_boundaries(call.tensors["cu_seqlens"].tolist(), shape(call).sequence)


def parts(call: Call, source: int, documents: Sequence[int] | None) -> Iterator[Part]:
    """Yield the parts of a rank's keys that the own queries attend to."""
    if documents is not None:
        yield from _parts_of_documents(call, source, documents)
        return
    rows, half = call.tensors["q"].shape[2], call.tensors["q"].shape[2] // 2
    everything = slice(0, rows)
    if not shape(call).causal or source == call.rank:
        yield Part(everything, everything, shape(call).causal)
    elif source < call.rank:
        yield Part(everything, slice(0, half), False)
    else:
        yield Part(slice(half, rows), everything, False)


def _parts_of_documents(call: Call, source: int, documents: Sequence[int]) -> Iterator[Part]:
    """Yield each piece of the sequence of the own queries with each piece of the keys, document by
    document. Two pieces are the same one, or have no position in common."""
    causal = shape(call).causal
    for queries_at, queries_from, length in pieces(call, call.rank):
        for keys_at, keys_from, _ in pieces(call, source):
            if causal and keys_from > queries_from:
                continue
            for begin, end in pairwise(documents):
                queries = _overlap(begin - queries_from, end - queries_from, length, queries_at)
                keys = _overlap(begin - keys_from, end - keys_from, length, keys_at)
                if queries is not None and keys is not None:
                    yield Part(queries, keys, causal and keys_from == queries_from)


def pieces(call: Call, rank: int) -> list[tuple[int, int, int]]:
    """Return the first row, the first position and the length of each piece that a rank has."""
    world, rows = call.plan.world_size, call.tensors["q"].shape[2]
    if not shape(call).causal:
        return [(0, rank * rows, rows)]
    half = rows // 2
    return [(0, rank * half, half), (half, (2 * world - 1 - rank) * half, half)]


def _overlap(begin: int, end: int, length: int, at: int) -> slice | None:
    """Return the rows of a piece that hold the positions ``begin`` to ``end``; ``at`` is the
    piece's first row."""
    begin, end = max(begin, 0), min(end, length)
    return slice(at + begin, at + end) if begin < end else None


def blocks(call: Call, streams: CallStreams) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, k, v) of each step, passed on before they are yielded. The own ones, which come
    first, are the caller's tensors."""
    rank, world = call.rank, call.plan.world_size
    k, v = call.tensors["k"], call.tensors["v"]
    if world == 1:
        yield rank, k, v
        return
    with streams.compute():
        block = packed(k, v, k.dtype)
    for step in range(world):
        passed, messages = block, list[Message]()
        if streams.communicates and step < world - 1:
            passed = torch.empty_like(block)
            messages = pass_on(call, streams, block, passed)
        yield (
            ((rank - step) % world, k, v)
            if step == 0
            else (
                (rank - step) % world,
                *unpacked(block),
            )
        )
        for message in messages:
            streams.wait(message)
        block = passed


def packed(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack keys and values as they travel, [S/W, 2, B, Hkv, D]: positions are outermost, so that a
    chunk of them is one message."""
    batch, heads, rows, width = k.shape
    block = k.new_empty((rows, 2, batch, heads, width), dtype=dtype)
    for place, each in zip(unpacked(block), (k, v), strict=True):
        place.copy_(each)
    return block


def unpacked(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return views [B, Hkv, S/W, D] of a block's keys and values."""
    k, v = block.permute(1, 2, 3, 0, 4)
    return k, v


def pass_on(call: Call, streams: CallStreams, own: Tensor, place: Tensor) -> list[Message]:
    """Start to send a block to the next rank, and to receive one from the previous rank, in chunks."""
    rank, world = call.rank, call.plan.world_size
    return [
        streams.post(
            [Sent((rank + 1) % world, own[start:end], None)],
            [((rank - 1) % world, place[start:end])],
            number,
        )
        for number, (start, end) in enumerate(
            chunks(len(own), call.plan.part(AttentionSchedule).rows_per_chunk)
        )
    ]
