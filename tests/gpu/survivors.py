"""A rank that is killed, or does not come, while the others' devices wait for it."""

from __future__ import annotations

import multiprocessing
import os
import queue
from contextlib import suppress
from typing import Any

import hopper_ranks
import pytest
from in_world import DEADLINE_S, TOLD_S

import mkernel
from mkernel.errors import Timeout
from mkernel.launch import host_store

VICTIM = 1
ABSENT_S = 3.0
"""The deadline of ranks that wait for one that stays away."""


def judge_survivors(accelerator: str, shape: Any, world: int, nodes: int = 1) -> None:
    """Every other rank raises PeerFailure in time; its CUDA context works, and the next world in its
    process, too."""
    stores = [host_store(world, DEADLINE_S) for _ in range(2)]
    ports = tuple(port for _, port in stores)
    context = multiprocessing.get_context("forkserver")
    told: Any = context.Queue()
    processes = [
        context.Process(
            target=hopper_ranks.survive,
            args=(rank, world, VICTIM, ports, shape, told, accelerator, dict(os.environ), nodes),
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
                rank, *rest = told.get(timeout=DEADLINE_S)
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
        assert seconds < TOLD_S
        assert alive == 8
        assert failures == []


def judge_absence(
    accelerator: str,
    shape: Any,
    world: int,
    nodes: int = 1,
    nic: str | None = None,
) -> None:
    """The last rank stays away from a call until its world is broken. Every other rank raises Timeout
    at its deadline and says who waited for what; its CUDA context works."""
    victim = world - 1
    told: dict[int, Any] = {}
    with pytest.raises(Timeout):
        mkernel.launch(
            hopper_ranks.absent, shape, victim, ABSENT_S,
            nodes=nodes, ranks_per_node=world // nodes, accelerator=accelerator,
            nic=nic, verbs="soft" if nic else None, timeout_s=DEADLINE_S,
            on_report=told.__setitem__,
        )  # fmt: skip
    assert sorted(told) == list(range(victim))
    for kind, seconds, message, alive in told.values():
        assert kind == "Timeout"
        assert 0.9 * ABSENT_S < seconds < TOLD_S
        # It names the rank itself, or one that waits for it.
        late = f"Rank {victim} is still in call 1"
        assert f"of rank {victim}" in message or late in message
        assert "signal" in message
        assert "chunk" in message
        assert alive == 8
