"""The GEMM ops against float64: worlds, dtypes, layouts, ragged shapes, epochs, schedules."""

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
    VIEWS_IN_ANY_ORDER,
    World,
    geometry,
    make_plan,
    same_bits,
)

REDUCING: tuple[OpName, ...] = ("gemm_reduce_scatter", "gemm_all_reduce")
OPS: tuple[OpName, ...] = ("all_gather_gemm", *REDUCING)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 3), (1, 8), (2, 2), (3, 2)])
def test_worlds(op: OpName, nodes: int, ranks: int) -> None:
    plan = make_plan(136 * nodes * ranks, 320, 512, op=op, nodes=nodes, ranks_per_node=ranks)
    with World(plan) as world:
        world.check(epochs=3)
        assert bool(world.puts) == (nodes > 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(op: OpName, dtype: str, out_dtype: str, b_layout: str) -> None:
    plan = make_plan(
        512, 264, 520, op=op, nodes=2, dtype=dtype, out_dtype=out_dtype, b_layout=b_layout
    )
    with World(plan) as world:
        world.check(epochs=2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("m_local", "n", "k", "tiles_per_chunk", "b_layout"),
    [
        (1, 8, 8, 1, "column"),
        (1, 1000, 2056, 4, "row"),
        (5, 264, 264, 1, "row"),
        (129, 40, 520, 2, "column"),
        (200, 776, 1032, 3, "column"),
        (383, 24, 24, 4, "row"),
        (16, 4096, 16, 1, "row"),
    ],
)
def test_ragged(
    op: OpName, m_local: int, n: int, k: int, tiles_per_chunk: int, b_layout: str
) -> None:
    m = m_local * 4 - (3 if op == "gemm_all_reduce" else 0)
    plan = make_plan(
        m, n, k, op=op, nodes=2, ranks_per_node=2, b_layout=b_layout,
        tiles_per_chunk=tiles_per_chunk,
    )  # fmt: skip
    with World(plan) as world:
        world.check(epochs=3)


@pytest.mark.parametrize("op", OPS)
def test_ragged_float32(op: OpName) -> None:
    plan = make_plan(2 * 131, 260, 396, op=op, nodes=2, dtype="float32", tiles_per_chunk=3)
    with World(plan) as world:
        world.check(epochs=3)


def test_ranks_without_tiles() -> None:
    """One output tile, eight ranks: seven own nothing, and all get the sum."""
    plan = make_plan(5, 40, 64, op="gemm_all_reduce", nodes=2, ranks_per_node=4)
    with World(plan) as world:
        world.check(epochs=4)


def test_strided_arguments() -> None:
    """Row strides beyond the width, as of a slice of a larger tensor, are read in place."""
    with World(make_plan(256, 256, 256, ranks_per_node=2)) as world:
        tensors = world.tensors(seed=3)
        for each in tensors:
            for name, value in each.items():
                wide = torch.full(
                    (value.shape[0], value.shape[1] + 40), float("nan"), dtype=value.dtype
                )
                wide[:, 8:-32] = value
                each[name] = wide[:, 8:-32]
        world.call(tensors)
        assert all(error <= 1e-5 for error in world.errors(tensors))
        for rank in range(2):
            margin = tensors[rank]["out"]._base
            assert margin is not None
            assert margin[:, :8].isnan().all()
            assert margin[:, -32:].isnan().all()


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
    ]
    results = []
    for slots, options in variants:
        plan = make_plan(4 * 300, 520, 520, op=op, **{"ranks_per_node": 4, **options})
        with World(plan, slots=slots) as world:
            results.append(world.call(world.tensors(seed=11)))
    assert same_bits(results)
    if op == "gemm_all_reduce":
        assert all(torch.equal(results[0][0], out) for out in results[0])


@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 7, 11, 24])
def test_any_number_of_blocks(blocks: int) -> None:
    plan = make_plan(
        6 * 140, 272, 520, nodes=2, ranks_per_node=3, tiles_per_chunk=2,
        compute_blocks=blocks, comm_blocks=2 * blocks,
    )  # fmt: skip
    with World(plan) as world:
        world.check(epochs=3)


@pytest.mark.parametrize("op", OPS)
def test_views_in_any_order(op: OpName) -> None:
    """Calls that communicate stay right after calls that do not, whichever parity each had."""
    with World(make_plan(512, 512, 512, op=op, nodes=2, ranks_per_node=2)) as world:
        world.check(epochs=len(VIEWS_IN_ANY_ORDER), views=VIEWS_IN_ANY_ORDER)


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
