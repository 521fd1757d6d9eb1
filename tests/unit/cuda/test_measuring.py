"""Constants of a card by its measured rates. The measurement itself runs here on the CPU, where all
copies are of host memory; ``tests/gpu/test_measured_card.py`` measures a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from devices import gpu, node
from devices import world as worlds
from test_cards import claims_of, planned, times_of

from mkernel.backends import registry
from mkernel.backends.accelerators.cuda import measuring
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.measuring import Rates, constants, rates
from mkernel.cli import probe
from mkernel.errors import BackendUnavailable
from mkernel.topology.cost import MachineConstants, load_constants
from mkernel.topology.model import Topology
from mkernel.topology.world_map import constants_of

H200 = gpu(0, name="NVIDIA H200", architecture="sm_90", cores=132, clock_mhz=1980)
L40S = gpu(0, name="NVIDIA L40S", architecture="sm_89", cores=142)


def base_of(device: Any) -> MachineConstants:
    every = claims_of("cuda").constants_by(None)
    return constants_of([device], every) or every[0]


def rates_of(base: MachineConstants, times: float = 1.0, **changed: Any) -> Rates:
    """Rates that a device would have which reaches ``times`` the base's."""
    count = (base.cores or 1) * times
    found = Rates(
        bfloat16=base.bfloat16_tflops_per_core * count,
        float16=base.float16_tflops_per_core * count,
        float32=base.float32_tflops_per_core * count,
        float8=base.float8_tflops_per_core and base.float8_tflops_per_core * count,
        memory_gbs=base.memory_gbs * times,
        host_gbs=40.0,
        link_gbs=base.p2p_gbs * times,
        egress_gbs=(base.egress_gbs or base.p2p_gbs) * times,
        link_us=6.0,
    )
    return found._replace(**changed)


def numbers(tree: Any, above: str = "") -> dict[str, float]:
    if isinstance(tree, dict):
        return {
            k: v for name, each in tree.items() for k, v in numbers(each, f"{above}.{name}").items()
        }
    if isinstance(tree, list | tuple):
        return {
            k: v for i, each in enumerate(tree) for k, v in numbers(each, f"{above}.{i}").items()
        }
    return {above: tree} if isinstance(tree, float) else {}


@pytest.mark.parametrize("device", [H200, L40S])
def test_a_device_as_fast_as_its_card_has_the_cards_constants(device: Any) -> None:
    base = base_of(device)
    made = constants(base, device, rates_of(base))
    mine, own = numbers(made.model_dump()), {".host_gbs", ".p2p_latency_us", ".copy_engine_gbs"}
    for name, value in numbers(base.model_dump()).items():
        assert name in own or mine[name] == pytest.approx(value), name
    assert (made.host_gbs, made.p2p_latency_us) == (40.0, 6.0)
    assert made.measured
    assert (made.card, made.cores) == (base.card, base.cores)
    assert made.name.startswith("measured on ")
    assert ("at 1980 MHz" in made.source) == (device is H200)
    assert base.name in made.source


def test_rates_scale_what_they_bound() -> None:
    base = base_of(H200)
    assert base.library is not None
    assert base.library.streamed is not None
    made = constants(base, H200, rates_of(base, 0.5, memory_gbs=base.memory_gbs))
    assert made.library is not None
    assert made.library.streamed is not None
    tiles = zip(made.library.streamed.tiles, base.library.streamed.tiles, strict=True)
    assert all(a.tflops_per_core == pytest.approx(b.tflops_per_core / 2) for a, b in tiles)
    assert made.library.egress_gbs == pytest.approx(base.library.egress_gbs / 2)
    assert made.library.streamed.loads_gbs == base.library.streamed.loads_gbs
    assert made.library.start_us == base.library.start_us
    alone = rates_of(base, link_gbs=None, egress_gbs=None, link_us=None)
    made = constants(base, H200, alone)
    assert (made.p2p_gbs, made.p2p_latency_us) == (base.p2p_gbs, base.p2p_latency_us)
    assert "no peer in reach" in made.source


def test_a_card_that_no_one_knows_is_planned_by_its_own_file(tmp_path: Path) -> None:
    """The first card's constants hold for it by what was measured, but no Lamport exchange: its order
    was argued for that card's architecture."""
    name = "NVIDIA Graphics Device"
    unknown = gpu(0, name=name, architecture="sm_110", cores=20)
    assert constants_of([unknown], claims_of("cuda").constants_by(None)) is None
    base = base_of(unknown)
    file = tmp_path / "card.json"
    made = constants(base, unknown, rates_of(base, 0.1, float8=None))
    assert made.library is not None
    assert (made.library.mail, made.few_rows, made.float8_tflops_per_core) == (None, None, None)
    assert (made.architectures, made.products, made.cores) == (("sm_110",), (name,), 20)
    file.write_text(made.model_dump_json())
    plan = planned(name, file=file, architecture="sm_110", cores=20)
    times = times_of(plan)
    assert (times.constants, times.measured) == (made.name, True)
    assert times.compute_us > 5 * times_of(planned("NVIDIA H200")).compute_us


def test_the_measurement_reports_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_LONG_ENOUGH_S", 0.002)
    cpu = torch.device("cpu")
    found = rates(cpu, [cpu], e4m3=False, size=64, nbytes=1 << 20)
    assert found.float8 is None
    assert all(value is None or 0 < value < 1e6 for value in found)
    assert found.link_gbs
    alone = rates(cpu, [], e4m3=False, size=64, nbytes=1 << 20)
    assert (alone.link_gbs, alone.egress_gbs, alone.link_us) == (None, None, None)


def test_a_run_counts_by_what_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += 0.003

    assert measuring._Clock([]).seconds(work) == pytest.approx(0.003)


def test_a_device_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = measuring._Clock([])
    clock._streams = [type("Stream", (), {"device": "cuda:3", "query": lambda self: False})()]
    monkeypatch.setattr(measuring, "_DEADLINE_S", 0.0)
    with pytest.raises(BackendUnavailable, match="cuda:3 was not done"):
        clock.seconds(lambda: None)


def test_the_command_measures_the_settings_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, asked = base_of(H200), list[Topology]()
    backend: Any = registry.accelerator("cuda")
    usable = registry.accelerator("streams").status()
    monkeypatch.setattr(CudaAccelerator, "status", lambda self: usable)
    monkeypatch.setattr(CudaAccelerator, "probe", lambda self: (H200,))
    monkeypatch.setattr(
        "mkernel.machine.discover",
        lambda **_: type("Found", (), {"topology": worlds(node((H200,)))}),
    )

    def measured(self: Any, machine: Topology) -> MachineConstants:
        asked.append(machine)
        return constants(base, H200, rates_of(base, 0.9))

    monkeypatch.setattr(CudaAccelerator, "measure", measured)
    monkeypatch.setenv("MKERNEL_ACCELERATOR", backend.name)
    file = tmp_path / "card.json"
    printed = commands.run(probe.command, "--measure", str(file), "--json")
    assert [one.id for one in asked[0].nodes[0].accelerators] == ["cuda0"]
    assert load_constants(file) == MachineConstants.model_validate(json.loads(printed))
    assert load_constants(file).bfloat16_tflops_per_core < base.bfloat16_tflops_per_core
