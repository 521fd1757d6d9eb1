"""Where the time of a modelled call goes."""

from __future__ import annotations

import numpy as np
import pytest

from mkernel import api
from mkernel.backends.accelerators.ascend.explain import Explanation, explain
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.accelerators.ascend.trace import (
    Kind,
    Pipe,
    Role,
    blob,
    communication,
    cores,
    instruction,
)
from mkernel.harness import timeline
from mkernel.plan.shapes import sizes_or_defaults

from .rig import A3, changed
from .rig import traces as recorded
from .test_views import OPS, traces

RANKS = 4


def explained(op: str) -> Explanation:
    return explain(traces(op, 1, RANKS), A3)


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_busy_for_longer_than_the_call(op: str) -> None:
    found = explained(op)
    assert found.pipelined_us == model(traces(op, 1, RANKS), A3, tracks=False).total_us
    assert 0 < found.communication_us <= found.pipelined_us
    for rank in found.ranks:
        assert set(rank.links) == set(range(RANKS)) - {rank.rank}
        shared = (rank.memory_us, rank.egress_us, rank.ingress_us, *rank.links.values())
        waited = (sum(times.values()) for times in rank.waits.values())
        for busy in (*rank.pipes.values(), *shared, *waited):
            assert 0 <= busy <= found.pipelined_us


def test_links_carry_what_the_op_sends() -> None:
    """AllGather: a shard of A to every other rank, and nothing else."""
    sizes = sizes_or_defaults("all_gather_gemm", {})
    plan = api.plan("all_gather_gemm", ranks_per_node=RANKS, accelerator="ascend", **sizes)
    item = 4 if plan.dtype == "float32" else 2
    shard = sizes["m"] // RANKS * sizes["k"] * item
    found = explain(recorded(plan), A3)
    for rank in found.ranks:
        for us in rank.links.values():
            assert us == pytest.approx(shard / A3.fabric.link_rate / 1e3)
        assert rank.egress_us == pytest.approx(3 * shard / A3.fabric.egress_rate / 1e3)
        assert rank.ingress_us == pytest.approx(rank.egress_us)


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "moe_dispatch_gemm"])
def test_communication_alone_does_not_depend_on_the_cube(op: str) -> None:
    slow = changed(cube={"startup_cycles": 10000}, pipes={"mte1_gbs": 1.0})
    found, then = (explain(traces(op, 1, RANKS), machine) for machine in (A3, slow))
    assert then.pipelined_us > 1.5 * found.pipelined_us
    assert then.communication_us == found.communication_us


def test_only_waits_for_compute_are_left_out() -> None:
    wait_for_compute = instruction(Kind.TWAIT, signal=1, amount=1)
    wait_for_comm = instruction(Kind.TWAIT, signal=2, amount=3, peer=1)
    raised = instruction(Kind.TNOTIFY, signal=2, amount=3)
    computed = instruction(Kind.TNOTIFY, signal=1, amount=1)
    work = instruction(Kind.TLOAD, Pipe.MTE2, amount=8)
    first = blob(
        0,
        2,
        [
            (Role.CUBE, computed),
            (Role.COMM, np.concatenate((wait_for_compute, work, wait_for_comm))),
        ],
    )
    second = blob(1, 2, [(Role.CUBE, work), (Role.COMM, raised)])
    ((role, kept),), ((_, other),) = map(cores, communication([first, second]))
    assert role == Role.COMM
    assert list(kept["kind"]) == [Kind.TLOAD, Kind.TWAIT]
    assert int(kept["signal"][1]) == 2
    assert list(other["kind"]) == [Kind.TNOTIFY]


def test_the_trace_shows_each_link() -> None:
    run = model(traces("all_gather_gemm", 1, RANKS), A3)
    assert len(run.links) == RANKS * (RANKS - 1)
    assert all(track in timeline.modelled([run]).pipes for track in run.links)
    found = explained("all_gather_gemm")
    for track in run.links:
        busy = sum(span.duration_us for span in track.spans)
        peer = int(track.name.split()[-1])
        assert found.ranks[track.rank].links[peer] <= busy * (1 + 1e-9) <= run.total_us
