from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import SIM, SOFT, gpu, node, world
from hypothesis import given
from hypothesis import strategies as st
from shipped import constants_of

from mkernel.errors import ArgumentError, InputFileError, NoRoute
from mkernel.topology._cost import Exchanges
from mkernel.topology.cost import (
    LinkConstants,
    MachineConstants,
    gemm_tile_us,
    gemm_us,
    load_constants,
    transfer_us,
)
from mkernel.topology.defaults import defaults
from mkernel.topology.model import FabricLink, Nic, Topology
from mkernel.topology.placement import place
from mkernel.topology.reshape import split_into_nodes
from mkernel.topology.routing import _by_group, nic_gbs, routes
from mkernel.topology.world_map import world_map

CONSTANTS = constants_of("ascend")
MACHINE = world(node())


def soft(**fields: object) -> Nic:
    return SOFT.model_copy(update=fields)


def pair(left: tuple[Nic, ...], right: tuple[Nic, ...]) -> Topology:
    nodes = split_into_nodes(MACHINE, 2, 2, SIM, None).nodes
    return world(
        *(n.model_copy(update={"nics": own}) for n, own in zip(nodes, (left, right), strict=True))
    )


@given(st.integers(1, 4), st.integers(1, 4))
def test_every_ordered_pair_has_its_route(nodes: int, ranks: int) -> None:
    split = split_into_nodes(MACHINE, nodes, ranks, SIM, SOFT)
    placed = place(split, ranks)
    table = routes(split, placed, CONSTANTS)
    total = nodes * ranks
    assert sum(one.pairs for one in table.classes) == total * (total - 1)
    found = [table.route(placed, a, b) for a in range(total) for b in range(total) if a != b]
    for route in found:
        inside = placed[route.src].node == placed[route.dst].node
        assert route.kind == ("p2p" if inside else "nic")
        ends = [(rail.src_nic, rail.dst_nic) for rail in route.rails]
        assert ends == ([] if inside else [("soft0", "soft0")])
    back = {(r.dst, r.src): r.bandwidth_gbs for r in found}
    assert all(back[r.src, r.dst] == r.bandwidth_gbs for r in found)


def test_bandwidth_is_the_slower_port_or_the_constant() -> None:
    fast, slow = soft(speed_gbps=400), soft(speed_gbps=100)
    unequal = pair((fast,), (slow,))
    found = routes(unequal, place(unequal, 2), CONSTANTS)
    assert {r.bandwidth_gbs for r in found.classes if r.kind == "nic"} == {12.5}
    unrated = pair((SOFT,), (SOFT,))
    found = routes(unrated, place(unrated, 2), CONSTANTS)
    assert {r.bandwidth_gbs for r in found.classes if r.kind == "nic"} == {CONSTANTS.nic_gbs}
    assert {r.bandwidth_gbs for r in found.classes if r.kind == "p2p"} == {CONSTANTS.p2p_gbs}


@pytest.mark.parametrize(
    ("left", "right", "missing"),
    [
        ((soft(),), (), r"node 1 has no NIC"),
        ((soft(),), (soft(active=False),), r"node 1 has no active RDMA NIC \(soft0 is down\)"),
        ((soft(kind="ethernet"),), (soft(),), r"node 0 .*soft0 is plain Ethernet"),
        ((soft(kind="cx"),), (soft(kind="efa"),), r"no common protocol"),
        (
            (soft(kind="cx", link_layer="InfiniBand"),),
            (soft(kind="cx", link_layer="Ethernet"),),
            r"same link layer",
        ),
    ],
)
def test_a_missing_path_names_both_ends(
    left: tuple[Nic, ...], right: tuple[Nic, ...], missing: str
) -> None:
    apart = pair(left, right)
    ends = r"rank 0 \(node 0, ascend-sim0\) has no route to rank 2 \(node 1, ascend-sim0\): "
    with pytest.raises(NoRoute, match=ends + ".*" + missing):
        routes(apart, place(apart, 2), CONSTANTS)


def test_a_down_nic_is_no_obstacle_inside_a_node() -> None:
    alone = Topology(nodes=(pair((soft(active=False),), ()).nodes[0],))
    assert {r.kind for r in routes(alone, place(alone, 2), CONSTANTS).classes} == {"p2p"}


def test_alpha_beta_by_hand() -> None:
    assert transfer_us(50_000, 50, 2) == 3.0  # 1 us of bytes and 2 us of latency


def test_waves_are_whole() -> None:
    """2·128·256·1024 / 14.7 TFLOP/s = 4.565 us a tile; 24 cores take 24 tiles in one wave."""
    tile = gemm_tile_us(128, 256, 1024, 14.7)
    assert tile == pytest.approx(4.5653, rel=1e-4)

    def time(m: int) -> float:
        return gemm_us(
            m,
            256,
            1024,
            tile_m=128,
            tile_n=256,
            cores=24,
            tflops_per_core=14.7,
            memory_gbs=1e9,
            itemsize=2,
            out_itemsize=4,
        )

    assert time(128) == time(24 * 128) == pytest.approx(tile)
    assert time(24 * 128 + 1) == pytest.approx(2 * tile)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 48))
