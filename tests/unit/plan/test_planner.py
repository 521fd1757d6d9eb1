from __future__ import annotations

from typing import Any

import pytest
from devices import SOFT
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_worlds import CAPABILITIES, main_job, make, world
from shipped import constants_of

import mkernel
from mkernel.errors import (
    ArgumentError,
    DtypeError,
    LayoutError,
    NoRoute,
    ShapeError,
    UnknownOp,
    Unsupported,
)
from mkernel.plan.model import LaunchPlan
from mkernel.plan.shapes import nearest_multiples
from mkernel.plan.standard import TileSchedule
from mkernel.topology.model import Topology


def test_the_main_job() -> None:
    made, _, pipeline = main_job()
    assert made.op == "all_gather_gemm"
    assert (made.dtype, made.out_dtype, made.b_layout) == ("float16", "float32", "row")
    assert (made.nic, made.verbs, made.world_size) == ("cx7", "soft", 4)
    assert made.part(TileSchedule).chunking == pipeline.chunking
    assert pipeline.chunking.chunks_per_rank == 8
    assert (pipeline.compute_blocks, pipeline.comm_blocks) == (24, 8)
    assert made.order(made.part(TileSchedule).order)[3] == (3, 2, 1, 0)
    assert [made.route(0, dst).kind for dst in (1, 2, 3)] == ["p2p", "nic", "nic"]


def test_equal_inputs_give_the_cached_plan_and_others_do_not() -> None:
    assert make() is make(topology=world(2, 2))
    assert make() is not make(chunk=2)


def test_one_node_needs_no_nic() -> None:
    made = make(1, 4, nic=None, verbs=None)
    assert made == make(1, 4), "naming an unused NIC changes nothing"
    assert (made.nic, made.verbs) == (None, None)
    assert {route.kind for route in made.routes.classes} == {"p2p"}
    assert all(placed.nics == () for placed in made.placement)


def test_one_rank() -> None:
    made = make(1, 1)
    assert (made.routes.classes, list(made.order("node"))) == ((), [(0,)])
    assert made.prediction.comm_us == 0


@pytest.mark.parametrize(
    ("nodes", "ranks", "blocks"),
    [(1, 1, 1), (1, 2, 4), (2, 1, 4), (2, 2, 8), (3, 2, 8), (1, 40, 48)],
)
def test_four_blocks_a_destination(nodes: int, ranks: int, blocks: int) -> None:
    """All other nodes together are one destination; never more blocks than cores."""
    assert main_job(nodes, ranks, m=64 * nodes * ranks).pipeline.comm_blocks == blocks


def test_options_are_taken() -> None:
    made, _, pipeline = main_job(
        chunk=2, compute_blocks=8, comm_blocks=6, out_dtype="bfloat16", b_layout="column"
    )
    assert made.part(TileSchedule).chunking.tiles_per_chunk == 2
    assert (pipeline.compute_blocks, pipeline.comm_blocks) == (8, 6)
    assert (made.out_dtype, made.b_layout) == ("bfloat16", "column")


@given(
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 3),
    rows=st.integers(1, 3000),
    n=st.integers(1, 500),
    k=st.integers(1, 500),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    chunk=st.none() | st.integers(1, 100),
)
@settings(max_examples=60, deadline=None)
def test_every_plan_is_complete_and_round_trips(
    nodes: int, ranks: int, rows: int, n: int, k: int, dtype: str, chunk: int | None
) -> None:
    made = make(nodes, ranks, m=rows * nodes * ranks, n=8 * n, k=8 * k, dtype=dtype, chunk=chunk)
    again = LaunchPlan.model_validate_json(made.model_dump_json())
    assert again == made
    assert again.digest() == made.digest()
    times = made.prediction
    floor = max(times.compute_us, times.comm_us)
    assert floor <= times.pipelined_us <= times.sequential_us * (1 + 1e-12)


def test_prediction_by_hand() -> None:
    """Main job: 64 output tiles in 3 waves of 2·128·256·2048/14.7 us = 9.130; 4 routes of 2 MiB
    each way through a NIC of 25 GB/s."""
    times = make(comm_blocks=48).prediction
    assert times.compute_us == pytest.approx(3 * 2 * 128 * 256 * 2048 / 14.7e6)
    assert times.comm_us == pytest.approx(5.0 + 4 * 2**21 / 25e3)
    assert times.sequential_us == pytest.approx(times.compute_us + times.comm_us + 5.0)
    assert times.constants == "ascend"


def test_the_slowest_nic_decides_and_only_for_what_it_carries() -> None:
    """Node 0 has two NICs of 100 Gb/s, 4 shards each way on each; the others one of 400 Gb/s, with
    8 shards. 4 / 12.5 is more than 8 / 50; a fast NIC is not slowed by its slow peers."""
    slow = tuple(SOFT.model_copy(update={"id": f"soft{i}", "speed_gbps": 100.0}) for i in (0, 1))
    fast = (SOFT.model_copy(update={"speed_gbps": 400.0}),)
    nodes = tuple(
        node.model_copy(update={"nics": slow if node.id == 0 else fast})
        for node in world(3, 2).nodes
    )
    made = make(3, 2, m=3072, topology=Topology(nodes=nodes), comm_blocks=48)
    shard = 512 * 2048 * 2
    assert made.prediction.comm_us == pytest.approx(5.0 + 4 * shard / 12.5e3)


