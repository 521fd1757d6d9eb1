from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast, get_args

import pytest
from devices import SOFT
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_worlds import CAPABILITIES, main_job, world
from shipped import constants_of

from mkernel.plan.messages import CallMessages, OrderPlace, SimulatedRank
from mkernel.plan.model import OpName
from mkernel.plan.pipeline import Exchange, Runs
from mkernel.plan.planner import Planned
from mkernel.plan.predict import payloads
from mkernel.plan.scaling import points
from mkernel.plan.simulate import MESSAGES, Simulation, ends_us, trace
from mkernel.plan.simulate import simulate as simulate_pipeline
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import NumaNode, Topology

CONSTANTS = constants_of("ascend")
FREE = CONSTANTS.model_copy(
    update={"signal_us": 0.0, "launch_us": 0.0, "p2p_latency_us": 0.0, "nic_latency_us": 0.0}
)
EVERY_OP = CAPABILITIES.model_copy(
    update={"ops": ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")}
)
OPS = st.sampled_from(EVERY_OP.ops)
RUNS = st.sampled_from(get_args(Runs))
EXCHANGES: st.SearchStrategy[Exchange] = st.sampled_from(["direct", "hierarchical"])


def planned(nodes: int, ranks: int, **options: Any) -> Planned:
    return main_job(nodes, ranks, capabilities=EVERY_OP, **options)


def simulate(
    made: Planned,
    constants: MachineConstants,
    *,
    exchange: Exchange = "direct",
    detail: int = MESSAGES,
) -> Simulation:
    pipeline = replace(made.pipeline, exchange=exchange)
    return simulate_pipeline(made.plan, pipeline, constants, detail=detail)


def ordered(made: Planned, runs: Runs) -> Planned:
    order = replace(made.pipeline.order, runs=runs)
    return made._replace(pipeline=replace(made.pipeline, order=order))


def apart(nodes: int, ranks: int) -> Topology:
    """The same nodes, each of a kind of its own: simulated one by one."""
    made = tuple(
        node.model_copy(update={"numa": (NumaNode(id=0, cpus=(index,)),)})
        for index, node in enumerate(world(nodes, ranks).nodes)
    )
    return Topology(nodes=made)


@given(
    OPS, EXCHANGES, RUNS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_one_node_stands_for_all_equal_ones(
    op: str, exchange: Exchange, runs: Runs, nodes: int, ranks: int, tiles: int, narrow: bool
) -> None:
    """What a few ranks give is what all ranks give, simulated one by one."""
    constants = CONSTANTS.model_copy(update={"egress_gbs": 30.0}) if narrow else CONSTANTS
    options: dict[str, Any] = {"op": op, "m": 64 * nodes * ranks * tiles, "k": 1024, "n": 512}
    few = ordered(planned(nodes, ranks, constants=constants, **options), runs)
    alone = planned(nodes, ranks, topology=apart(nodes, ranks), constants=constants, **options)
    every = ordered(alone, runs)
    detail = 10**6
    one = simulate(few, constants, exchange=exchange, detail=detail)
    whole = simulate(every, constants, exchange=exchange, detail=detail)
    assert whole.simulated_ranks == nodes * ranks
    for field in ("time_us", "compute_us", "communication_us", "exposed_us", "floor_us"):
        assert getattr(one, field) == pytest.approx(getattr(whole, field), rel=1e-9), field


@given(
    OPS,
    EXCHANGES,
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(50, 4000),
)
@settings(max_examples=60, deadline=None)
def test_never_faster_than_the_floor(
    op: str, exchange: Exchange, nodes: int, ranks: int, rows: int, k: int, detail: int
) -> None:
    """The floor from the bytes alone: what a NIC must carry of the op, and the compute."""
    made = planned(nodes, ranks, op=op, m=8 * rows * nodes * ranks, n=256, k=64 * k)
    found = simulate(made, CONSTANTS, exchange=exchange, detail=detail)
    assert found.time_us >= found.floor_us - 1e-9
    assert found.time_us >= found.compute_us + CONSTANTS.launch_us
    sent = sum(payloads(cast(OpName, op), made.plan.shape, made.plan.dtype, made.plan.world_size))
    others = (nodes - 1) * ranks * (ranks if exchange == "direct" else 1)
    through_nic = sent * others / (CONSTANTS.nic_gbs * 1e3)
    assert found.time_us >= through_nic - 1e-9
    assert all(0 <= link.utilization <= 1 for link in found.links)
    assert Simulation.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("n", "k"), [(256, 16384), (65536, 512)])
def test_without_contention_it_is_the_floor(
    op: str, nodes: int, ranks: int, n: int, k: int
) -> None:
    """Each pair has a link of its own: max(T_c, T_m), to 1 %, where either of them is long."""
    made = planned(
        nodes, ranks, op=op, m=16384 * nodes * ranks, n=n, k=k, comm_blocks=48, constants=FREE
    )
    found = simulate(made, FREE)
    size = sum(payloads(cast(OpName, op), made.plan.shape, made.plan.dtype, nodes * ranks))
    comm = size / ((FREE.nic_gbs if nodes > 1 else FREE.p2p_gbs) * 1e3)
    floor = max(made.plan.prediction.compute_us, comm)
    assert found.floor_us == pytest.approx(floor, rel=1e-6)
    assert found.time_us == pytest.approx(floor, rel=0.01)


def test_a_mesh_gathers_at_its_floor() -> None:
    """Eight ranks, a link each pair: all shares come at once, whatever the order of consumption."""
    made = planned(1, 8, m=4096 * 8, n=256, k=16384, comm_blocks=48, constants=FREE)
    found = simulate(made, FREE)
    assert found.communication_us == pytest.approx(
        4096 * 16384 * 2 / (CONSTANTS.p2p_gbs * 1e3), rel=0.01
    )
    assert found.time_us > found.communication_us


def test_nothing_to_send_is_the_compute() -> None:
    made = planned(1, 1)
    found = simulate(made, CONSTANTS)
    assert found.time_us == pytest.approx(made.plan.prediction.compute_us + CONSTANTS.launch_us)
    assert (found.exposed_us, found.messages) == (pytest.approx(0.0), 0)


@pytest.mark.parametrize("detail", [60, 120, 200])
def test_fewer_messages_tell_the_same(detail: int) -> None:
    made = planned(96, 2, m=128 * 192, n=4096, k=2048)
    fine = simulate(made, CONSTANTS, detail=10**6)
    coarse = simulate(made, CONSTANTS, detail=detail)
    assert coarse.messages < fine.messages / 2
    assert coarse.time_us == pytest.approx(fine.time_us, rel=0.03)
    assert coarse.floor_us == pytest.approx(fine.floor_us, rel=1e-6)


def test_hierarchical_exchange_sends_a_node_s_bytes_once() -> None:
    made = planned(4, 4, m=128 * 16 * 8, n=256, k=8192)
    direct, once = (simulate(made, CONSTANTS, exchange=e) for e in ("direct", "hierarchical"))
    busy = [
        next(link.busy_us for link in found.links if link.name == "soft0 out")
        for found in (direct, once)
    ]
    assert busy[0] == pytest.approx(4 * busy[1])
    assert once.time_us < direct.time_us


def test_nodes_that_differ_are_simulated_apart() -> None:
    """A node whose NIC is slow: its link is the busiest, and the world waits for it."""
    nodes = list(world(6, 2).nodes)
    slow = SOFT.model_copy(update={"speed_gbps": 20.0})
    nodes[2] = nodes[2].model_copy(update={"nics": (slow,)})
    shape = {"m": 128 * 12 * 4, "n": 256, "k": 8192}
    hurt = simulate(planned(6, 2, topology=Topology(nodes=tuple(nodes)), **shape), CONSTANTS)
    well = simulate(planned(6, 2, **shape), CONSTANTS)
    assert hurt.simulated_ranks == 4
    assert (hurt.links[0].name[:5], hurt.links[0].gbs, hurt.links[0].nodes) == ("soft0", 2.5, 1)
    assert hurt.time_us > 5 * well.time_us


def test_signals_and_chunks_cost() -> None:
    shape = {"m": 4096, "n": 256, "k": 2048}
    dear = CONSTANTS.model_copy(update={"signal_us": 50.0})
    many, few = (planned(1, 4, chunk=chunk, **shape) for chunk in (1, 16))
    assert simulate(many, dear).time_us > 1.5 * simulate(few, dear).time_us


def test_the_timeline_never_has_a_link_do_two_things_at_once() -> None:
    made = planned(3, 2, op="gemm_all_reduce")
    found = trace(made.plan, made.pipeline, CONSTANTS)
    assert any(found.busy)
    for spans in found.busy:
        for one, following in pairwise(spans):
            assert one.start_us + one.duration_us <= following.start_us + 1e-9
    for steps in found.computed.values():
        assert [start for _, start, _ in steps] == sorted(start for _, start, _ in steps)
        assert steps[-1][2] <= found.result.time_us


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 50)), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_waves(parts: list[tuple[int, float]], tiles: int, cores: int) -> None:
    """Against each tile placed on its core one by one."""
    whole = sum(part for part, _ in parts)
    ends = list(
        ends_us(
            [(part / whole, there) for part, there in parts], tiles=tiles, tile_us=2.0, cores=cores
        )
    )
    free, given_out, share, latest, expected = [0.0] * cores, 0, 0, 0.0, 0.0
    for (part, there), end in zip(parts, ends, strict=True):
        share += part
        latest = max(latest, there)
        upto = tiles if share == whole else int(share / whole * tiles + 1e-9)
        for tile in range(given_out, upto):
            free[tile % cores] = max(free[tile % cores], latest) + 2.0
            expected = max(expected, free[tile % cores])
        given_out = max(given_out, upto)
        assert end == pytest.approx(expected)


