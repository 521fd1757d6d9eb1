"""``mkernel plan`` for worlds of a file: backends by device, alternatives, simulation, growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mkernel.cli.plan import PlanReport, command
from mkernel.errors import ArgumentError, ShapeError, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology

SHAPE = ("--m", "16384", "--n", "2048", "--k", "8192")


def machine(nic: str = "efa", kind: str = "cuda", nodes: int = 1) -> Topology:
    """Eight accelerators with a NIC each, and a simulator and a soft NIC, as a probe finds them."""
    return Topology(
        nodes=tuple(
            Node.model_validate(
                {
                    "id": index,
                    "hostname": f"h{index}",
                    "numa": (NumaNode(id=0, cpus=tuple(range(8))),),
                    "accelerators": (
                        Accelerator(id="sim0", kind="ascend", name="sim", index=0, emulated=True),
                        *(
                            Accelerator.model_validate(
                                {"id": f"gpu{i}", "kind": kind, "name": "g", "index": i}
                            )
                            for i in range(8)
                        ),
                    ),
                    "nics": (
                        Nic(id="soft0", kind="soft", name="soft0", emulated=True),
                        *(
                            Nic.model_validate(
                                {"id": f"n{i}", "kind": nic, "name": f"n{i}", "speed_gbps": 400}
                            )
                            for i in range(8)
                        ),
                    ),
                }
            )
            for index in range(nodes)
        )
    )


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATOR", "NIC", "VERBS", "PATH"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)


def run(tmp_path: Path, *flags: str, world: Topology | None = None, nodes: int = 16) -> str:
    file = tmp_path / "machine.json"
    file.write_text((world or machine()).model_dump_json())
    app = typer.Typer()
    app.command()(command)
    size = ("--nodes", str(nodes), "--ranks-per-node", "8")
    result = CliRunner().invoke(app, ["ag_gemm", "--topology", str(file), *size, *SHAPE, *flags])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.parametrize(
    ("nic", "kind", "accelerator", "backend"),
    [
        ("efa", "cuda", "hopper", "efa"),
        ("cx", "cuda", "hopper", "cx7"),
        ("cx", "ascend", "ascend", "cx7"),
    ],
)
def test_backends_are_those_of_the_devices(
    tmp_path: Path, nic: str, kind: str, accelerator: str, backend: str
) -> None:
    text = run(tmp_path, "--json", world=machine(nic, kind))
    made = LaunchPlan.model_validate_json(text)
    assert (made.accelerator, made.nic, made.verbs) == (accelerator, backend, "system")
    assert [seat.accelerator for seat in made.placement.sites[0].seats] == [
        f"gpu{i}" for i in range(8)
    ]
    assert made.placement[127].accelerator == "gpu7"
    other = LaunchPlan.model_validate_json(
        run(tmp_path, "--json", "--accelerator", "streams", world=machine(nic, kind))
    )
    assert other.accelerator == "streams"


def test_the_plan_alone_is_what_json_prints(tmp_path: Path) -> None:
    made = LaunchPlan.model_validate_json(run(tmp_path, "--json"))
    assert made.exchange == "hierarchical", "a node's rows cross its NICs once"
    direct = LaunchPlan.model_validate_json(run(tmp_path, "--json", "--exchange", "direct"))
    assert direct.prediction.comm_us > 2 * made.prediction.comm_us


def test_json_with_everything_that_was_asked_for(tmp_path: Path) -> None:
    text = run(
        tmp_path, "--json", "--explain", "--simulate",
        "--trace", str(tmp_path / "trace.json"), "--scaling", str(tmp_path / "growth.svg"),
    )  # fmt: skip
    report = PlanReport.model_validate_json(text)
    assert report.simulation is not None
    assert report.simulation.time_us >= report.simulation.floor_us
    by_name = {one.option: one for one in report.alternatives if one.decision == "exchange"}
    assert by_name["hierarchical"].chosen
    times = [by_name[name].predicted_us for name in ("hierarchical", "direct")]
    assert times == sorted(times, key=float)
    assert [point.nodes for point in report.scaling] == [1, 2, 4, 8, 16]
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    assert {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"} == {
        "comm",
        "compute",
    }
    assert "not measured" in trace["otherData"]["clock"]
    assert b"<svg" in (tmp_path / "growth.svg").read_bytes()


def test_for_people(tmp_path: Path) -> None:
    text = run(tmp_path, "--explain", "--simulate")
    for wanted in ("exchange", "hierarchical", "chosen", "simulated", "floor", "exposed"):
        assert wanted in text


def test_a_world_of_a_thousand_nodes_is_small(tmp_path: Path) -> None:
    text = run(tmp_path, "--json", nodes=1024)
    made = LaunchPlan.model_validate_json(text)
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
