"""AllGather+GEMM against float64: worlds, dtypes, layouts, ragged shapes, epochs, schedules."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from mkernel.backends.contracts.instrumented import View

from .rig import PATIENCE_S, REGION, SIGNAL_BASE, World, geometry, make_plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_one_node(ranks: int) -> None:
    with World(make_plan(256 * ranks, 320, 512, ranks_per_node=ranks)) as world:
        world.check(epochs=5)
        assert not world.puts


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2), (3, 2), (4, 1), (2, 4)])
def test_across_nodes(nodes: int, ranks: int) -> None:
    with World(
        make_plan(256 * nodes * ranks, 320, 512, nodes=nodes, ranks_per_node=ranks)
    ) as world:
        world.check(epochs=5)


@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str, out_dtype: str, b_layout: str) -> None:
    plan = make_plan(512, 512, 1024, nodes=2, dtype=dtype, out_dtype=out_dtype, b_layout=b_layout)
    with World(plan) as world:
        world.check(epochs=2)


@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize(
    ("m_local", "n", "k", "tiles_per_chunk"),
    [
        (1, 8, 8, 1),
        (1, 1000, 2056, 4),
        (5, 264, 264, 1),
        (129, 40, 520, 2),
        (200, 776, 1032, 3),
        (383, 24, 24, 4),
        (16, 4096, 16, 1),
    ],
)
def test_ragged(m_local: int, n: int, k: int, tiles_per_chunk: int, b_layout: str) -> None:
    plan = make_plan(
        m_local * 4,
        n,
        k,
        nodes=2,
        ranks_per_node=2,
        b_layout=b_layout,
        tiles_per_chunk=tiles_per_chunk,
    )
    with World(plan) as world:
        world.check(epochs=3)


def test_ragged_float32() -> None:
    plan = make_plan(2 * 131, 260, 396, nodes=2, dtype="float32", tiles_per_chunk=3)
    with World(plan) as world:
        world.check(epochs=3)


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


def test_results_do_not_depend_on_the_schedule() -> None:
    """Bit-identical whatever the cores, blocks, chunks, host threads and routes."""
    variants: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {}),
        (4, {"compute_blocks": 1, "comm_blocks": 1}),
        (3, {"compute_blocks": 5, "comm_blocks": 7}),
        (2, {"compute_blocks": 24, "comm_blocks": 2}),
        (2, {"tiles_per_chunk": 1}),
        (2, {"tiles_per_chunk": 3, "comm_blocks": 3}),
        (2, {"tiles_per_chunk": 64}),
        (2, {"step_k": 128, "tile_n": 128}),
        (2, {"tile_m": 64, "tile_k": 128}),
        (2, {"nodes": 2, "ranks_per_node": 2}),
        (2, {"nodes": 4, "ranks_per_node": 1}),
    ]
    want: list[torch.Tensor] | None = None
    for slots, options in variants:
        plan = make_plan(4 * 300, 520, 1032, **{"ranks_per_node": 4, **options})
        with World(plan, slots=slots) as world:
            got = world.call(world.tensors(seed=11))
        want = want or got
        for rank in range(4):
            assert torch.equal(got[rank], want[rank]), f"rank {rank}: {slots} slots, {options}"


@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 7, 11, 24])
def test_any_number_of_blocks(blocks: int) -> None:
    plan = make_plan(
        6 * 140,
        272,
        520,
        nodes=2,
        ranks_per_node=3,
        tiles_per_chunk=2,
        compute_blocks=blocks,
        comm_blocks=2 * blocks,
    )
    with World(plan) as world:
        world.check(epochs=3)


@pytest.mark.parametrize("view", ["sequential", "pipelined"])
def test_views_share_epochs(view: View) -> None:
    """Calls that communicate stay right after calls that do not, whichever parity each had."""
    plan = make_plan(4 * 256, 256, 512, nodes=2, ranks_per_node=2)
    with World(plan) as world:
        for skipped in (1, 2, 1, 3):
            for _ in range(skipped):
                world.call(world.tensors(seed=1), view="compute_only")
            world.check(epochs=3, views=(view,))


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
                flags = [SIGNAL_BASE + shape.arrived(1, source, c) for c in range(shape.chunks)]
                mine = [p for p in data if p.peer == peer]
                assert Counter(p.signal for p in mine) == Counter(flags)
                assert sum(p.nbytes for p in mine) == 300 * 1000 * 2
                assert all(p.value == 1 for p in mine)
            rest = [(p.peer, p.signal) for p in puts if p.nbytes == 0]
            released = SIGNAL_BASE + shape.released(source)
            assert sorted(rest) == [(peer, released) for peer in far]


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
        assert math.isnan(world.errors(tensors)[0])
        # And with staging of an earlier call instead of NaN: stale data is no answer either.
        world.check(epochs=2)
        tensors = world.tensors(seed=77)
        world.call(tensors, view="compute_only")
        assert world.errors(tensors)[0] > 0.1
