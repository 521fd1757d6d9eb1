"""Backward of ring attention: keys and values go round the ring again, and their gradients follow them.

In each step a rank passes the block it has on, adds what its queries give to the block's gradients, and
passes these on too: a rank's gradients are home when its block has been everywhere. They are summed
in float32 in the order in which the block comes by, and rounded once, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mkernel.backends.accelerators.streams.attention_gradient import AttentionGradient
from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message
from mkernel.backends.accelerators.streams.ring_attention import (
    blocks,
    held,
    meetings,
    own_cells,
    pass_on,
    pieces,
)
from mkernel.backends.accelerators.streams.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``grad_q``, ``grad_k`` and ``grad_v``."""
    with streams.compute():
        queries, own = _queries(call), own_cells(call)
        sums = [torch.zeros_like(cell.kv, dtype=call.tensors["lse"].dtype) for cell in own]
    coming: list[Message] = []
    for source, cells in blocks(call, streams, own):
        for message in coming:
            streams.wait(message)
        with streams.compute():
            for i, cell, first_row in meetings(call, source, cells):
                k, v = cells[cell].kv
                of_k, of_v = sums[cell]
                queries[i].see(k, v, of_k, of_v, first_row)
        if streams.communicates and call.plan.world_size > 1:
            places = [torch.empty_like(each) for each in sums]
            coming = pass_on(call, streams, sums, places)
            sums = places
    for message in coming:
        streams.wait(message)
    with streams.compute():
        for piece, query in zip(pieces(call, call.tensors["grad_q"]), queries, strict=True):
            piece.copy_(query.result())
        rows = call.tensors["k"].shape[2] // held(call)
        for block, both in zip(own, sums, strict=True):
            first = block.slot * rows + block.start
            for name, gradient in zip(("grad_k", "grad_v"), both, strict=True):
                call.tensors[name][:, :, first : first + both.shape[3]] = gradient
    return {}


def _queries(call: Call) -> list[AttentionGradient]:
    """Those of each piece that this rank has."""
    given = {
        name: pieces(call, call.tensors[name])
        for name in ("q", "out", "lse", "grad_out", "grad_lse")
        if name in call.tensors
    }
    return [
        AttentionGradient(
            given["q"][i],
            given["out"][i],
            given["lse"][i],
            given["grad_out"][i],
            given["grad_lse"][i] if "grad_lse" in given else None,
            scale=call.options["scale"],
            keys_at_once=call.plan.part(AttentionSchedule).keys_at_once,
        )
        for i in range(held(call))
    ]
