from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_worlds import MACHINE, make, world
from rich.console import Console, RenderableType

from mkernel.plan import render
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology


def lines(renderable: RenderableType) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 2), (3, 2), (64, 8)])
def test_both_fit_into_15_lines_and_say_what_matters(nodes: int, ranks: int) -> None:
    made = make(nodes, ranks, m=128 * nodes * ranks)
    text = lines(render.plan(made))
    assert len(text) <= 15
    everything = "\n".join(text)
    for wanted in ("all_gather_gemm", "float16 → float32", "predicted", made.digest()[:16]):
        assert wanted in everything
    tree = lines(render.topology(world(nodes, ranks)))
    assert len(tree) <= 15
    assert f"{nodes} node" in tree[0]
    assert "ascend-sim0" in "\n".join(tree)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_any_machine_fits_into_15_lines(accelerators: int, nics: int, nodes: int) -> None:
    made = tuple(
        Node(
            id=index,
            hostname="h",
            numa=(NumaNode(id=0, cpus=(0, 1)),),
            accelerators=tuple(
                Accelerator(id=f"a{i}", kind="cuda", name=f"model {i}", index=i)
                for i in range(accelerators)
            ),
            nics=tuple(
                Nic(id=f"n{i}", kind="cx", name=f"n{i}", speed_gbps=i + 1) for i in range(nics)
            ),
        )
        for index in range(nodes)
    )
    assert len(lines(render.topology(Topology(nodes=made)))) <= 15


def test_names_are_not_markup() -> None:
    node = MACHINE.nodes[0].model_copy(update={"hostname": "[bold]h[/nothing]"})
    assert "[bold]h[/nothing]" in lines(render.topology(Topology(nodes=(node,))))[1]


def test_a_nic_that_is_down_is_shown_as_such() -> None:
    nic = Nic(id="mlx5_0", kind="cx", name="mlx5_0", active=False, speed_gbps=400, numa_node=1)
    node = MACHINE.nodes[0].model_copy(update={"nics": (nic,)})
    text = "\n".join(lines(render.topology(Topology(nodes=(node,)))))
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
