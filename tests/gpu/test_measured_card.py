"""``mkernel probe --measure`` of a GPU: rates near those of its card, by which plans are predicted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_buffers import needs_gpus, takes_ranks

from mkernel.backends import registry
from mkernel.cli.plan import PlanReport
from mkernel.machine import machine_topology
from mkernel.topology.cost import MachineConstants, load_constants
from mkernel.topology.world_map import constants_of
from mkernel.world.identity import Backends

pytestmark = [needs_gpus(1), pytest.mark.alone, pytest.mark.usefixtures("leaves_nothing")]
MOST_S = 300.0


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mkernel", *arguments],
        capture_output=True, text=True, timeout=MOST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("measured") / "card.json"
    command("probe", "--measure", str(made))
    return made


def shipped() -> MachineConstants:
    backend = registry.accelerator("cuda")
    machine = machine_topology(Backends("cuda", None, None))
    every = backend.capabilities().constants_by(None, backend.cards_of(machine))
    found = constants_of(backend.probe()[:1], every)
    assert found is not None
    return found


def test_rates_are_near_those_of_the_card(file: Path) -> None:
    made, known = load_constants(file), shipped()
    assert made.measured
    assert made.card == known.card
    assert made.cores == torch.cuda.get_device_properties(0).multi_processor_count
    names = ["bfloat16_tflops_per_core", "float16_tflops_per_core", "memory_gbs"]
    names += ["float8_tflops_per_core"] if known.float8_tflops_per_core else []
    names += ["p2p_gbs", "copy_engine_gbs"] if torch.cuda.device_count() > 1 else []
    for name in names:
        assert 0.6 < getattr(made, name) / getattr(known, name) < 1.5, name
    assert 5 < made.host_gbs < 200
    assert 0.5 < made.p2p_latency_us < 100


@takes_ranks(2)
def test_plans_are_predicted_by_the_file(file: Path) -> None:
    call = ("plan", "gemm_ar", "--m", "4096", "--n", "8192", "--k", "4096", "--json")
    plans = [
        PlanReport.model_validate_json(command(*call, *more)).plan
        for more in ((), ("--constants", str(file)))
    ]
    usual, own = (plan.prediction for plan in plans if plan is not None)
    assert usual is not None
    assert own is not None
    assert own.constants == load_constants(file).name
    assert own.measured
    assert 0.6 < own.pipelined_us / usual.pipelined_us < 1.7
