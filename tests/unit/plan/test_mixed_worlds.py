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
from mkernel.plan.mixed import MixedSchedule, wire_gbs
from mkernel.topology.model import Accelerator, Nic, Node, Topology


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
        ((node(some("cuda")), node()), "node 0 has 8 cuda, node 1 has none"),
        ((node(), node(some("cuda"))), "node 0 has none, node 1 has 8 cuda"),
        ((node(some("cuda")), node((SIM,))), "node 0 has 8 cuda, node 1 has none"),
    ],
)
def test_a_node_without_an_accelerator(
    tmp_path: Path, nodes: tuple[Node, ...], message: str
) -> None:
    with pytest.raises(Unsupported, match=message) as error:
        plan(tmp_path, *nodes)
    assert "leave nodes without out" in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "accelerators", "ranks"),
    [
        ((node(some("cuda")), node(some("ascend"))), ("hopper", "streams"), 8),
        (
            (node(some("cuda")), node(some("rocm", 4)), node(some("cuda"))),
            ("hopper", "streams", "hopper"),
            4,
        ),
        (
            (node(some("cuda", 2)), node((*some("ascend", 1), *some("rocm", 1)))),
            ("hopper", "streams", "streams"),
            1,
        ),
    ],
)
def test_each_kind_is_a_node_of_its_own(
    tmp_path: Path, nodes: tuple[Node, ...], accelerators: tuple[str, ...], ranks: int
) -> None:
    found = plan(tmp_path, *nodes, flags=("--m", "960")).plan
    assert found is not None
    assert (found.nodes, found.ranks_per_node) == (len(accelerators), ranks)
    assert isinstance(found.schedule, MixedSchedule)
    assert found.schedule.accelerators == accelerators
    assert found.accelerator == "hopper+streams"
    kinds = [found.placement[node * ranks].accelerator for node in range(found.nodes)]
    assert len(set(kinds)) == len({one.kind for each in nodes for one in each.accelerators})
    assert (found.nic, found.verbs) == ("tcp", "sockets")
    assert found.route(0, found.world_size - 1).staged == ("source", "destination")


def test_two_kinds_of_one_machine_are_two_nodes_where_both_are_named(tmp_path: Path) -> None:
    both = node((*some("rocm", 2), *some("cuda", 4)), ports("cx"))
    flags = ("--accelerator", "streams+hopper", "--ranks-per-node", "2")
    found = plan(tmp_path, both, flags=flags).plan
    assert found is not None
    assert isinstance(found.schedule, MixedSchedule)
    assert found.schedule.accelerators == ("streams", "streams")
    assert [found.placement[rank].accelerator for rank in (0, 2)] == ["rocm0", "cuda0"]
    assert found.nic == "cx7"


def test_machines_of_several_files_share_the_nodes(tmp_path: Path) -> None:
    files = []
    for kind in ("cuda", "ascend"):
        files.append(tmp_path / f"{kind}.json")
        one = node(some(kind), ports("cx"), hostname=kind)
        files[-1].write_text(Topology(nodes=(one,)).model_dump_json())
    given = [flag for file in files for flag in ("--topology", str(file))]
    text = commands.run(command, "gemm_ar", *given, "--nodes", "8", "--json")
    found = PlanReport.model_validate_json(text)
    assert found.plan is not None
    assert isinstance(found.plan.schedule, MixedSchedule)
    assert found.plan.schedule.accelerators == ("hopper",) * 4 + ("streams",) * 4
    assert found.plan.nic == "cx7"
    assert "speed of a rank on streams: unknown" in found.notes
    assert any("TFLOP/s in float16" in note for note in found.notes)
    with pytest.raises(MkernelError, match="nodes = 3 is not legal; expected a multiple of 2"):
        commands.run(command, "gemm_ar", *given, "--nodes", "3")
    shown = commands.run(command, "gemm_ar", *given, "--nodes", "8")
    assert "wire" in shown
    assert "50 GB/s a rank (predicted)" in shown
    assert "node 4 · ascend" in shown


@pytest.mark.parametrize("nodes", [1, 2])
def test_kinds_beside_the_one_that_is_planned_are_noted(tmp_path: Path, nodes: int) -> None:
    both = node((*some("rocm", 1), *some("cuda", 4), SIM), ports("cx"))
    found = plan(tmp_path, *[both] * nodes)
    assert found.plan is not None
    assert found.plan.placement[0].accelerator == "cuda0"
    where = "nodes 0 to 1 have" if nodes > 1 else "node 0 has"
    assert (
        f"left out beside cuda: {where} 1 rocm: a world takes one kind that all have; "
        "--accelerator a+b gives each kind a node of its own"
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
    """TCP joins them, as fast as the fastest port that runs Ethernet, which a node's ranks share."""
    slow = port(9, id="eth0", name="eth0", kind="ethernet", speed_gbps=80)
    nodes = [node(some("cuda"), (*ports(kind), slow)) for kind in kinds]
    found = plan(tmp_path, *nodes, flags=("--accelerator", "hopper")).plan
    assert found is not None
    assert (found.accelerator, found.nic) == ("hopper+hopper", "tcp")
    assert wire_gbs(found) == 10 / 8
    with pytest.raises(NoRoute) as error:
        plan(tmp_path, *nodes, flags=("--accelerator", "hopper", "--nic", "cx7"))
    said = str(error.value)
    assert f"node 0 has 8 {kinds[0]} NIC ports, node 1 has 8 {kinds[1]} NIC ports" in said
    assert "TCP joins the nodes" in said
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


@pytest.mark.parametrize(
    ("op", "machines", "accelerator", "wire"),
    [
        ("gemm_rs", ("p5", "910b-8"), None, "tcp"),
        ("gemm_ar", ("p5", "p4d"), "hopper+cuda", "efa"),
        ("ag_gemm", ("p5", "p4d"), "hopper+cuda", "efa"),
    ],
)
def test_shards_are_compared_with_each_half_alone(
    op: str, machines: tuple[str, str], accelerator: str | None, wire: str
) -> None:
    """Products take longer than the wire here, and by speed those of both kinds end together."""
    sizes = ("--m", "4096", "--n", str(1 << 20), "--k", str(1 << 22), "--nodes", "16", "--simulate")
    flags = [flag for name in machines for flag in ("--topology", name)]
    flags += ["--accelerator", accelerator] if accelerator else []
    found = PlanReport.model_validate_json(commands.run(command, op, *flags, *sizes, "--json"))
    assert found.plan is not None
    assert found.plan.nic == wire
    assert found.plan.prediction is not None
    assert not found.plan.prediction.measured
    even, by_speed, fast, slow = found.alternatives
    assert even.chosen
    assert even.predicted_us == found.plan.prediction.pipelined_us
    assert even.option.startswith("even: ")
    assert fast.option.startswith("8 x NVIDIA H100 SXM5 80 GB alone, on ")
    assert all(one.predicted_us for one in found.alternatives)
    assert by_speed.predicted_us < fast.predicted_us < even.predicted_us < slow.predicted_us
    own = [int(each.rpartition(" on ")[0].split()[-1]) for each in by_speed.option.split(",")]
    assert sum(own) == 2 << (20 if op == "ag_gemm" else 22)
    table = commands.run(command, op, *flags, *sizes)
    assert "predicted" in table
    assert "by speed: " in table


def test_nothing_is_compared_where_a_speed_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="nobody says how fast a rank on 'streams' is"):
        plan(tmp_path, node(some("cuda")), node(some("rocm")), flags=("--simulate",))
