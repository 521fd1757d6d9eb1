from __future__ import annotations

import re

import pytest
from devices import gpu, nic, node, rails, world
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import constants_of

from mkernel.errors import NoRoute
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import FabricLink, Node, Topology
from mkernel.topology.placement import place
from mkernel.topology.routes import Route, RouteTable
from mkernel.topology.routing import routes

CONSTANTS = constants_of("hopper")
APART = CONSTANTS.model_copy(update={"cross_rail_share": 0.25, "cross_rail_latency_us": 3.0})
NOT_JOINED = CONSTANTS.model_copy(update={"cross_rail_share": 0.0})


def every(
    topology: Topology, ranks: int, constants: MachineConstants = CONSTANTS
) -> dict[tuple[int, int], Route]:
    placed = place(topology, ranks)
    table = routes(topology, placed, constants)
    pairs = [(a, b) for a in range(len(placed)) for b in range(len(placed)) if a != b]
    assert sum(one.pairs for one in table.classes) == len(pairs)
    assert RouteTable.model_validate_json(table.model_dump_json()) == table
    return {pair: table.route(placed, *pair) for pair in pairs}


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Up to 3 switches with GPUs and NICs, some down, some of other kinds, some positions unknown."""
    switches = st.none() | st.integers(0, 2)
    gpus = draw(st.lists(switches, min_size=2, max_size=3))
    down = st.tuples(switches, st.sampled_from(["cx", "cx", "efa"]), st.booleans())
    nics = draw(st.lists(down, min_size=1, max_size=4))
    return node(
        tuple(gpu(i, switch) for i, switch in enumerate(gpus)),
        tuple(nic(i, switch, kind=kind, active=up) for i, (switch, kind, up) in enumerate(nics)),
        no_p2p=(("cuda0", "cuda1"),) if draw(st.booleans()) else (),
    )


@given(st.lists(nodes(), min_size=1, max_size=3), st.sampled_from([CONSTANTS, APART, NOT_JOINED]))
@settings(max_examples=80, deadline=None)
def test_every_pair_is_routed_the_same_both_ways_or_named(
    made: list[Node], constants: MachineConstants
) -> None:
    topology = world(*made)
    up = [{n.id: n for n in one.nics if n.active} for one in made]
    try:
        found = every(topology, 2, constants)
    except NoRoute as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert len(re.findall(r"rank \d+ \(node \d+, cuda\d\)", message)) == 2
        return
    for (src, dst), route in found.items():
        back = found[dst, src]
        assert (route.kind, route.bandwidth_gbs, route.latency_us) == (
            back.kind,
            back.bandwidth_gbs,
            back.latency_us,
        )
        assert bool(route.rails) == (src // 2 != dst // 2)
        for rail in route.rails:
            out, into = up[src // 2][rail.src_nic], up[dst // 2][rail.dst_nic]
            assert out.kind == into.kind
        assert len({rail.src_nic for rail in route.rails}) == len(route.rails)
        assert (
            route.bandwidth_gbs <= sum(rail.bandwidth_gbs for rail in route.rails)
            or not route.rails
        )


def test_rail_to_rail() -> None:
    found = every(world(rails(), rails()), 8)
    for i in range(8):
        (rail,) = found[i, 8 + i].rails
        assert (rail.src_nic, rail.dst_nic) == (f"mlx5_{i}", f"mlx5_{i}")
    assert {route.kind for route in found.values()} == {"p2p", "nic"}


@pytest.mark.parametrize("constants", [APART, NOT_JOINED])
def test_a_neighbour_on_the_wanted_rail_relays(
    constants: MachineConstants,
) -> None:
    found = every(world(rails(), rails()), 8, constants)
    assert found[1, 8 + 1].kind == "nic"
    route = found[1, 8 + 3]
    assert (route.kind, route.src_relay, route.dst_relay) == ("relay", 3, None)
    assert [(rail.src_nic, rail.dst_nic) for rail in route.rails] == [("mlx5_3", "mlx5_3")]
    assert route.bandwidth_gbs == 50.0
    assert route.latency_us > found[1, 9].latency_us


def test_no_relay_where_crossing_rails_costs_nothing() -> None:
    assert every(world(rails(), rails()), 8)[1, 8 + 3].kind == "nic"


def test_a_relay_instead_of_the_host_where_the_nics_are_next_to_a_neighbour() -> None:
    """cuda0's NIC is behind another host bridge, next to cuda1: over NVLink that is faster than
    through host memory."""
    one = node((gpu(0, 0), gpu(1, 1)), (nic(0, 1),))
    route = every(world(one, one), 2)[0, 3]
    assert (route.kind, route.src_relay, route.staged) == ("relay", 1, ())
    apart = one.model_copy(update={"no_p2p": (("cuda0", "cuda1"),)})
    route = every(world(apart, apart), 2)[0, 3]
    assert (route.kind, route.staged) == ("nic", ("source",))


@pytest.mark.parametrize("rates", [(40.0, 45.0), (45.0, 40.0)])
def test_of_two_relays_the_slower_hop_limits_the_way(rates: tuple[float, float]) -> None:
    """Only the NICs of both neighbours are of one kind."""
    ends = [
        node(
            (gpu(0, 0), gpu(1, 1)),
            (nic(0, 0, kind=own), nic(1, 1)),
            fabric=(FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=1, gbs=rate),),
        )
        for own, rate in zip(("efa", "soft"), rates, strict=True)
    ]
    route = every(world(*ends), 2)[0, 2]
    assert (route.kind, route.src_relay, route.dst_relay) == ("relay", 1, 1)
    assert route.bandwidth_gbs == 40.0


def test_without_gpudirect_bytes_rest_in_host_memory() -> None:
    one = node((gpu(0, 0),), (nic(0, 0, gpudirect=False),))
    route = every(world(one, one), 1)[0, 1]
    assert route.staged == ("source", "destination")
    assert route.bandwidth_gbs == CONSTANTS.host_gbs
    assert route.latency_us == CONSTANTS.nic_latency_us + 2 * CONSTANTS.host_latency_us


def test_rails_share_the_way_through_host_memory() -> None:
    one = node((gpu(0, 0),), tuple(nic(i, 0, gpudirect=False) for i in range(3)))
    route = every(world(one, one), 1)[0, 1]
    assert (len(route.rails), route.bandwidth_gbs) == (3, CONSTANTS.host_gbs)


def test_a_route_has_all_rails_of_its_ranks() -> None:
    route = every(world(rails(2, 4), rails(2, 4)), 2)[0, 2]
    assert len(route.rails) == 4
    assert route.bandwidth_gbs == 4 * 50


def test_the_device_s_own_link_limits_its_rails() -> None:
    one = node((gpu(0, 0, pcie_gbs=64.0),), tuple(nic(i, 0) for i in range(4)))
    assert every(world(one, one), 1)[0, 1].bandwidth_gbs == 64


def test_different_numbers_of_nics_meet_at_the_fewer() -> None:
    found = every(world(rails(2, 4), rails(2, 1)), 2)
    assert len(found[0, 2].rails) == len(found[2, 0].rails) == 1


def test_a_nic_that_is_down_is_not_missed() -> None:
    hurt = rails(4)
    broken = hurt.model_copy(
        update={"nics": tuple(n.model_copy(update={"active": n.id != "mlx5_2"}) for n in hurt.nics)}
    )
    found = every(world(rails(4), broken, rails(4)), 4, APART)
    for route in found.values():
        ends = (route.src // 4, route.dst // 4)
        used = {(ends[0], rail.src_nic) for rail in route.rails}
        used |= {(ends[1], rail.dst_nic) for rail in route.rails}
        assert (1, "mlx5_2") not in used
    assert found[2, 8 + 2].kind == "nic", "healthy nodes go on as before"


def test_devices_that_do_not_reach_each_other_go_through_the_host() -> None:
    one = node((gpu(0, 0), gpu(1, 0)), (), no_p2p=(("cuda0", "cuda1"),))
    route = every(world(one), 2)[0, 1]
    assert (route.kind, route.bandwidth_gbs) == ("host", CONSTANTS.host_gbs)


def test_listed_links_decide_inside_a_node() -> None:
    links = tuple(
        FabricLink(kind="nvlink", ends=(f"cuda{i}", "switch"), count=12, gbs=300.0) for i in (0, 1)
    )
    gpus = (gpu(0, 0, pcie_gbs=32.0), gpu(1, 0, pcie_gbs=32.0), gpu(2, 1, pcie_gbs=32.0))
    found = every(world(node(gpus, (), fabric=links)), 3)
    assert found[0, 1].bandwidth_gbs == 300
    assert found[0, 2].bandwidth_gbs == round(32 * 0.79 * 0.83, 3), "no NVLink: PCIe"
    assert [found[0, other].over_pcie for other in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("rates", "own", "gbs"),
    [((300.0, 200.0), None, 200), ((None, 200.0), None, 200), ((300.0, 200.0), 150.0, 150)],
)
def test_ports_to_a_switch_limit_what_is_known(
    rates: tuple[float | None, ...], own: float | None, gbs: float
) -> None:
    links = tuple(
        FabricLink(kind="nvlink", ends=(f"cuda{i}", "switch"), count=12, gbs=rate)
        for i, rate in enumerate(rates)
    )
    constants = CONSTANTS.model_copy(update={"egress_gbs": own, "p2p_gbs": None})
    found = every(world(node((gpu(0, 0), gpu(1, 0)), (), fabric=links)), 2, constants)
    assert found[0, 1].bandwidth_gbs == gbs


def test_rails_that_are_not_joined_are_named() -> None:
    left, right = (
        node((gpu(0, 0),), (nic(0, 0),)),
        node((gpu(0, 0),), (nic(0, active=False), nic(1, 0))),
    )
    with pytest.raises(NoRoute, match=r"rank 0 .*rank 1 .*on one rail"):
        every(world(left, right), 1, NOT_JOINED)


def test_crossing_rails_takes_the_latency_that_it_adds() -> None:
    constants = CONSTANTS.model_copy(update={"cross_rail_latency_us": 3.0})
    apart = rails(2).model_copy(update={"no_p2p": (("cuda0", "cuda1"),)})  # no neighbour relays
    found = every(world(apart, apart), 2, constants)
    assert [rail.dst_nic for rail in found[0, 2].rails] == ["mlx5_0"]
    assert [rail.dst_nic for rail in found[0, 3].rails] == ["mlx5_1"]
    assert found[0, 2].latency_us == constants.nic_latency_us
    assert found[0, 3].latency_us == constants.nic_latency_us + 3.0


@pytest.mark.parametrize(("crossing_us", "kind"), [(1.0, "nic"), (100.0, "relay")])
def test_a_neighbour_relays_where_crossing_takes_longer(crossing_us: float, kind: str) -> None:
    """At one rate either way, the latency decides: the relay's hop and signal, or the crossing."""
    constants = CONSTANTS.model_copy(update={"cross_rail_latency_us": crossing_us})
    assert 1.0 < constants.p2p_latency_us + constants.signal_us < 100.0
    found = every(world(rails(2), rails(2)), 2, constants)
    assert found[0, 2].kind == "nic"
    assert found[0, 3].kind == kind
