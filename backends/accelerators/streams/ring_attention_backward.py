"""Backward of ring attention: keys and values go round the ring again, and their gradients follow
them.

In each step a rank passes its current block on, adds its queries' contribution to the block's
gradients, and passes these on too: a rank's gradients have returned when its block has visited
every rank. They are summed in float32 in the order in which the block passes the ranks, and rounded
once, so results are deterministic if the kernels that attend to parts are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message
from mkernel.backends.accelerators.streams.ring_attention import (
    Part,
    blocks,
    boundaries,
    parts,
    pass_on,
    queries,
    unpacked,
)
from mkernel.backends.accelerators.streams.torch_attention import gradients
from mkernel.backends.contracts.accelerator import Call

_MORE = 8
"""Columns added to the width of a head for a gradient of the log-sum-exp; a multiple that keeps
rows aligned."""


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fill ``grad_q``, ``grad_k`` and ``grad_v``."""
    tensors = call.tensors
    lse = tensors["lse"]
    batch, kv_heads, rows, width = tensors["k"].shape
    with streams.compute():
        seeing, documents = _Queries.of(call), boundaries(call)
        of_q = torch.zeros_like(tensors["q"], dtype=lse.dtype)
        sums = lse.new_zeros(rows, 2, batch, kv_heads, width)
    coming: list[Message] = []
    for source, k, v in blocks(call, streams):
        for message in coming:
            streams.wait(message)
        with streams.compute():
            of_k, of_v = unpacked(sums)
            for part in parts(call, source, documents):
                found = seeing.gradients(part, k[:, :, part.keys], v[:, :, part.keys])
                of_q[:, :, part.queries] += found[0]
                of_k[:, :, part.keys] += found[1]
                of_v[:, :, part.keys] += found[2]
        if streams.communicates and call.plan.world_size > 1:
            place = torch.empty_like(sums)
            coming = pass_on(call, streams, sums, place)
            sums = place
    for message in coming:
        streams.wait(message)
    with streams.compute():
        tensors["grad_q"].copy_(of_q if seeing.sign == 1 else of_q.mul_(seeing.sign))
        for name, each in zip(("grad_k", "grad_v"), unpacked(sums), strict=True):
            tensors[name].copy_(each)
    return {}


class _Queries(NamedTuple):
    """The data kept from a call: each query, its result over all keys, and the gradient of that
    result.

    Kernels know no gradient of the log-sum-exp. If there is one, all tensors have more columns,
    from which kernels compute it: sum(dO·O) becomes (dO, 1)·(O, -dlse), while (dO, 1)·(v, 0) is
    dO·v as before, so the gradient of a score is p·(dO vᵀ - sum(dO·O) + dlse). ``width``: the width
    without these columns.
    """

    q: Tensor
    out: Tensor
    of_out: Tensor
    lse: Tensor
    scale: float
    sign: int
    width: int
    widened: bool

    @classmethod
    def of(cls, call: Call) -> _Queries:
        tensors, (q, scale, sign) = call.tensors, queries(call)
        out, of_out = (tensors[name].to(q.dtype) for name in ("out", "grad_out"))
        width, widened = q.shape[3], "grad_lse" in tensors
        if widened:
            q, out, of_out = (_wider(each) for each in (q, out, of_out))
            of_out[..., width] = 1
            out[..., width] = -tensors["grad_lse"]
        return cls(q, out, of_out, tensors["lse"], scale, sign, width, widened)

    def gradients(self, part: Part, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return the part's contributions to the gradients of q, k and v."""
        k, v = (each.to(self.q.dtype) for each in (k, v))
        if self.widened:
            k, v = _wider(k), _wider(v)
        q, out, of_out, lse = (
            each[:, :, part.queries] for each in (self.q, self.out, self.of_out, self.lse)
        )
        found = gradients(of_out, q, k, v, out, lse, causal=part.causal, scale=self.scale)
        return [each[..., : self.width] for each in found]


def _wider(each: Tensor) -> Tensor:
    return torch.nn.functional.pad(each, (0, _MORE))
