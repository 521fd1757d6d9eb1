"""``mkernel plan`` for worlds of a file: backends by device, alternatives, simulation, growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from devices import SIM, SOFT, gpu, node
from devices import nic as port
from devices import world as worlds
from shipped import constants_of

from mkernel.cli.plan import PlanReport, command
from mkernel.errors import ArgumentError, NoRoute, ShapeError, Unsupported
from mkernel.topology.model import Topology
from mkernel.topology.sources.chips import architecture

SHAPE = ("--m", "16384", "--n", "2048", "--k", "8192")


def machine(
    nic: str = "efa", kind: str = "cuda", nodes: int = 1, name: str = "NVIDIA H100"
) -> Topology:
    """Eight accelerators with a NIC each, and a simulator and a soft NIC, as a probe finds them."""
    gpus = (gpu(i, id=f"gpu{i}", kind=kind, name=name) for i in range(8))
    ports = (port(i, id=f"n{i}", kind=nic) for i in range(8))
    return worlds(*[node((SIM, *gpus), (SOFT, *ports))] * nodes)


def run(tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16) -> str:
    file = tmp_path / "machine.json"
    file.write_text((world or machine()).model_dump_json())
    size = ("--nodes", str(nodes), "--ranks-per-node", "8")
    return commands.run(command, "ag_gemm", "--topology", str(file), *size, *SHAPE, *flags)


HOPPER = ("--accelerator", "hopper")
"""Between nodes a prediction only."""


def report(
    tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16
) -> PlanReport:
    text = run(tmp_path, "--json", *flags, world=world, nodes=nodes)
    return PlanReport.model_validate_json(text)


@pytest.mark.parametrize(("nic", "backend"), [("efa", "efa"), ("cx", "cx7"), ("infiniband", "cx7")])
def test_the_nic_backend_is_that_of_the_devices(tmp_path: Path, nic: str, backend: str) -> None:
    made = report(tmp_path, *HOPPER, world=machine(nic)).plan
    assert (made.accelerator, made.nic, made.verbs) == ("hopper", backend, "system")
    assert [seat.accelerator for seat in made.placement.sites[0].seats] == [
        f"gpu{i}" for i in range(8)
    ]
    assert made.placement[127].accelerator == "gpu7"


@pytest.mark.parametrize(
    ("kind", "nodes", "wanted"),
    [
        ("cuda", 1, "hopper"),
        ("cuda", 2, "streams"),
        ("ascend", 1, "streams"),
        ("rocm", 1, "streams"),
    ],
)
def test_the_accelerator_is_what_init_would_choose_there(
    tmp_path: Path, kind: str, nodes: int, wanted: str
) -> None:
    found = report(tmp_path, world=machine(kind=kind, name="chip H100"), nodes=nodes)
    assert (found.plan.accelerator, found.launchable) == (wanted, True)
    assert found.plan.nic is None


def test_what_a_backend_would_do_may_be_hierarchical(tmp_path: Path) -> None:
    made = report(tmp_path, *HOPPER)
    assert made.exchange == "hierarchical", "a node's rows cross its NICs once"
    direct = report(tmp_path, *HOPPER, "--exchange", "direct").plan
    assert direct.prediction is not None
    assert made.plan.prediction is not None
    assert direct.prediction.comm_us > 2 * made.plan.prediction.comm_us


CHIPS = {"NVIDIA A100-SXM4-80GB": "sm_80", "NVIDIA B200": "sm_100", "NVIDIA L4": "sm_89"}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_that_hopper_does_not_run_on(tmp_path: Path, chip: str) -> None:
    """No time of another chip's constants, and it is said that nothing fused runs there."""
    world = machine(name=chip)
    made = report(tmp_path, "--explain", world=world, nodes=1)
    assert (made.plan.accelerator, made.launchable, made.plan.prediction) == ("streams", True, None)
    assert not any(one.predicted_us for one in made.alternatives)
    assert made.notes == (
        f"not on hopper: it has kernels for sm_90 only, not for {chip} ({CHIPS[chip]})",
    )
    asked = report(tmp_path, *HOPPER, world=world, nodes=1)
    assert not asked.launchable
    assert asked.plan.prediction is None
    assert asked.obstacles == (
        f"accelerator 'hopper' has kernels for sm_90 only, not for {chip} ({CHIPS[chip]})",
    )
    text = run(tmp_path, *HOPPER, world=world, nodes=1)
    assert "NOT POSSIBLE, a prediction only" in text
    assert "nothing: no constants of these chips" in text
    for flag in ("--simulate", "--scaling"):
        with pytest.raises(Unsupported, match="no constants of these chips"):
            run(tmp_path, flag, *[str(tmp_path / "s.svg")] * (flag == "--scaling"), world=world)


