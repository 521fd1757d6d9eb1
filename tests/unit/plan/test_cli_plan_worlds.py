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

from mkernel.backends.accelerators.hopper.schedule import GatherSchedule
from mkernel.cli.plan import PlanReport, command
from mkernel.errors import (
    ArgumentError,
    BackendUnavailable,
    NoRoute,
    ShapeError,
    UnknownBackend,
    Unsupported,
)
from mkernel.plan.missing import WhatIf
from mkernel.plan.model import LaunchPlan
from mkernel.topology.model import Topology
from mkernel.topology.sources.chips import architecture, cores
from mkernel.topology.world_map import world_map

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
"""Between nodes a what-if."""


def report(
    tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16
) -> PlanReport:
    text = run(tmp_path, "--json", *flags, world=world, nodes=nodes)
    return PlanReport.model_validate_json(text)


def planned(
    tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16
) -> LaunchPlan:
    found = report(tmp_path, *flags, world=world, nodes=nodes)
    assert found.what_if is None
    assert found.plan is not None
    return found.plan


def what_if(tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16) -> WhatIf:
    found = report(tmp_path, *flags, world=world, nodes=nodes)
    assert found.plan is None
    assert found.what_if is not None
    return found.what_if


@pytest.mark.parametrize(("nic", "backend"), [("efa", "efa"), ("cx", "cx7"), ("infiniband", "cx7")])
def test_the_nic_backend_is_that_of_the_devices(tmp_path: Path, nic: str, backend: str) -> None:
    made = what_if(tmp_path, *HOPPER, world=machine(nic))
    assert (made.accelerator, made.nic, made.verbs) == ("hopper", backend, "system")
    assert [seat.accelerator for seat in made.placement.sites[0].seats] == [
        f"gpu{i}" for i in range(8)
    ]
    assert made.placement[127].accelerator == "gpu7"


@pytest.mark.parametrize(
    ("kind", "nodes", "wanted"),
    [
        ("cuda", 1, "hopper"),
        ("cuda", 2, "hopper"),
        ("cuda", 4, "streams"),  # more ranks than kernels take
        ("ascend", 1, "streams"),
        ("rocm", 1, "streams"),
    ],
)
def test_the_accelerator_is_what_init_would_choose_there(
    tmp_path: Path, kind: str, nodes: int, wanted: str
) -> None:
    found = planned(tmp_path, world=machine(kind=kind, name="chip H100"), nodes=nodes)
    by_nics = wanted == "hopper" and nodes > 1
    assert (found.accelerator, found.nic) == (wanted, "efa" if by_nics else None)


def test_what_a_backend_would_do_may_be_hierarchical(tmp_path: Path) -> None:
    made = what_if(tmp_path, *HOPPER)
    assert made.exchange == "hierarchical", "a node's rows cross its NICs once"
    assert len(made.missing) == 1, "the number of ranks"
    direct = what_if(tmp_path, *HOPPER, "--exchange", "direct")
    assert len(direct.missing) == 1
    assert direct.prediction is not None
    assert made.prediction is not None
    assert direct.prediction.comm_us > 2 * made.prediction.comm_us


CHIPS = {"NVIDIA A100-SXM4-80GB": "sm_80", "NVIDIA B200": "sm_100", "NVIDIA L4": "sm_89"}
CARDS = {name: (f"{card}, never measured", False)
         for name, card in (("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA B200", "b200"))}  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_that_hopper_does_not_run_on(tmp_path: Path, chip: str) -> None:
    """No time of another chip's constants, and it is said that hopper does not run there."""
    world = machine(name=chip)
    made = report(tmp_path, "--explain", world=world, nodes=1)
    assert made.plan is not None
    assert made.plan.accelerator == "cuda"
    times = made.plan.prediction
    assert (times and (times.constants, times.measured)) == CARDS.get(chip)
    assert made.notes == (
        f"not on hopper: it has kernels for sm_90 only, not for {chip} ({CHIPS[chip]})",
    )
    asked = what_if(tmp_path, *HOPPER, world=world, nodes=1)
    assert asked.prediction is None
    assert asked.missing == (
        f"accelerator 'hopper' has kernels for sm_90 only, not for {chip} ({CHIPS[chip]})",
    )
    text = run(tmp_path, *HOPPER, world=world, nodes=1)
    assert "what if" in text
    assert "launch plan" not in text
    assert "digest" not in text
    assert "has kernels for sm_90 only" in " ".join(text.split())
    assert "nothing: no constants of these chips" in text
    for flag in ("--simulate", "--scaling") if chip not in CARDS else ():
        with pytest.raises(Unsupported, match="brings no constants of these chips"):
            run(tmp_path, flag, *[str(tmp_path / "s.svg")] * (flag == "--scaling"), world=world)


