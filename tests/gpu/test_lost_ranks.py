"""A rank that is killed, or does not come, while other ranks wait for it, in every kind of call."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hopper_ranks
import norm_ranks
import pytest
from attention_ranks import Attention
from device_buffers import takes_ranks
from families import BOUNDED, BY_KERNEL, PATH, ROWS, SCATTERED, SUMS
from hopper_ranks import OPS, Shape
from in_world import DEADLINE_S, TOLD_S
from test_fp8_on_gpus import fused, library
from test_hopper_nodes import ATTENTION, EXPERTS, NICS, direct
from test_parts_on_gpus import parts

import mkernel
from mkernel.errors import Timeout
from mkernel.launch import host_store

pytestmark = pytest.mark.usefixtures("leaves_nothing")

VICTIM = 1
ABSENT_S = 3.0
"""The deadline of ranks that wait for one that stays away."""


@dataclass(frozen=True)
class Lost:
    """Calls of one way: to which a rank does not come, and in which one is killed. ``everywhere``: few
    rows are left to their kernel wherever it fits."""

    absent: Any
    killed: Any
    environment: Mapping[str, str] = field(default_factory=dict)
    everywhere: bool = False
    accelerator: str = "hopper"
    nodes: int = 1
    marks: tuple[pytest.MarkDecorator, ...] = ()


def same(shape: Any) -> Lost:
    """One shape for both."""
    return Lost(shape, shape)


def between_nodes(nic: str, route: str, absent: Any, killed: Any) -> Lost:
    """Each rank is a node of its own."""
    environment = {
        "MKERNEL_NIC": nic,
        "MKERNEL_VERBS": "soft",
        "MKERNEL_NIC_SETTINGS__GPUDIRECT": str(int(route == "direct")),
    }
    marks = (direct, pytest.mark.alone) if route == "direct" else ()
    return Lost(absent, killed, environment, nodes=2, marks=marks)


def usual(op: str, rows: int) -> Shape:
    return Shape(op, rows, 512, 512)


LOST = {
    **{
        f"{path}-{op}": Lost(usual(op, 1024), None, {PATH: path})
        for path in ("fused", "library") for op in OPS
    },
    **{op: Lost(None, usual(op, 1536)) for op in OPS},
    "sums": Lost(ROWS[0], ROWS[1]),
    "few-rows-sums": Lost(SUMS[1], SUMS[2], {PATH: "fused"}, everywhere=True),
    "few-rows-scattered": Lost(SCATTERED[1], SCATTERED[2], {PATH: "fused"}, everywhere=True),
    **{f"e4m3-{op}": same(fused(op, 2048, 512, 1024)) for op in OPS},
    **{f"e4m3-library-{op}": same(library(op, 2048, 512, 1024, chunk=512)) for op in OPS},
    **{f"parts-{op}": same(parts(op, 2048, 512, 1024, 512)) for op in OPS},
    "attention": Lost(Attention(1, 4, 2, 128, causal=True), Attention(1, 4, 2, 256)),
    "attention-kernel": Lost(replace(BY_KERNEL[0], rows=512), replace(BY_KERNEL[3], batch=1)),
    "experts": Lost(None, replace(BOUNDED[0], capacity=0)),
    **{  # with one hardware queue, a wait on a stream holds up all other streams
        f"streams-{queues}-{op}": Lost(
            usual(op, 1024), usual(op, 1536), {"CUDA_DEVICE_MAX_CONNECTIONS": queues},
            accelerator="streams",
        )
        for queues in ("1", "8") for op in OPS
    },
    # The op that has all ways in it stands for the others where the NIC writes into device memory.
    **{
        f"{nic}-{route}-{op}": between_nodes(nic, route, usual(op, 1024), usual(op, 1536))
        for nic in NICS for op, route in (*((op, "staged") for op in OPS), (OPS[-1], "direct"))
    },
    **{
        f"{nic}-{what}": between_nodes(nic, "staged", None, shape)
        for nic in NICS
        for what, shape in (("attention", ATTENTION[0]), ("experts", EXPERTS[0]))
    },
}  # fmt: skip


def every(kind: str) -> Iterator[Any]:
    """Those that lose a rank so, in worlds of two ranks, and on one node of four."""
    for name, lost in LOST.items():
        for world in (2, 4) if lost.nodes == 1 else (2,):
            if getattr(lost, kind) is not None:
                marks = takes_ranks(world), *lost.marks
                yield pytest.param(lost, world, id=f"{name}-{world}", marks=marks)


@pytest.fixture(autouse=True)
def _environment(lost: Lost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in lost.environment.items():
        monkeypatch.setenv(name, value)
    if lost.everywhere:
        constants = norm_ranks.everywhere(tmp_path / "constants.json")
        monkeypatch.setenv("MKERNEL_CONSTANTS", str(constants))


@pytest.mark.parametrize(("lost", "world"), [*every("killed")])
def test_a_rank_killed_while_kernels_wait_for_it(lost: Lost, world: int) -> None:
    """Every other rank raises PeerFailure in time; its CUDA context works, and the next world in its
    process, too."""
    stores = [host_store(world, DEADLINE_S) for _ in range(2)]
    ports = tuple(port for _, port in stores)
    context = multiprocessing.get_context("forkserver")
    told: Any = context.Queue()
    processes = [
        context.Process(
            target=hopper_ranks.survive,
            args=(
                rank, world, VICTIM, ports, lost.killed, told, lost.accelerator, dict(os.environ),
                lost.nodes,
            ),
            daemon=True,
        )
        for rank in range(world)
    ]  # fmt: skip
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


@pytest.mark.parametrize(("lost", "world"), [*every("absent")])
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(lost: Lost, world: int) -> None:
    """The last rank stays away from a call until its world is broken. Every other rank raises Timeout
    at its deadline and says who waited for what; its CUDA context works."""
    victim = world - 1
    told: dict[int, Any] = {}
    with pytest.raises(Timeout):
        mkernel.launch(
            hopper_ranks.absent, lost.absent, victim, ABSENT_S,
            nodes=lost.nodes, ranks_per_node=world // lost.nodes, accelerator=lost.accelerator,
            timeout_s=DEADLINE_S, on_report=told.__setitem__,
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
