"""Attention for several documents packed into one sequence, by FlashAttention's variable-length
kernel, which torch contains.

A document is consecutive positions, and a rank's positions of it are consecutive rows: in the
zigzag, a document that reaches both pieces of a rank is the last one of the first piece and the
first one of the second. So in each pair of parts documents meet pairwise, and the kernel needs only
their start offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.attention.ring import Source
from mkernel.backends.accelerators.cuda.attention.tuning import attention_shape
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import ArgumentError

_aten = torch.ops.aten


class Bounds(NamedTuple):
    """The start of each document in some rows, and the end of the last one: ``at`` [N + 1] int32 on
    the device. ``longest``: the most of these rows that a document has, or more."""

    at: Tensor
    longest: int


class Documents:
    """The documents of one call, in the rows of each rank."""

    def __init__(self, call: Call) -> None:
        """Compute the bounds in every piece. ArgumentError: boundaries that lie on the CPU, in a
        graph."""
        bounds, device = call.tensors["cu_seqlens"], call.tensors["q"].device
        shape, world = attention_shape(call.plan), call.plan.world_size
        self._rank, self._world, self._causal = call.rank, world, shape.causal
        pieces = world * (2 if shape.causal else 1)
        length = shape.sequence // pieces
        starts = torch.arange(0, shape.sequence, length, dtype=torch.int32, device=bounds.device)
        table = (bounds[None] - starts[:, None]).clamp_(0, length)
        if shape.causal:  # rows of ranks, after those of pieces
            table = torch.cat((table, table[:world] + table.flip(0)[:world]))
        self._longest = [length] * pieces + [shape.sequence // world] * (len(table) - pieces)
        if bounds.device != device and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("cu_seqlens", "on the CPU", "on the device, in a CUDA graph")
        if bounds.is_cpu:
            self._longest = table.diff(dim=1).amax(1).tolist()
        if bounds.device != device:
            table = table.pin_memory().to(device, non_blocking=True)
        self._table = table

    def queries(self, source: Source) -> Bounds:
        """Return the bounds in the own queries that see keys of the source's rank.

        If no document has more than one query and heads are grouped, the library treats a group's
        queries as one sequence, and then each document must have exactly one. So ``longest`` is at
        least 2.
        """
        last = source.first > 0
        at, longest = (
            self._piece(2 * self._world - 1 - self._rank) if last else self._of(self._rank)
        )
        return Bounds(at, max(longest, 2))

    def keys(self, source: Source) -> Bounds:
        """Return the bounds in the keys of the source's rank, as far as they are seen."""
        if self._causal and source.rank < self._rank:
            return self._piece(source.rank)
        return self._of(source.rank)

    def _of(self, rank: int) -> Bounds:
        return self._piece(2 * self._world + rank if self._causal else rank)

    def _piece(self, number: int) -> Bounds:
        return Bounds(self._table[number], self._longest[number])


def attend_packed(
    q: Tensor, source: Source, documents: Documents, causal: bool, scale: float
) -> Seen:
    """Attend the queries from ``source.first`` on to the source's keys of their own documents; in
    order if ``causal``. A query without such keys has the log-sum-exp -inf and the result 0."""
    queries, keys = documents.queries(source), documents.keys(source)
    found = [
        _aten._flash_attention_forward(
            *(each.transpose(0, 1) for each in one), queries.at, keys.at, queries.longest,
            keys.longest, 0.0, causal, False, scale=scale,
        )[:2]
        for one in zip(q[:, :, source.first :], source.k, source.v, strict=True)
    ]  # fmt: skip
    out, lse = (
        each[0][None] if len(found) == 1 else torch.stack(each) for each in zip(*found, strict=True)
    )
    # The library returns inf for a query without keys; for scores that are not finite, NaN.
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return Seen(out.transpose(1, 2), lse, source.first)
