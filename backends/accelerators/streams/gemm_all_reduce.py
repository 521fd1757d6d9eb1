"""GEMM+AllReduce: as GEMM+ReduceScatter; then the owners send their rows, rounded, to every rank.

Rows are rounded once, by their owner, so every rank holds the same bits. M needs not divide by W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.exchange import exchange
from mkernel.backends.accelerators.streams.lanes import Lanes
from mkernel.backends.accelerators.streams.partials import reduced
from mkernel.backends.accelerators.streams.rows import share
from mkernel.backends.base import Call


def run(call: Call, lanes: Lanes) -> Mapping[str, Any]:
    """Fills ``out``."""
    out, world = call.tensors["out"], call.plan.world_size
    shares = [share(call.plan.gemm.m, world, rank) for rank in range(world)]
    own = out[slice(*shares[call.rank])]
    reduced(call, lanes, shares, own)
    if not lanes.one_sided:
        exchange(call, lanes, lambda target: own, lambda source: out[slice(*shares[source])])
        lanes.finish()
        return {}
    # Others can write to nothing but a landing.
    landing = lanes.landing("results")
    results = [landing[rank, : end - start] for rank, (start, end) in enumerate(shares)]
    arrivals = exchange(call, lanes, lambda target: own, results.__getitem__)
    for source, start, end, message in arrivals:
        lanes.wait(message)
        with lanes.compute():
            out[slice(*shares[source])][start:end] = results[source][start:end]
    return {}
