"""Nodes that are unlike: what ``mkernel plan`` takes of them, and what it says that no world has."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest
from devices import SIM, SOFT, gpu, node
from devices import nic as port
from devices import world as worlds

from mkernel.cli.plan import PlanReport, command
from mkernel.errors import MkernelError, NoRoute, Unsupported
from mkernel.topology.model import Accelerator, Nic, Node


def some(kind: str, count: int = 8, name: str = "NVIDIA H100") -> tuple[Accelerator, ...]:
    return tuple(gpu(i, id=f"{kind}{i}", kind=kind, name=name) for i in range(count))


def ports(kind: str, count: int = 8) -> tuple[Nic, ...]:
    return tuple(port(i, id=f"{kind}{i}", name=f"{kind}{i}", kind=kind) for i in range(count))


def plan(tmp_path: Path, *nodes: Node, flags: tuple[str, ...] = ()) -> PlanReport:
    file = tmp_path / "machine.json"
    file.write_text(worlds(*nodes).model_dump_json())
    given = ("ag_gemm", "--topology", str(file), "--json", *flags)
    return PlanReport.model_validate(json.loads(commands.run(command, *given)))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((node(some("cuda")), node(some("ascend"))), "node 0 has 8 cuda, node 1 has 8 ascend"),
        (
            (node(some("cuda")), node(some("rocm", 4)), node(some("cuda"))),
            "nodes 0, 2 have 8 cuda, node 1 has 4 rocm",
        ),
        ((node(some("cuda")), node()), "node 0 has 8 cuda, node 1 has none"),
        ((node(), node(some("cuda"))), "node 0 has none, node 1 has 8 cuda"),
        (
            (node(some("cuda", 2)), node((*some("ascend", 1), *some("rocm", 1)))),
            "node 0 has 2 cuda, node 1 has 1 ascend and 1 rocm",
        ),
        ((node(some("cuda")), node((SIM,))), "node 0 has 8 cuda, node 1 has none"),
    ],
)
def test_nodes_without_a_kind_in_common(
    tmp_path: Path, nodes: tuple[Node, ...], message: str
) -> None:
    with pytest.raises(Unsupported, match=message) as error:
        plan(tmp_path, *nodes)
    assert "worlds of several kinds of accelerators are not supported" in str(error.value)


@pytest.mark.parametrize("nodes", [1, 2])
def test_kinds_beside_the_one_that_is_planned_are_noted(tmp_path: Path, nodes: int) -> None:
    both = node((*some("rocm", 1), *some("cuda", 4), SIM), ports("cx"))
    found = plan(tmp_path, *[both] * nodes)
    assert found.plan is not None
    assert found.plan.placement[0].accelerator == "cuda0"
    where = "nodes 0 to 1 have" if nodes > 1 else "node 0 has"
    assert (
        f"left out beside cuda: {where} 1 rocm: worlds of several kinds of accelerators are not "
        "supported"
    ) in found.notes


def test_the_kind_is_one_that_all_nodes_have(tmp_path: Path) -> None:
    mixed = node((*some("rocm", 4), *some("cuda", 2)), ports("cx"))
    found = plan(tmp_path, mixed, node(some("cuda", 2), ports("cx")))
    assert found.plan is not None
    assert (found.plan.nodes, found.plan.ranks_per_node) == (2, 2)


def test_unlike_numbers_of_accelerators_are_noted(tmp_path: Path) -> None:
    nodes = [node(some("cuda", count), ports("cx")) for count in (8, 4)]
    found = plan(tmp_path, *nodes)
    assert found.plan is not None
    assert found.plan.ranks_per_node == 4
    assert (
        "4 ranks a node, because node 0 has 8 accelerators, node 1 has 4 accelerators: nodes of "
        "unlike numbers of ranks are not supported"
    ) in found.notes
    with pytest.raises(MkernelError, match="at most 4, the number of accelerators of node 1"):
        plan(tmp_path, *nodes, flags=("--ranks-per-node", "8"))


@pytest.mark.parametrize("kinds", [("efa", "cx"), ("cx", "efa")])
def test_nodes_whose_nics_are_of_unlike_kinds(tmp_path: Path, kinds: tuple[str, str]) -> None:
    nodes = [node(some("cuda"), ports(kind)) for kind in kinds]
    with pytest.raises(NoRoute) as error:
        plan(tmp_path, *nodes, flags=("--accelerator", "hopper"))
    said = str(error.value)
    assert f"node 0 has 8 {kinds[0]} NIC ports, node 1 has 8 {kinds[1]} NIC ports" in said
    assert "NICs of unlike kinds are not supported" in said
    assert "has no NIC" not in said


def test_a_node_that_really_has_no_nic_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NoRoute, match="node 1 has no NIC"):
        plan(
            tmp_path,
            node(some("cuda"), (*ports("cx"), SOFT)),
            node(some("cuda")),
            flags=("--accelerator", "hopper"),
        )


def test_unlike_chips_are_named(tmp_path: Path) -> None:
    nodes = [node(some("cuda", name=name), ports("cx")) for name in ("NVIDIA H100", "NVIDIA A100")]
    found = plan(tmp_path, *nodes, flags=("--accelerator", "hopper"))
    assert found.what_if is not None
    assert any("sm_80" in sentence for sentence in found.what_if.missing)
