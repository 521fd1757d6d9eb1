"""GEMM+ReduceScatter and GEMM+AllReduce against float64: worlds, dtypes, ragged shapes, epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mkernel.backends.accelerators.ascend import _ascend

from .rig import PATIENCE_S, SIGNAL_BASE, World, geometry, make_plan, modelled_views, same_bits

OPS = ("gemm_reduce_scatter", "gemm_all_reduce")


def rows(op: str, m: int, ranks: int) -> int:
    """A number of rows near ``m`` that the op takes."""
    return m if op == "gemm_all_reduce" else m // ranks * ranks or ranks


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 2), (1, 3), (1, 8), (2, 2), (3, 1)])
def test_worlds(op: str, nodes: int, ranks: int) -> None:
    m = rows(op, 700, nodes * ranks)
    with World(make_plan(m, 320, 256, op=op, nodes=nodes, ranks_per_node=ranks)) as world:
        world.check(epochs=5)
        assert bool(world.puts) == (nodes > 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(op: str, dtype: str, out_dtype: str, b_layout: str) -> None:
    plan = make_plan(
        256, 264, 128, op=op, nodes=2, dtype=dtype, out_dtype=out_dtype, b_layout=b_layout
    )
    with World(plan) as world:
        world.check(epochs=2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("m", "n", "k", "chunk"),
    [(1, 8, 8, 1), (4, 1000, 520, 4), (131, 40, 264, 2), (1532, 776, 24, 3), (300, 2056, 16, 1)],
)
def test_ragged(op: str, m: int, n: int, k: int, chunk: int) -> None:
    plan = make_plan(rows(op, m, 4), n, k, op=op, nodes=2, ranks_per_node=2, tiles_per_chunk=chunk)
    with World(plan) as world:
        world.check(epochs=3)


@pytest.mark.parametrize("op", OPS)
def test_views_in_any_order(op: str) -> None:
    with World(make_plan(512, 512, 128, op=op, nodes=2, ranks_per_node=2)) as world:
        world.check(
            epochs=9,
            views=("pipelined", "compute_only", "pipelined", "sequential", "compute_only"),
        )


@pytest.mark.parametrize("op", OPS)
def test_bits_depend_on_nothing_but_the_inputs(op: str) -> None:
    """Chunks, blocks, slots and nodes change nothing; every rank of an all-reduce has the same."""
    results = []
    options: list[tuple[dict[str, Any], int | None]] = [
        ({"ranks_per_node": 4}, None),
        ({"ranks_per_node": 4, "tiles_per_chunk": 1, "comm_blocks": 1}, 1),
        ({"nodes": 2, "ranks_per_node": 2, "compute_blocks": 3, "comm_blocks": 5}, 4),
    ]
    for chosen, slots in options:
        with World(make_plan(560, 520, 264, op=op, **chosen), slots=slots) as world:
            results.append(world.call(world.tensors(seed=7)))
    assert same_bits(results)
    if op == "gemm_all_reduce":
        assert all(torch.equal(results[0][0], out) for out in results[0])


@pytest.mark.parametrize("op", OPS)
def test_waits_for_every_rank_s_part(op: str) -> None:
    """With a part counted as arrived that is not, the result is wrong: the wait is what makes it
    right."""
    plan = make_plan(256, 256, 128, op=op, ranks_per_node=2, tiles_per_chunk=1)
    with World(plan) as world:
        world.poison()
        tensors = world.tensors(seed=3)
        world.epoch = 1
        last = plan.world_size - 1
        for chunk in range(geometry(plan).chunks):
            world.add(last, geometry(plan).arrived(1, 0, chunk))
        launch = world.launch(last, tensors[last], view="pipelined", timeout_s=0.5)
        assert launch.wait(PATIENCE_S)
        assert not world.errors(tensors)[last] <= 0.1


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_come_is_named(op: str) -> None:
    plan = make_plan(256, 256, 128, op=op, ranks_per_node=2)
    with World(plan) as world:
        world.epoch = 1
        launch = world.launch(0, world.tensors(seed=1)[0], timeout_s=0.3)
        assert launch.wait(PATIENCE_S)
        code, seen = world.outcome(0)
        assert code.name == "timeout"
        assert seen.peer == 1
        assert seen.signal >= SIGNAL_BASE


def test_ranks_without_tiles() -> None:
    """One output tile, eight ranks: seven own nothing, and all get the sum."""
    plan = make_plan(5, 40, 64, op="gemm_all_reduce", nodes=2, ranks_per_node=4)
    with World(plan) as world:
        world.check(epochs=4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_strict_simulation_finds_nothing(op: str, out_dtype: str) -> None:
    """In any legal order of the instructions: no hazard, and the same bits."""
    results = []
    plan = make_plan(300, 300, 264, op=op, nodes=2, ranks_per_node=2, out_dtype=out_dtype)
    for strict in (None, _ascend.Strict(), _ascend.Strict(seed=1), _ascend.Strict(seed=2)):
        with World(plan, strict=strict) as world:
            world.poison()
            results.append([out for e in range(3) for out in world.call(world.tensors(seed=e))])
    assert same_bits(results)


@pytest.mark.parametrize("op", OPS)
def test_modelled_views(op: str) -> None:
    """In the sequential view communication starts when compute has ended; pipelined is shorter."""
    plan = make_plan(2048, 1024, 1024, op=op, ranks_per_node=4, comm_blocks=24)
    alone, sequential, pipelined = modelled_views(plan)
    starts = {span.kernel: span.start_us for span in sequential.kernels}
    assert starts["comm"] >= max(s.end_us for s in sequential.kernels if s.kernel == "compute")
    assert alone.total_us < pipelined.total_us < sequential.total_us
    names = {span.name for track in pipelined.pipes for span in track.spans}
    assert {"TADD", "TPUT", "TMATMUL"} <= names