def test_links_of_each_side_carry_what_its_nodes_send_or_receive() -> None:
    """A message that stands for those of several nodes: each link of the sender's node is busy with one
    of them, each of the receiver's with three."""
    made = planned(2, 2)
    calls = CallMessages(made.plan, made.pipeline, FREE, chunks=1)
    src, dst = SimulatedRank(0, 0), SimulatedRank(len(made.plan.placement.sites) - 1, 0)
    place = OrderPlace(1, 0, 0, 1)
    busy = [
        {link: us for way in calls.send(src, dst, 1e6, weight, place).subflows for link, us in way}
        for weight in ((1.0, 1.0), (1.0, 3.0))
    ]
    more = {link: busy[1][link] / us for link, us in busy[0].items()}
    sides = [sum(factor == pytest.approx(each) for factor in more.values()) for each in (1.0, 3.0)]
    assert sum(sides) == len(more)
    (flow,) = calls._subflows[next(ends for ends in calls._subflows if not ends.within)]
    assert sides == [1 + flow.src_links, len(flow.links) - flow.src_links]
    assert flow.src_links
    assert sides[1]


def test_a_sender_signals_each_node_that_it_sends_to() -> None:
    made = planned(2, 2)
    constants = FREE.model_copy(update={"signal_us": 5.0})
    src, dst = SimulatedRank(0, 0), SimulatedRank(len(made.plan.placement.sites) - 1, 0)
    place = OrderPlace(1, 0, 0, 1)
    calls = CallMessages(made.plan, made.pipeline, constants, chunks=1)
    took = [
        sum(way[0][1] for way in calls.send(src, dst, 0.0, weight, place).subflows)
        for weight in ((1.0, 1.0), (3.0, 1.0), (1.0, 3.0))
    ]
    assert took[0] > 0
    assert took == pytest.approx([took[0], 3 * took[0], took[0]])


