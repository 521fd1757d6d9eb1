from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import run
from devices import SIM, SOFT
from plan_worlds import CAPABILITIES, world

from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.status import Status
from mkernel.cli import plan as plan_command
from mkernel.cli import probe as probe_command
from mkernel.errors import BackendUnavailable
from mkernel.plan.model import LaunchPlan
from mkernel.probe.report import ProbeReport
from mkernel.settings import NicSettings
from mkernel.topology.lanes import NicUse
from mkernel.topology.model import Topology


class FakeAscend:
    name = "ascend"
    preference = 0
    devices: ClassVar[tuple[Any, ...]] = (SIM,)
    visibility: ClassVar[dict[str, str]] = {}

    def nic_access(self) -> None:
        return None

    def status(self) -> Status:
        return Status(bool(self.devices), "no simulator", "build it")

    def probe(self) -> tuple[Any, ...]:
        return self.devices

    def capabilities(self) -> Any:
        return CAPABILITIES

    def capabilities_on(self, device: object) -> Any:
        return CAPABILITIES

    schedule, cards_of = AcceleratorBackend.schedule, AcceleratorBackend.cards_of
    no_p2p = AcceleratorBackend.no_p2p


class FakeCx7:
    name = "cx7"
    kinds: ClassVar[tuple[str, ...]] = ("cx", "soft")
    providers: ClassVar[tuple[str, ...]] = ("system", "soft")

    def status(self, verbs: str) -> Status:
        return Status(verbs == "soft", "no library", "install it")

    def probe(self, verbs: str) -> tuple[Any, ...]:
        return (SOFT,) if verbs == "soft" else ()

    def use(self, settings: NicSettings) -> NicUse:
        return NicUse(queue_pairs=settings.qps, stripe_bytes=settings.stripe_bytes)


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {registry.ACCELERATORS: ("ascend", "broken"), registry.NICS: ("cx7",)}

    def accelerator(name: str) -> Any:
        if name == "broken":
            raise BackendUnavailable("does not import")
        return FakeAscend()

    monkeypatch.setattr(registry, "names", lambda group: names[group])
    monkeypatch.setattr(registry, "accelerator", accelerator)
    monkeypatch.setattr(registry, "nic", lambda name: FakeCx7())
    for name in ("NODES", "NIC", "VERBS"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)
    monkeypatch.setenv("MKERNEL_ACCELERATOR", "ascend")


def plan_of(text: str) -> LaunchPlan:
    report = plan_command.PlanReport.model_validate_json(text)
    assert report.what_if is None
    assert report.plan is not None
    return report.plan


def test_plan_json_is_the_plan_and_nothing_else() -> None:
    loaded = plan_of(run(plan_command.command, "ag_gemm", "--json"))
    assert (loaded.op, loaded.nodes, loaded.ranks_per_node) == ("all_gather_gemm", 2, 2)
    assert (loaded.nic, loaded.verbs) == ("cx7", "soft")
    assert loaded.digest() == LaunchPlan.model_validate_json(loaded.model_dump_json()).digest()


def test_plan_options_reach_the_planner() -> None:
    options = {"m": 3072, "n": 512, "k": 1024, "nodes": 3, "ranks-per-node": 2, "chunk": 2}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    text = run(plan_command.command, "ag_gemm", *flags, "--dtype", "bfloat16", "--json")
    made = plan_of(text)
    assert (made.shape.m, made.shape.n, made.shape.k) == (3072, 512, 1024)
    assert (made.nodes, made.ranks_per_node, made.dtype) == (3, 2, "bfloat16")
    assert made.schedule.rows_per_chunk == 2


def test_plan_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAscend, "devices", ())
    with pytest.raises(BackendUnavailable, match=r"no simulator; build it.*--topology"):
        run(plan_command.command, "ag_gemm")


def test_probe_json_has_the_keys_that_tools_rely_on() -> None:
    data = json.loads(run(probe_command.command, "--json"))
    assert data["accelerators"][-1] == {
        "id": "ascend-sim0",
        "kind": "ascend",
        "pci": None,
        "numa_node": None,
    }
    assert data["nics"][-1] == {
        "id": "soft0",
        "kind": "soft",
        "pci": None,
        "numa_node": None,
        "speed_gbps": None,
    }
    assert data["affinity"]["ascend-sim0"]
    Topology.model_validate(data["topology"])
    assert any("does not import" in note["message"] for note in data["notes"])
    assert ProbeReport.model_validate(data)


def test_probe_of_a_recorded_tree_asks_nobody_else(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-63\n")
    text = run(probe_command.command, "--sysfs-root", str(tmp_path), "--json")
    data = json.loads(text)
    assert (data["accelerators"], data["nics"]) == ([], [])
    assert len(data["topology"]["nodes"][0]["numa"][0]["cpus"]) == 64
    shown = run(probe_command.command, "--sysfs-root", str(tmp_path))
    assert "CPUs 0-63" in shown
    assert "note:" in shown


def test_simulators_of_a_probed_machine_make_the_usual_world(tmp_path: Path) -> None:
    """A probe lists one device of a simulator, which makes as many as there are ranks."""
    file = tmp_path / "probe.json"
    file.write_text(run(probe_command.command, "--json"))
    made = plan_of(run(plan_command.command, "ag_gemm", "--topology", str(file), "--json"))
    assert (made.accelerator, made.nodes, made.ranks_per_node) == ("ascend", 2, 2)
    assert made.placement[3].accelerator == "ascend-sim1"


def test_emulated_devices_are_of_the_backend_that_emulates_them(tmp_path: Path) -> None:
    file = tmp_path / "world.json"
    file.write_text(world(2, 2).model_dump_json())
    flags = ("--topology", str(file), "--json", "--accelerator")
    with pytest.raises(BackendUnavailable, match=r"'broken' emulates no ascend .*; ascend does"):
        run(plan_command.command, "ag_gemm", *flags, "broken")
    assert plan_of(run(plan_command.command, "ag_gemm", *flags, "auto")).accelerator == "ascend"
