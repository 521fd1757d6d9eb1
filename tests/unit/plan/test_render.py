from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from devices import gpu, nic, node
from devices import world as many
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_worlds import MACHINE, make, world
from rich.console import Console, RenderableType

from mkernel.backends.accelerators.streams.schedule import GatherSchedule
from mkernel.plan import render
from mkernel.plan.model import GemmShape, SumShape
from mkernel.topology.model import Topology


def lines(renderable: RenderableType) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 2), (3, 2), (64, 8)])
def test_both_fit_into_15_lines_and_say_what_matters(nodes: int, ranks: int) -> None:
    made = make(nodes, ranks, m=128 * nodes * ranks)
    text = lines(render.plan(made, verbose=True))
    assert len(text) <= 15
    everything = "\n".join(text)
    assert made.digest()[:16] not in "\n".join(lines(render.plan(made)))
    for wanted in ("all_gather_gemm", "float16 → float32", "predicted", made.digest()[:16]):
        assert wanted in everything
    tree = lines(render.topology(world(nodes, ranks)))
    assert len(tree) <= 15
    assert f"{nodes} node" in tree[0]
    assert "ascend-sim0" in "\n".join(tree)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_any_machine_fits_into_15_lines(accelerators: int, nics: int, nodes: int) -> None:
    one = node(
        tuple(gpu(i, name=f"model {i}") for i in range(accelerators)),
        tuple(nic(i, speed_gbps=i + 1) for i in range(nics)),
    )
    assert len(lines(render.topology(many(*[one] * nodes)))) <= 15


def test_what_a_plan_makes_no_use_of_is_shown_where_all_of_it_is() -> None:
    part = GatherSchedule(
        rows_per_chunk=8,
        order="node",
        peers_together=False,
        products_in_flight=2,
        head_start_cycles=0,
    )
    for unused in (True, False):
        shown = render._schedule(part, unused=unused)
        assert "products_in_flight 2" in shown
        assert ("head_start_cycles 0" in shown) is ("peers_together no" in shown) is unused


@pytest.mark.parametrize("several", [False, True])
def test_a_numa_node_is_named_where_there_are_several(several: bool) -> None:
    one = node((gpu(0, numa_node=0), gpu(1, numa_node=int(several))))
    assert ("· NUMA 0" in "\n".join(lines(render.topology(many(one))))) == several


def test_names_are_not_markup() -> None:
    named = MACHINE.nodes[0].model_copy(update={"hostname": "[bold]h[/nothing]"})
    assert "[bold]h[/nothing]" in lines(render.topology(Topology(nodes=(named,))))[1]


def test_a_nic_that_is_down_is_shown_as_such() -> None:
    down = node(nics=(nic(0, active=False, numa_node=1),))
    text = "\n".join(lines(render.topology(many(down))))
    assert "mlx5_0: NIC (cx) 400 Gb/s DOWN · NUMA 1" in text


@given(st.sets(st.integers(0, 50)))
def test_ranges(numbers: set[int]) -> None:
    shown = render.ranges(sorted(numbers))
    back: set[int] = set()
    for part in filter(None, shown.split(",")):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == numbers
    assert render.ranges([0, 1, 2, 5]) == "0-2,5"


@pytest.mark.parametrize(
    ("name", "kind", "emulated", "shown"),
    [
        ("H100", "cuda", False, "H100 (cuda)"),
        ("cuda device", "cuda", False, "cuda device"),
        ("H100", "cuda", True, "H100 (cuda, simulated)"),
        ("simulated cuda", "cuda", True, "simulated cuda"),
        ("host cuda", "cuda", True, "host cuda"),
    ],
)
def test_a_simulated_device_is_said_to_be_one(
    name: str, kind: str, emulated: bool, shown: str
) -> None:
    device = gpu(0, kind=kind, name=name).model_copy(update={"emulated": emulated})
    assert render.accelerator_name(device) == shown


def test_what_a_node_has_not_is_said() -> None:
    for accelerators, nics in (((), (nic(0),)), ((gpu(0),), ()), ((gpu(0),), (nic(0),))):
        text = "\n".join(lines(render.topology(many(node(accelerators, nics)))))
        assert ("no accelerator" in text, "no NIC" in text) == (not accelerators, not nics)


def test_ops_that_are_no_products_show_their_sizes_by_name() -> None:
    made: Any = SimpleNamespace(shape=SumShape(m=64, n=32))
    assert render.sizes(made) == "m 64, n 32"
    made.shape = GemmShape(m=64, n=32, k=16)
    assert render.sizes(made) == "M 64 x N 32 x K 16"


def test_nodes_are_shown_as_far_as_there_is_room() -> None:
    small = node((gpu(0),), ())
    text = "\n".join(lines(render.topology(many(small, small))))
    assert "more nodes" not in text
    assert "node 1" in text
    large = node(tuple(gpu(i, name=f"model {i}") for i in range(20)))
    text = "\n".join(lines(render.topology(many(large, large, small, small))))
    assert "model 0" in text
    assert "and 1 more of these" in text
    assert "node 2" in text  # another kind of node
    assert "and 1 more nodes" in text


@pytest.mark.parametrize("links", [(), ("a NIC", "a switch")])
def test_a_simulation_names_its_busiest_links(links: tuple[str, ...]) -> None:
    found: Any = SimpleNamespace(
        time_us=9.0, floor_us=5.0, exchange="direct", constants="modelled", compute_us=5.0,
        communication_us=7.0, exposed_us=4.0, simulated_ranks=2, messages=3,
        links=[SimpleNamespace(name=name, utilization=0.5) for name in links],
    )  # fmt: skip
    text = "\n".join(lines(render.simulation(found)))
    assert ("a NIC 50 %; a switch 50 %" in text, "none" in text) == (bool(links), not links)