def test_compute_is_never_below_its_floors(m: int, n: int, k: int, cores: int) -> None:
    got = gemm_us(
        m,
        n,
        k,
        tile_m=128,
        tile_n=256,
        cores=cores,
        tflops_per_core=10,
        memory_gbs=100,
        itemsize=2,
        out_itemsize=4,
    )
    assert got >= 2 * m * n * k / (cores * 10e6) * (1 - 1e-12)
    assert got >= (2 * (m * k + k * n) + 4 * m * n) / 100e3 * (1 - 1e-12)


def test_the_shipped_constants_are_the_documented_ones() -> None:
    assert CONSTANTS.float16_tflops_per_core == 14.7
    assert CONSTANTS.p2p_gbs == 17.36  # 0.62 of a link's 28
    assert CONSTANTS.nic_gbs == 25
    with pytest.raises(ArgumentError, match="dtype"):
        CONSTANTS.tflops_per_core("int8")


def test_links_of_a_machine_without_constants_are_as_rated_or_usual() -> None:
    """Where nobody knows constants: a link's own rate, else the default of all links."""
    one, other = gpu(0), gpu(1)
    rated = FabricLink(kind="nvlink", ends=(one.id, other.id), count=18, gbs=450.0)
    for fabric, gbs in (((), defaults().fabric.gbs), ((rated,), 450.0)):
        made = world_map(world(node((one, other), fabric=fabric)), 2, None).links.table
        assert {way.bandwidth_gbs for way in made.classes} == {gbs}
        assert {way.latency_us for way in made.classes} == {defaults().fabric.latency_us}


def test_constants_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(CONSTANTS.model_dump_json())
    assert load_constants(file) == CONSTANTS
    data = json.loads(CONSTANTS.model_dump_json())
    file.write_text(json.dumps({**data, "nic_gbs": 0}))
    with pytest.raises(InputFileError, match="nic_gbs"):
        load_constants(file)
    with pytest.raises(InputFileError, match="No such file"):
        load_constants(tmp_path / "gone.json")


def test_constants_key_a_cache() -> None:
    again = MachineConstants.model_validate(CONSTANTS.model_dump())
    other = CONSTANTS.model_copy(update={"nic_gbs": 51.0})
    assert hash(again) == hash(CONSTANTS)
    assert other not in {CONSTANTS}


def test_a_port_is_rated_in_bits_and_no_faster_than_measured() -> None:
    loose, tight = (CONSTANTS.model_copy(update={"nic_most_gbs": most}) for most in (None, 10.0))
    assert nic_gbs(soft(speed_gbps=400), loose) == 50
    assert nic_gbs(soft(speed_gbps=400), tight) == 10
    assert nic_gbs(SOFT, loose) == CONSTANTS.nic_gbs


def test_float64_is_half_as_fast_as_float32() -> None:
    rates = [CONSTANTS.tflops_per_core(dtype) for dtype in ("float32", "float64")]
    assert rates[1] == rates[0] / 2 > 0


def test_one_exchange_takes_up_to_its_limits() -> None:
    few = Exchanges(1.0, 1.0, None, one_shot=(100, 60), brief=None, mail=None, mail_twice=None)
    assert [few.in_one(n, 2) for n in (100, 101)] == [True, False]
    assert [few.in_one(n, 4) for n in (30, 31)] == [True, False]


def test_a_product_takes_no_less_than_its_bytes_do() -> None:
    """1 GB/s: a byte takes a nanosecond. Of 2 x 8 rows, 4 columns and K of 16, in 2 bytes."""
    shipped = constants_of("hopper").fused
    assert shipped is not None
    path = shipped.model_copy(update={"splits": (1,)})
    found = path.products.each(2, 8, 4, 16, 132, 1e-3, 2)
    totals = [each.total_us for each in found]
    assert totals == [pytest.approx(2 * (16 * 16 + 16 * 4 + 16 * 4))] * len(path.tiles)


def test_a_process_group_goes_no_faster_between_nodes_than_a_nic() -> None:
    for most, own, wanted in (
        (None, None, 25.0),
        (10.0, None, 10.0),
        (99.0, None, 25.0),
        (10.0, 7.0, 7.0),
    ):
        changed = CONSTANTS.model_copy(update={"nic_most_gbs": most, "group_gbs": own})
        assert _by_group(changed, None).bandwidth_gbs == wanted
    slow = CONSTANTS.model_copy(update={"group_latency_us": 77.0})
    found = [_by_group(each, None).latency_us for each in (slow, CONSTANTS)]
    assert found == [77.0, CONSTANTS.nic_latency_us]


def test_links_may_cost_no_time() -> None:
    free = LinkConstants(p2p_latency_us=0.0, signal_us=0.0)
    assert (free.p2p_latency_us, free.signal_us) == (0.0, 0.0)