def test_predictions_follow_the_constants() -> None:
    slow = constants_of("ascend").model_copy(update={"name": "slow", "nic_gbs": 2.5})
    one, other = make().prediction, make(constants=slow).prediction
    assert other.comm_us > 5 * one.comm_us
    assert other.compute_us == one.compute_us
    assert other.constants == "slow"
    assert make(compute_blocks=8).prediction.compute_us > one.compute_us
    weak = slow.model_copy(update={"nic_gbs": 50.0, "comm_block_gbs": 5.0})
    few, many = (make(comm_blocks=n, constants=weak).prediction for n in (1, 8))
    assert few.comm_us > many.comm_us


NARROW = CAPABILITIES.model_copy(
    update={"dtypes": ("float16",), "out_dtypes": ("float32",), "b_layouts": ("row",)}
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": "ag_gem"}, UnknownOp, "did you mean 'ag_gemm'"),
        (
            {"op": "gemm_rs"},
            Unsupported,
            "accelerator 'ascend' does not provide 'gemm_reduce_scatter'; "
            "it provides: all_gather_gemm",
        ),
        ({"m": 2046}, ShapeError, "m = 2046 .* multiple of 4, .* nearest: 2044 or 2048"),
        ({"m": 3}, ShapeError, "m = 3 .* nearest: 4$"),
        ({"m": 0}, ShapeError, "m = 0 .* integer from 1 to 2147483647"),
        ({"n": -8}, ShapeError, "n = -8"),
        ({"k": 2**31}, ShapeError, "k = 2147483648"),
        ({"k": True}, ShapeError, "k = True"),
        ({"m": 2048.0}, ShapeError, "m = 2048.0"),
        ({"k": 2044}, ShapeError, "k = 2044 .* multiple of 8 .* nearest: 2040 or 2048"),
        ({"n": 1023}, ShapeError, "n = 1023 .* multiple of 8 .* nearest: 1016 or 1024"),
        ({"k": 2, "dtype": "float32"}, ShapeError, "k = 2 .* multiple of 4 .* nearest: 4"),
        ({"n": 4, "dtype": "float32", "out_dtype": "float16"}, ShapeError, "multiple of 8"),
        ({"dtype": "int8"}, DtypeError, "dtype = 'int8' .* float16, bfloat16, float32"),
        ({"dtype": "float32", "capabilities": NARROW}, DtypeError, "'ascend' does not take it"),
        ({"out_dtype": "float16", "capabilities": NARROW}, DtypeError, "out_dtype = 'float16'"),
        ({"b_layout": "diagonal"}, ArgumentError, "b_layout = 'diagonal' .* row, column"),
        ({"b_layout": "column", "capabilities": NARROW}, LayoutError, "does not read it"),
        ({"chunk": 0}, ArgumentError, "chunk = 0"),
        ({"compute_blocks": 25}, ArgumentError, "compute_blocks = 25 .* from 1 to 24"),
        ({"comm_blocks": 0}, ArgumentError, "comm_blocks = 0 .* from 1 to 48"),
        ({"ranks_per_node": 0}, ArgumentError, "ranks_per_node = 0"),
        ({"topology": world(2, 1)}, ArgumentError, "ranks_per_node = 2 .* at most 1"),
        ({"nic": None}, ArgumentError, "nic = None .*the world has 2 nodes"),
        ({"verbs": None}, ArgumentError, "verbs = None"),
    ],
)
def test_a_wrong_argument_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_the_largest_dimension(size: str) -> None:
    """Of what the accelerator takes: sizes that 8 divides."""
    found = make(**{size: 2**31 - 8})
    assert getattr(found.shape, size) == 2**31 - 8
    assert LaunchPlan.model_validate_json(found.model_dump_json()) == found


def test_the_nodes_are_those_of_the_topology() -> None:
    sizes = {"m": 2048, "n": 1024, "k": 2048}
    backends = {"accelerator": "ascend", "nic": "cx7", "verbs": "soft"}
    with pytest.raises(ArgumentError, match=r"nodes = 2 .* expected 1"):
        mkernel.plan("ag_gemm", nodes=2, topology=world(1, 4), **backends, **sizes)


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_nearest_multiples(value: int, step: int) -> None:
    named = [int(word) for word in nearest_multiples(value, step).split(" or ")]
    assert all(number > 0 and number % step == 0 for number in named)
    assert named[0] <= value < named[-1] or value < named[0] == step


def test_no_nic_on_a_node_is_no_route() -> None:
    nodes = world(2, 2).nodes
    bare = Topology(nodes=(nodes[0], nodes[1].model_copy(update={"nics": ()})))
    with pytest.raises(NoRoute, match=r"rank 0 .* rank 2 .*node 1 has no NIC"):
        make(topology=bare)


def test_uneven_rows_are_planned() -> None:
    """No dimension needs to fit a tile: 5 rows and a K of 264 are one row-group of 2 tiles."""
    cut = make(m=20, n=8, k=264).part(TileSchedule).chunking
    assert (cut.tiles_per_chunk, cut.chunks_per_rank) == (2, 1)
