from __future__ import annotations

import itertools

import pytest
from devices import SIM, SOFT, gpu, nic, node
from hypothesis import given, settings
from hypothesis import strategies as st

from mkernel.errors import ArgumentError
from mkernel.topology.model import Bridge, FabricLink, NumaNode, Topology
from mkernel.topology.reshape import (
    oversubscribe,
    reached_together,
    replicate,
    split_by,
    split_into_nodes,
)


def machine(cpus: tuple[int, ...] = (4, 4), gpus: int = 0, nics: int = 0) -> Topology:
    numa, first = [], 0
    for number, count in enumerate(cpus):
        part = tuple(range(first, first + count))
        numa.append(NumaNode(id=number, cpus=part, memory_bytes=1000 * count))
        first += count
    accelerators = tuple(gpu(i) for i in range(gpus))
    return Topology(
        nodes=(node(accelerators, tuple(nic(i) for i in range(nics)), numa=tuple(numa)),)
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_every_node_is_complete(cpus: list[int], nodes: int, ranks: int) -> None:
    whole = machine(tuple(cpus))
    world = split_into_nodes(whole, nodes, ranks, SIM, SOFT)
    assert len(world.nodes) == nodes
    for one in world.nodes:
        assert [a.id for a in one.accelerators] == [f"ascend-sim{i}" for i in range(ranks)]
        assert [a.index for a in one.accelerators] == list(range(ranks))
        assert [n.name for n in one.nics] == ["soft0"]
        assert one.emulated == (nodes > 1)
    everything = whole.nodes[0].cpus
    if len(everything) >= nodes * ranks:
        dealt = [cpu for node in world.nodes for cpu in node.cpus]
        sizes = [len(node.cpus) for node in world.nodes]
        assert sorted(dealt) == list(everything)
        assert max(sizes) - min(sizes) <= 1
    else:
        assert all(node.cpus == everything for node in world.nodes)
    assert Topology.model_validate_json(world.model_dump_json()) == world


def test_shares_follow_numa_nodes_and_carry_memory() -> None:
    one, two = split_into_nodes(machine((4, 4)), 2, 2, SIM, SOFT).nodes
    assert [(n.id, n.cpus, n.memory_bytes) for n in one.numa] == [(0, (0, 1, 2, 3), 4000)]
    assert [(n.id, n.cpus) for n in two.numa] == [(1, (4, 5, 6, 7))]
    assert two.nics[0].numa_node == two.accelerators[1].numa_node == 1


def test_a_prototype_is_numbered_whether_it_was_or_not() -> None:
    for prototype in (SIM, SIM.model_copy(update={"id": "ascend-sim"})):
        (made,) = split_into_nodes(machine(), 1, 2, prototype, None).nodes
        assert [a.id for a in made.accelerators] == ["ascend-sim0", "ascend-sim1"]
        assert made.nics == ()


def test_real_devices_are_dealt_out() -> None:
    whole = machine(gpus=4, nics=4)
    one, two = split_into_nodes(whole, 2, 2, gpu(0), nic(0)).nodes
    assert [a.id for a in one.accelerators + two.accelerators] == [f"cuda{i}" for i in range(4)]
    assert [n.id for n in one.nics] == ["mlx5_0", "mlx5_1"]
    assert [n.id for n in two.nics] == ["mlx5_2", "mlx5_3"]


def test_real_nics_are_shared_where_there_are_fewer_than_nodes() -> None:
    whole = machine(gpus=3, nics=1)
    world = split_into_nodes(whole, 3, 1, None, whole.nodes[0].nics[0])
    assert [[n.id for n in node.nics] for node in world.nodes] == [["mlx5_0"]] * 3


def test_too_few_real_devices() -> None:
    with pytest.raises(ArgumentError, match="at most 3, the number of cuda accelerators of h"):
        split_into_nodes(machine(gpus=3), 2, 2, gpu(0), None)


@pytest.mark.parametrize(("nodes", "ranks", "name"), [(0, 1, "nodes"), (1, -1, "ranks_per_node")])
def test_numbers_below_one(nodes: int, ranks: int, name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        split_into_nodes(machine(), nodes, ranks, SIM, SOFT)


def test_only_one_machine_can_be_split_or_repeated() -> None:
    world = split_into_nodes(machine(), 2, 1, SIM, SOFT)
    with pytest.raises(ArgumentError, match="one machine"):
        split_into_nodes(world, 2, 1, SIM, SOFT)
    with pytest.raises(ArgumentError, match="one machine"):
        replicate(world, 2)


def test_replicate_repeats_the_whole_machine() -> None:
    whole = machine(gpus=2, nics=1)
    world = replicate(whole, 3)
    assert [node.id for node in world.nodes] == [0, 1, 2]
    assert {node.accelerators for node in world.nodes} == {whole.nodes[0].accelerators}
    assert Topology.model_validate_json(world.model_dump_json()) == world
    assert replicate(whole, 1) == whole


def test_links_and_refusals_go_where_both_of_their_ends_go() -> None:
    node = machine(gpus=4).nodes[0]
    ends = [("cuda0", "cuda1"), ("cuda1", "cuda2"), ("cuda2", "switch"), ("cuda3", "host")]
    fabric = tuple(FabricLink(kind="nvlink", ends=each, count=1) for each in ends)
    more = {
        "fabric": fabric,
        "no_p2p": (("cuda0", "cuda3"), ("cuda2", "cuda3")),
        "bridges": (Bridge(id="0000:00:01.0"),),
    }
    whole = Topology(nodes=(node.model_copy(update=more),))
    one, two = split_into_nodes(whole, 2, 2, None, SOFT).nodes
    assert [link.ends for link in one.fabric] == ends[:1]
    assert [link.ends for link in two.fabric] == ends[2:]
    assert (one.no_p2p, two.no_p2p) == ((), (("cuda2", "cuda3"),))
    assert one.bridges == two.bridges == more["bridges"]
    (alone,) = split_into_nodes(whole, 1, 4, None, SOFT).nodes
    assert (alone.fabric, alone.no_p2p) == (fabric, more["no_p2p"])
    for prototype in (SIM, SIM.model_copy(update={"id": "cuda"})):  # whatever its copies are called
        (copies,) = split_into_nodes(whole, 1, 4, prototype, SOFT).nodes
        assert (copies.fabric, copies.no_p2p) == ((), ())


def test_ranks_of_a_device_have_its_links_and_refusals() -> None:
    node = machine(gpus=2).nodes[0]
    fabric = tuple(
        FabricLink(kind="nvlink", ends=each, count=1, gbs=50)
        for each in (("cuda0", "cuda1"), ("cuda1", "switch"))
    )
    more = {
        "accelerators": (*node.accelerators, SIM),
        "fabric": fabric,
        "no_p2p": (("cuda0", "cuda1"),),
    }
    whole = Topology(nodes=(node.model_copy(update=more),))
    assert oversubscribe(whole, 1) == whole
    (shared,) = oversubscribe(whole, 2).nodes
    found = [(one.id, one.index) for one in shared.accelerators if not one.emulated]
    assert found == [("cuda0", 0), ("cuda1", 1), ("cuda0.1", 0), ("cuda1.1", 1)]
    across = {(a, b) for a in ("cuda0", "cuda0.1") for b in ("cuda1", "cuda1.1")}
    ports = {(one, "switch") for one in ("cuda1", "cuda1.1")}
    assert {link.ends for link in shared.fabric} == across | ports
    assert set(shared.no_p2p) == across
    one, two = split_into_nodes(oversubscribe(whole, 2), 2, 2, None, None).nodes
    assert [a.id for a in one.accelerators] == ["cuda0", "cuda1"]
    assert [a.id for a in two.accelerators] == ["cuda0.1", "cuda1.1"]
    with pytest.raises(ArgumentError, match="one machine to share"):
        oversubscribe(replicate(whole, 2), 2)


def apart(count: int, *pairs: tuple[int, int]) -> Topology:
    (whole,) = machine((4, 4), gpus=count, nics=2).nodes
    refused = tuple((f"cuda{one}", f"cuda{other}") for one, other in pairs)
    return Topology(nodes=(whole.model_copy(update={"no_p2p": refused}),))


ALL_OF_FOUR = tuple(itertools.combinations(range(4), 2))


@pytest.mark.parametrize(
    ("pairs", "ranks", "each"),
    [
        ((), 4, 4),
        (((0, 3),), 4, 2),
        (((3, 0),), 3, 3),
        (((1, 2),), 4, 2),
        (((0, 1),), 4, 1),
        (((0, 1),), 3, 1),
        (ALL_OF_FOUR, 4, 1),
        (ALL_OF_FOUR, 1, 1),
    ],
)
def test_ranks_that_reach_each_other_follow_one_another(
    pairs: tuple[tuple[int, int], ...], ranks: int, each: int
) -> None:
    world = apart(4, *pairs)
    assert reached_together(world.nodes, ranks) == each
    assert reached_together((*apart(4).nodes, *world.nodes), ranks) == each, "of every node"


@pytest.mark.parametrize("by_host", [False, True])
def test_nodes_are_split_and_joined_by_their_nics_or_by_host_memory(by_host: bool) -> None:
    whole = apart(4, (0, 2), (0, 3), (1, 2), (1, 3)).nodes[0]
    hosts = Topology(nodes=(whole, whole.model_copy(update={"id": 1, "hostname": "h1"})))
    made = split_by(hosts, 2, 4, by_host=by_host).nodes
    assert [(one.id, one.hostname, one.emulated) for one in made] == [
        (0, "h", True), (1, "h", True), (2, "h1", True), (3, "h1", True),
    ]  # fmt: skip
    devices = [[device.id for device in one.accelerators] for one in made]
    assert devices == [["cuda0", "cuda1"], ["cuda2", "cuda3"]] * 2
    assert not any(one.no_p2p for one in made)
    nics = [[port.id for port in one.nics] for one in made]
    assert nics == ([["soft0"]] * 4 if by_host else [["mlx5_0"], ["mlx5_1"]] * 2)