def test_constants_that_a_user_gives_are_of_the_users_chips(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    given = constants_of("streams").model_copy(update={"name": "mine"})
    file.write_text(given.model_dump_json())
    made = planned(tmp_path, "--constants", str(file), world=machine(name="NVIDIA L4"))
    assert made.prediction is not None
    assert made.prediction.constants == "mine"


@pytest.mark.parametrize(("nodes", "wanted"), [(1, "hopper"), (2, "streams")])
def test_what_runs_on_one_node_is_left_to_the_next_on_several(
    tmp_path: Path, nodes: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``hopper`` has it on one node; named alone, it says so."""
    file = tmp_path / "machine.json"
    file.write_text(machine().model_dump_json())

    def planned(*flags: str) -> PlanReport:
        text = commands.run(
            command, "all_reduce", "--json", "--topology", str(file), "--nodes", str(nodes),
            "--ranks-per-node", "8", "--m", "256", "--n", "8192", *flags,
        )  # fmt: skip
        return PlanReport.model_validate_json(text)

    monkeypatch.setenv("MKERNEL_PATH", "library")  # of GEMM ops
    found = planned().plan
    assert found is not None
    assert found.accelerator == wanted
    named = planned(*HOPPER)
    if nodes == 1:
        assert named.plan is not None
        return
    assert named.what_if is not None
    told = ("accelerator 'hopper' runs all_reduce on one node, not on 2",)
    assert named.what_if.missing == told


def test_more_ranks_than_hopper_takes_are_a_what_if(tmp_path: Path) -> None:
    assert planned(tmp_path, *HOPPER, nodes=2).accelerator == "hopper"
    (why,) = what_if(tmp_path, *HOPPER, "--exchange", "direct", nodes=4).missing
    assert why == "accelerator 'hopper' runs worlds of at most 16 ranks, not of 32"
    text = " ".join(run(tmp_path, *HOPPER, nodes=4).split())
    assert "what if all_gather_gemm" in text
    assert f"missing {why}" in text
    alone = " ".join(run(tmp_path, *HOPPER, nodes=1).split())
    assert "launch plan all_gather_gemm" in alone
    assert "missing" not in alone


def test_the_exchange_of_a_plan_is_chosen_by_prediction_or_asked_for(tmp_path: Path) -> None:
    found = report(tmp_path, *HOPPER, "--explain", nodes=2)
    assert found.plan is not None
    times = {
        one.option: one.predicted_us for one in found.alternatives if one.decision == "exchange"
    }
    assert list(times) == ["direct", "hierarchical"]
    (chosen,) = (
        one.option for one in found.alternatives if one.decision == "exchange" and one.chosen
    )
    assert found.plan.part(GatherSchedule).exchange == chosen == min(times, key=times.__getitem__)
    for wanted in ("direct", "hierarchical"):
        made = planned(tmp_path, *HOPPER, "--exchange", wanted, nodes=2)
        assert made.part(GatherSchedule).exchange == wanted


def test_a_setting_asks_for_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for wanted in ("direct", "hierarchical"):
        monkeypatch.setenv("MKERNEL_EXCHANGE", wanted)
        made = planned(tmp_path, *HOPPER, nodes=2)
        assert made.part(GatherSchedule).exchange == wanted
        digests.add(made.digest())
    assert len(digests) == 2


def test_chips_that_no_backend_knows(tmp_path: Path) -> None:
    """No other chip stands in for them, and the backends that there are say why they do not fit."""
    world = machine(kind="tpu", name="v9")
    why = {
        "ascend": "is chosen by name only",
        "hopper": "runs on cuda devices, and v9 is tpu",
        "streams": "runs on cuda, rocm, ascend, cpu devices, and v9 is tpu",
    }
    with pytest.raises(BackendUnavailable, match="no backend that `auto` may choose") as caught:
        run(tmp_path, world=world)
    for name, misfit in why.items():
        assert f"{name}: {misfit}" in str(caught.value)
    asked = what_if(tmp_path, "--accelerator", "streams", world=world)
    assert asked.missing == (f"accelerator 'streams' {why['streams']}",)


def test_a_simulator_runs_on_no_device(tmp_path: Path) -> None:
    asked = what_if(tmp_path, "--accelerator", "ascend", world=machine("cx", "ascend", name="NPU"))
    assert asked.missing[0] == "accelerator 'ascend' is a simulator, and NPU is a real device"
    assert asked.prediction is None


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
        assert made is not None
        assert (made.nodes, made.ranks_per_node) == world


def test_management_ports_are_no_rails(tmp_path: Path) -> None:
    one = machine()
    slow = tuple(port(i, id=f"ib{i}", kind="infiniband", speed_gbps=25) for i in range(2))
    more = one.nodes[0].model_copy(update={"nics": slow + one.nodes[0].nics})
    found = report(tmp_path, *HOPPER, world=worlds(more), nodes=2)
    assert found.plan is not None
    seats = found.plan.placement.sites[0].seats
    assert [seat.nics for seat in seats] == [(f"n{i}",) for i in range(8)]
    assert found.plan.nic == "efa"
    assert found.notes == (
        "ib0, ib1: no rails: infiniband devices, which nic 'efa' does not drive",
        "nobody says how many cores NVIDIA H100 (sm_90) has: 132 are assumed",
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


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("10de:20b0", 108), ("GA100 [A100 SXM4 40GB]", 108), ("10de:2330", 132), ("NVIDIA H200", 132),
        ("NVIDIA H100 PCIe", 114), ("NVIDIA H100", None), ("NVIDIA H20", 78), ("NVIDIA L40", None),
        ("1002:74a1", None),
    ],
)  # fmt: skip
def test_cores_by_id_and_by_name(name: str, wanted: int | None) -> None:
    device = gpu(0, name=name)
    assert cores(device) == wanted
    assert cores(device.model_copy(update={"cores": 7})) == 7


def test_a_plan_has_the_cores_of_the_chips_that_are_described(tmp_path: Path) -> None:
    """Not those of the chip that the backend's constants are of."""
    for name, count in (("NVIDIA H20", 78), ("NVIDIA H200", 132)):
        found = report(tmp_path, *HOPPER, world=machine(name=name), nodes=1)
        assert found.plan is not None
        assert found.plan.schedule is not None
        assert found.plan.schedule.model_dump()["blocks"] == count
        assert found.notes == ()
    mixed = machine().nodes[0]
    fewer = mixed.accelerators[1].model_copy(update={"cores": 100})
    known = (one.model_copy(update={"cores": 120}) for one in mixed.accelerators[2:])
    world = worlds(mixed.model_copy(update={"accelerators": (fewer, *known)}))
    assert world_map(world, 8, None).cores == 100
    unknown = report(tmp_path, *HOPPER, world=machine(name="NVIDIA H100"), nodes=1)
    assert unknown.notes == ("nobody says how many cores NVIDIA H100 (sm_90) has: 132 are assumed",)


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


@pytest.mark.parametrize(
    ("flags", "world", "error", "message"),
    [
        (("--exchange", "tree"), None, ArgumentError, "one of: auto, direct, hierarchical"),
        ((), machine(nodes=3), ArgumentError, "--nodes = 16 .*3, the nodes of"),
        (("--m", "100"), None, ShapeError, "m = 100"),
        (("--path", "library"), None, Unsupported, "library path"),
        (("--nic", "cx8"), None, UnknownBackend, "cx8"),
    ],
)
def test_what_cannot_be_planned_is_said(
    tmp_path: Path, flags: tuple[str, ...], world: Topology | None, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, *flags, world=world)