def test_constants_that_a_user_gives_are_of_the_users_chips(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    given = constants_of("streams").model_copy(update={"name": "mine"})
    file.write_text(given.model_dump_json())
    made = report(tmp_path, "--constants", str(file), world=machine(name="NVIDIA L4")).plan
    assert made.prediction is not None
    assert made.prediction.constants == "mine"


def test_hopper_between_nodes_is_a_prediction_only(tmp_path: Path) -> None:
    alone = report(tmp_path, *HOPPER, nodes=1)
    assert (alone.launchable, alone.obstacles) == (True, ())
    apart = report(tmp_path, *HOPPER, "--exchange", "direct", nodes=2)
    assert not apart.launchable
    assert len(apart.obstacles) == 1
    assert "no path between nodes" in apart.obstacles[0]
    text = run(tmp_path, *HOPPER, nodes=2)
    assert "NOT POSSIBLE, a prediction only" in " ".join(text.split())


def test_an_exchange_that_no_backend_has_is_marked(tmp_path: Path) -> None:
    assert report(tmp_path, nodes=4).exchange == "direct"
    asked = report(tmp_path, "--exchange", "hierarchical", nodes=4)
    assert asked.exchange == "hierarchical"
    assert not asked.launchable
    assert asked.obstacles == ("no accelerator backend runs the exchange 'hierarchical'",)


def test_a_simulator_runs_on_no_device(tmp_path: Path) -> None:
    asked = report(tmp_path, "--accelerator", "ascend", world=machine("cx", "ascend", name="NPU"))
    assert asked.obstacles[0] == "accelerator 'ascend' is a simulator, and NPU is a real device"


def test_a_world_has_all_accelerators_of_its_nodes(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(machine().model_dump_json())
    for flags, world in (
        ((), (2, 8)),
        (("--nodes", "64"), (64, 8)),
        (("--ranks-per-node", "2"), (2, 2)),
    ):
        asked = ("--topology", str(file), *flags, "--m", "65536", "--json")
        made = PlanReport.model_validate_json(commands.run(command, "ag_gemm", *asked)).plan
        assert (made.nodes, made.ranks_per_node) == world


def test_management_ports_are_no_rails(tmp_path: Path) -> None:
    one = machine()
    slow = tuple(port(i, id=f"ib{i}", kind="infiniband", speed_gbps=25) for i in range(2))
    more = one.nodes[0].model_copy(update={"nics": slow + one.nodes[0].nics})
    found = report(tmp_path, *HOPPER, world=worlds(more), nodes=2)
    seats = found.plan.placement.sites[0].seats
    assert [seat.nics for seat in seats] == [(f"n{i}",) for i in range(8)]
    assert found.plan.nic == "efa"
    assert found.notes == (
        "ib0, ib1: no rails: infiniband devices, which nic 'efa' does not drive",
    )
    with pytest.raises(NoRoute, match="'cx7' drives no RDMA port"):
        report(tmp_path, *HOPPER, "--nic", "cx7", nodes=2)


def test_a_process_group_between_nodes(tmp_path: Path) -> None:
    simulated = report(tmp_path, "--simulate", nodes=2)
    assert simulated.simulation is not None
    assert simulated.simulation.time_us >= simulated.simulation.floor_us


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("10de:2330", "sm_90"), ("10de:2335", "sm_90"), ("10de:20b2", "sm_80"), ("10de:2901", "sm_100"),
        ("10de:27b8", "sm_89"), ("NVIDIA H200", "sm_90"), ("NVIDIA GH200 480GB", "sm_90"),
        ("NVIDIA L40S", "sm_89"), ("Tesla V100-SXM2-16GB", "sm_70"), ("GH100 [H100 SXM5]", "sm_90"),
        ("NVIDIA A10G", "sm_86"), ("1002:74a1", None), ("chip", None), ("NVIDIA XH100X", None),
    ],
)  # fmt: skip
def test_chips_by_id_and_by_name(name: str, wanted: str | None) -> None:
    device = gpu(0, name=name)
    assert architecture(device) == wanted
    told = device.model_copy(update={"architecture": "sm_75"})
    assert architecture(told) == "sm_75"


def test_json_with_everything_that_was_asked_for(tmp_path: Path) -> None:
    text = run(
        tmp_path, *HOPPER, "--json", "--explain", "--simulate",
        "--trace", str(tmp_path / "trace.json"), "--scaling", str(tmp_path / "growth.svg"),
    )  # fmt: skip
    found = PlanReport.model_validate_json(text)
    assert found.simulation is not None
    assert found.simulation.time_us >= found.simulation.floor_us
    by_name = {one.option: one for one in found.alternatives if one.decision == "exchange"}
    assert by_name["hierarchical"].chosen
    times = [by_name[name].predicted_us for name in ("hierarchical", "direct")]
    assert times == sorted(times, key=float)
    assert [point.nodes for point in found.scaling] == [1, 2, 4, 8, 16]
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    assert {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"} == {
        "comm",
        "compute",
    }
    assert "not measured" in trace["otherData"]["clock"]
    assert b"<svg" in (tmp_path / "growth.svg").read_bytes()


def test_for_people(tmp_path: Path) -> None:
    text = run(tmp_path, *HOPPER, "--explain", "--simulate")
    for wanted in ("exchange", "hierarchical", "chosen", "simulated", "floor", "exposed"):
        assert wanted in text


def test_a_world_of_a_thousand_nodes_is_small(tmp_path: Path) -> None:
    text = run(tmp_path, *HOPPER, "--json", nodes=1024)
    made = PlanReport.model_validate_json(text).plan
    assert made.world_size == 8192
    assert sum(one.pairs for one in made.routes.classes) == 8192 * 8191
    assert len(text) < 200_000
    assert made.route(0, 8191).rails[0].src_nic == "n0"


@pytest.mark.parametrize(
    ("flags", "world", "error", "message"),
    [
        (("--exchange", "tree"), None, ArgumentError, "one of: auto, direct, hierarchical"),
        ((), machine(nodes=3), ArgumentError, "--nodes = 16 .*3, the nodes of"),
        (("--m", "100"), None, ShapeError, "m = 100"),
        (("--path", "library"), None, Unsupported, "library path"),
    ],
)
def test_what_cannot_be_planned_is_said(
    tmp_path: Path, flags: tuple[str, ...], world: Topology | None, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, *flags, world=world)
