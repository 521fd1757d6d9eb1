"""``mkernel probe --measure``: constants of this machine that the planner takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mkernel.backends.accelerators.streams.device import torch_device
from mkernel.cli import plan as plan_command
from mkernel.cli import probe as probe_command
from mkernel.cli.plan import PlanReport
from mkernel.errors import ArgumentError, BackendUnavailable, InputFileError
from mkernel.measure import measure
from mkernel.topology.cost import MachineConstants, load_constants

pytestmark = pytest.mark.multiprocess
FLAGS = ("gemm_rs", "--accelerator", "streams", "--nodes", "2", "--ranks-per-node", "1", "--json")


def run(command: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_measured_constants_reach_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "constants.json"
    # More than a busy machine lets either of two processes wait for the other, most of the time.
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATENCY_NS", "300000")
    run(probe_command.command, "--measure", str(file))
    measured = load_constants(file)
    assert "measured" in measured.name
    assert "cx7 on soft" in measured.source
    shipped = torch_device("cpu").constants
    assert shipped is not None
    same = {
        name
        for name in MachineConstants.model_fields
        if getattr(measured, name) == getattr(shipped, name)
    }
    assert same <= {
        "fused", "library", "host_gbs", "host_latency_us", "cross_rail_share",
        "cross_rail_latency_us", "architectures", "fitted_to", "egress_gbs", "copy_engine_gbs",
        "few_rows", "mailed_tiles", "float8_tflops_per_core", "schema_version", "card", "products",
        "cores", "measured", "p2p_most_gbs",
    }  # fmt: skip
    assert 0.1 < measured.p2p_gbs < 1000
    assert 0.01 < measured.nic_gbs < 1000
    assert measured.nic_latency_us >= 300
    assert measured.p2p_latency_us < measured.nic_latency_us < 1e5
    monkeypatch.setenv("MKERNEL_CONSTANTS", str(file))
    made = PlanReport.model_validate_json(run(plan_command.command, *FLAGS)).plan
    assert made.prediction.constants == measured.name
    assert made.routes.classes[0].bandwidth_gbs <= measured.nic_gbs
    monkeypatch.delenv("MKERNEL_CONSTANTS")
    other, slower = tmp_path / "slow.json", {"nic_most_gbs": measured.nic_gbs / 1e4}
    other.write_text(json.dumps({**measured.model_dump(), "name": "slow", **slower}))
    slow = PlanReport.model_validate_json(
        run(plan_command.command, *FLAGS, "--constants", str(other))
    ).plan
    assert slow.prediction.constants == "slow"
    assert slow.prediction.comm_us > 100 * made.prediction.comm_us


def test_what_cannot_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="--from"):
        run(probe_command.command, "--measure", str(tmp_path / "a"), "--sysfs-root", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="system"):
        measure(2, "cx7", "system")
    monkeypatch.setenv("MKERNEL_CONSTANTS", str(tmp_path / "gone.json"))
    with pytest.raises(InputFileError, match=r"constants file .*gone\.json: No such file"):
        run(plan_command.command, *FLAGS)
