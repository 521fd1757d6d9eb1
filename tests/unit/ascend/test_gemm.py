"""The GEMM ops beside what the kit judges (results in all worlds, shapes, dtypes and views): bits,
what goes through the NIC, and planted faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mkernel.backends.transport._transport import AbortCode
from mkernel.plan.model import OpName
from mkernel.plan.pipeline import GemmTile

from .rig import (
    PATIENCE_S,
    REGION,
    World,
    geometry,
    make_plan,
    same_bits,
)

REDUCING: tuple[OpName, ...] = ("gemm_reduce_scatter", "gemm_all_reduce")
OPS: tuple[OpName, ...] = ("all_gather_gemm", *REDUCING)


@pytest.mark.parametrize("op", OPS)
def test_bits_depend_on_nothing_but_the_inputs(op: OpName) -> None:
    """The same whatever the cores, blocks, chunks, host threads and routes; every rank of an
    all-reduce has the same."""
    variants: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {}),
        (4, {"compute_blocks": 1, "comm_blocks": 1}),
        (3, {"compute_blocks": 5, "comm_blocks": 7}),
        (2, {"compute_blocks": 24, "comm_blocks": 2}),
        (2, {"tiles_per_chunk": 1}),
        (2, {"tiles_per_chunk": 3, "comm_blocks": 3}),
        (2, {"tiles_per_chunk": 64}),
        (2, {"tile": GemmTile(step_bytes=256, columns=128)}),
        (2, {"tile": GemmTile(rows=64, depth_bytes=256)}),
        (2, {"nodes": 2, "ranks_per_node": 2}),
        (2, {"nodes": 4, "ranks_per_node": 1}),
        (2, {"nodes": 2, "ranks_per_node": 2, "compute_blocks": 11, "comm_blocks": 22}),
    ]
    results = []
    for slots, options in variants:
        plan = make_plan(4 * 300, 520, 520, op=op, **{"ranks_per_node": 4, **options})
        with World(plan, slots=slots) as world:
            results.append(world.call(world.tensors(seed=11)))
    assert same_bits(results)
    if op == "gemm_all_reduce":
        assert all(torch.equal(results[0][0], out) for out in results[0])


def test_times() -> None:
    with World(make_plan(512, 512, 512, ranks_per_node=2)) as world:
        world.epoch = 1
        tensors = world.tensors(seed=5)
        launches = [world.launch(r, tensors[r], view="sequential") for r in range(2)]
        for launch in launches:
            assert launch.wait(PATIENCE_S)
            assert launch.times().seconds["comm"] > 0
            assert launch.times().seconds["compute"] > 0
            assert launch.trace() is None


def test_between_nodes_everything_goes_through_the_nic() -> None:
    """Exactly one put a chunk and rank of another node, all bytes of A, one release a call."""
    plan = make_plan(4 * 300, 256, 1000, nodes=2, ranks_per_node=2, tiles_per_chunk=3)
    shape = geometry(plan)
    with World(plan) as world:
        world.check()
        for source in range(4):
            puts = [put for rank, put in world.puts if rank == source]
            far = [r for r in range(4) if r // 2 != source // 2]
            data = [p for p in puts if p.nbytes > 0]
            assert {p.region for p in data} == {REGION}
            for peer in far:
                flags = [shape.arrived(source, c, epoch=1) for c in range(shape.chunks)]
                mine = [p for p in data if p.peer == peer]
                assert Counter(p.signal for p in mine) == Counter(flags)
                assert sum(p.nbytes for p in mine) == 300 * 1000 * 2
                assert all(p.value == 1 for p in mine)
            rest = [(p.peer, p.signal) for p in puts if p.nbytes == 0]
            assert sorted(rest) == [(peer, source) for peer in far]  # the word of its releases


def test_a_full_command_ring_holds_back_and_loses_nothing() -> None:
    plan = make_plan(4 * 512, 64, 2048, nodes=4, tiles_per_chunk=1, comm_blocks=48)
    with World(plan, fifo_slots=2) as world:
        world.check(epochs=3)
        assert len(world.puts) == 3 * 4 * 3 * (32 + 1)


def test_the_check_catches_a_kernel_that_skips_its_waits() -> None:
    """Planted fault: the same call with every wait left out must not pass."""
    with World(make_plan(512, 256, 512, ranks_per_node=2)) as world:
        world.poison()
        tensors = world.tensors(seed=2)
        world.call(tensors, view="compute_only")
        assert not world.errors(tensors)[0] <= 0.1
        # And with staging of an earlier call instead of NaN: stale data is no answer either.
        world.check(epochs=2)
        tensors = world.tensors(seed=77)
        world.call(tensors, view="compute_only")
        assert world.errors(tensors)[0] > 0.1


@pytest.mark.parametrize("op", REDUCING)
def test_waits_for_every_rank_s_part(op: OpName) -> None:
    """With a part counted as arrived that is not, the result is wrong: the wait is what makes it
    right."""
    plan = make_plan(256, 256, 128, op=op, ranks_per_node=2, tiles_per_chunk=1)
    with World(plan) as world:
        world.poison()
        tensors = world.tensors(seed=3)
        for chunk in range(geometry(plan).chunks):
            world.add(1, geometry(plan).arrived(0, chunk, epoch=1))
        world.alone(1, tensors[1])
        assert not world.errors(tensors)[1] <= 0.1


@pytest.mark.parametrize("op", REDUCING)
def test_a_rank_that_does_not_come_is_named(op: OpName) -> None:
    plan = make_plan(256, 256, 128, op=op, ranks_per_node=2)
    with World(plan) as world:
        code, seen = world.alone(0, world.tensors(seed=1)[0])
        assert (code, seen.peer) == (AbortCode.timeout, 1)
        assert seen.signal >= 64  # a word of the plan
