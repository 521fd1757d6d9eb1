"""A rank that is killed while the others' devices wait for it, and what the others make of it."""

from __future__ import annotations

import multiprocessing
import queue
from contextlib import suppress
from typing import Any

import hopper_ranks
from hopper_ranks import Shape

from mkernel.launch import host_store

VICTIM = 1


def judge_survivors(accelerator: str, shape: Shape, world: int) -> None:
    """Every other rank raises PeerFailure in time; its CUDA context works, and the next world in its
    process, too."""
    stores = [host_store(world, 30) for _ in range(2)]
    ports = tuple(port for _, port in stores)
    context = multiprocessing.get_context("forkserver")
    told: Any = context.Queue()
    processes = [
        context.Process(
            target=hopper_ranks.survive,
            args=(rank, world, VICTIM, ports, shape, told, accelerator),
            daemon=True,
        )
        for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        with suppress(queue.Empty):
            for _ in range(world - 1):
                rank, *rest = told.get(timeout=60)
                found[rank] = rest
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        del stores
    assert sorted(found) == [rank for rank in range(world) if rank != VICTIM]
    for kind, seconds, alive, failures in found.values():
        assert kind.startswith("PeerFailure")
        assert f"rank {VICTIM}" in kind
        assert seconds < 20
        assert alive == 8
        assert failures == []
