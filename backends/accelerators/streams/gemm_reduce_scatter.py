"""GEMM+ReduceScatter: partial sums of a @ b go to the owners of their rows, who add them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkernel.backends.accelerators.streams.call_streams import CallStreams
from mkernel.backends.accelerators.streams.partials import reduced
from mkernel.backends.accelerators.streams.rows import share
from mkernel.backends.contracts.accelerator import Call


def run(call: Call, streams: CallStreams) -> Mapping[str, Any]:
    """Fills ``out``, this rank's M/W rows."""
    world = call.plan.world_size
    shares = [share(call.plan.gemm.m, world, rank) for rank in range(world)]
    reduced(call, streams, shares, call.tensors["out"])
    return {}
