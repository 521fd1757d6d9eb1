"""GEMM+AllReduce: as GEMM+ReduceScatter; then the owners send their rows, rounded, to every rank.

Rows are rounded once, by their owner, so every rank holds the same bits. M needs not divide by W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.exchange import exchange, take
from mkernel.backends.accelerators.streams.partials import reduced
from mkernel.backends.accelerators.streams.rows import share
from mkernel.backends.contracts.accelerator import Call


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out``."""
    out, world = call.tensors["out"], call.plan.world_size
    shares = [share(call.plan.gemm.m, world, rank) for rank in range(world)]
    places = [out[slice(*rows)] for rows in shares]
    own = places[call.rank]
    reduced(call, streams, shares, own)
    landed = places
    if streams.one_sided:  # others can write to nothing but a landing
        landed = [
            rows[: len(place)]
            for rows, place in zip(streams.landing("results"), places, strict=True)
        ]
    arrivals = exchange(call, streams, lambda target: own, landed.__getitem__)
    if landed is not places:
        take(streams, arrivals, landed, places)
    return {}