def test_worlds_grow_by_twos_up_to_the_most() -> None:
    for most, nodes in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])):
        found = list(points(lambda count: planned(count, 1, m=1536), FREE, most))
        assert [point.nodes for point in found] == [point.ranks for point in found] == nodes


def test_sums_go_home_when_all_of_their_terms_are_there() -> None:
    """An exchange, then another: each has the latency of its way."""
    far = FREE.model_copy(update={"nic_latency_us": 1e6})
    for op, exchanges in (("gemm_reduce_scatter", 1), ("gemm_all_reduce", 2)):
        found = simulate(planned(2, 1, op=op, constants=far), far)
        assert found.exposed_us == pytest.approx(exchanges * 1e6, rel=0.01)


def test_messages_are_as_few_as_the_detail_allows() -> None:
    made = planned(2, 2)
    for chunks, detail, pieces in ((10**6, 640, 640 // (4 * 4)), (3, 10**6, 3), (10**6, 1, 1)):
        calls = CallMessages(made.plan, made.pipeline, FREE, chunks=chunks, detail=detail)
        ranks = len(list(calls.ranks()))
        assert calls.pieces(calls.steps[0]) == min(chunks, max(1, detail // (4 * ranks**2))), pieces
    assert calls.name(OrderPlace(1, 0, 2, 3)) == "node +1, local rank +0, part 2"
    assert calls.steps[1].size == 1
