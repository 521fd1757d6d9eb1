"""Cards that were never measured have constants by their public figures, and plans say so; links that
a setting limits, and those of PCIe, are planned by their rates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from devices import gpu, node
from devices import world as worlds
from rich.console import Console
from shipped import constants_of

import mkernel
from mkernel.backends import registry
from mkernel.backends.accelerators.cuda import chips
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.schedule import DispatchSchedule, FewRowsSchedule
from mkernel.backends.accelerators.streams.device import torch_device
from mkernel.cli.plan import PlanReport, command
from mkernel.errors import InputFileError
from mkernel.plan import render
from mkernel.plan.arguments import NOTHING, Around, Norm
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan, Prediction, ScaleMode, Scales, first_difference
from mkernel.plan.planner import explain
from mkernel.settings import load as load_settings
from mkernel.topology.defaults import defaults
from mkernel.topology.model import FabricLink
from mkernel.topology.world_map import constants_of as holds
from mkernel.topology.world_map import world_map
from mkernel.world.engine import Engine
from mkernel.world.identity import Backends, Identity

OTHERS = sorted(one.card for one in machine().of_others if one.card)
GEMM = {"m": 4096, "n": 8192, "k": 4096}
EXPERTS = {"tokens": 4096, "experts": 64, "top_k": 8}
SIZES: dict[str, dict[str, Any]] = {
    "all_reduce": {"m": 4096, "n": 8192},
    "gemm_all_reduce": GEMM,
    "all_gather_gemm": GEMM,
    "moe_dispatch_gemm": {**EXPERTS, "hidden": 4096, "features": 2048},
    "ring_attention": {
        "batch": 1, "heads": 16, "kv_heads": 16, "sequence": 65536, "head_dim": 128, "causal": False
    },
}  # fmt: skip


def claims_of(accelerator: str, **changed: Any) -> AcceleratorCapabilities:
    """Return what a backend claims, here of every architecture."""
    claims = registry.accelerator(accelerator).capabilities_on(gpu(0))
    return claims.model_copy(update={"architectures": (), **changed})


def planned(
    name: str,
    accelerator: str = "cuda",
    op: str = "gemm_all_reduce",
    *,
    joined: str = "switch",
    dtype: str = "bfloat16",
    scales: ScaleMode | None = None,
    path: str = "auto",
    around: Around = NOTHING,
    claims: AcceleratorCapabilities | None = None,
    file: Path | None = None,
    **device: Any,
) -> LaunchPlan:
    """A plan on two such devices, joined by a switch of NVLink, by a link, or by PCIe alone."""
    devices = tuple(gpu(i, i, name=name, **device) for i in range(2))
    ends = {
        "switch": [(one.id, "switch") for one in devices],
        "link": [(devices[0].id, devices[1].id)],
        "pcie": [],
    }[joined]
    links = tuple(FabricLink(kind="nvlink", ends=each, count=18, gbs=450.0) for each in ends)
    claims = claims or claims_of(accelerator)
    world = worlds(node(devices, fabric=links, fabric_known=True))
    every = claims.constants_by(file, registry.accelerator(accelerator).cards_of(world))
    if scales is not None:
        around = Around(scales=Scales(mode=scales, use_fast_accum=True))
    found = explain(
        op, SIZES[op], dtype=dtype, path=path, around=around, b_layout="column" if scales else "row",
        accelerator=accelerator, capabilities=claims, nic=None, verbs=None,
        schedule=registry.accelerator(accelerator).schedule,
        world=world_map(world, 2, every, group=claims.process_group),
    ).plan  # fmt: skip
    assert isinstance(found, LaunchPlan)
    return found


def times_of(plan: LaunchPlan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


@pytest.mark.parametrize("accelerator", ["cuda", "streams"])
def test_a_card_that_was_never_measured_is_predicted_by_its_own_figures(accelerator: str) -> None:
    plan, known = planned("NVIDIA A100-SXM4-80GB", accelerator), planned("NVIDIA H200", accelerator)
    assert (plan.card, known.card) == ("a100", "h200")
    times = times_of(plan)
    assert (times.constants, times.measured) == ("a100, never measured", False)
    assert times_of(known).measured
    assert times.compute_us > 2 * times_of(known).compute_us
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render.plan(plan))
    assert "constants: a100, never measured)" in console.export_text()
    read = LaunchPlan.model_validate_json(plan.model_dump_json())
    assert (read, read.digest()) == (plan, plan.digest())


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ({"name": "NVIDIA H200"}, "h200"), ({"name": "NVIDIA H100 80GB HBM3"}, "h200"),
        ({"name": "NVIDIA H100 PCIe"}, "h200"), ({"name": "10de:2321"}, "h200"),
        ({"name": "GPU", "architecture": "sm_90"}, "h200"), ({"name": "NVIDIA H20"}, "h20"),
        ({"name": "NVIDIA H800"}, "h800"), ({"name": "NVIDIA GH200 480GB"}, "gh200"),
        ({"name": "10de:20b2"}, "a100"), ({"name": "NVIDIA A800-SXM4-80GB"}, "a800"),
        ({"name": "NVIDIA B200"}, "b200"), ({"name": "NVIDIA L40S"}, "l40s"),
        ({"name": "GPU", "architecture": "sm_80"}, "a100"),
        ({"name": "GPU", "architecture": "sm_89"}, "l40s"),
        ({"name": "NVIDIA A30"}, None), ({"name": "NVIDIA L4"}, None),
        ({"name": "GPU", "architecture": "sm_86"}, None), ({"name": "GPU"}, None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_name_or_by_its_architecture(
    device: dict[str, str], card: str | None
) -> None:
    found = holds([gpu(0, **device)], claims_of("cuda").constants_by(None))
    assert (found and found.card) == card


def test_of_unlike_devices_the_slowest_counts() -> None:
    every = claims_of("cuda").constants_by(None)

    def of(*names: str) -> str | None:
        found = holds([gpu(i, name=name) for i, name in enumerate(names)], every)
        return found and found.card

    assert of("NVIDIA H100", "NVIDIA H200") == "h200"
    assert of("NVIDIA H100", "NVIDIA H20") == of("NVIDIA H20", "NVIDIA H100") == "h20"
    assert of("NVIDIA H100", "NVIDIA L4") is None


def test_measured_cards_have_the_machine_that_was_fitted() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        plan = planned(name, "hopper")
        assert machine().of_plan(plan) is machine()
        assert times_of(plan).constants == "hopper"


@pytest.mark.parametrize("name", OTHERS)
def test_a_card_reaches_the_same_shares_of_its_nominal_figures(name: str) -> None:
    card, known = chips.cards()[name], chips.cards()["h200"]
    made, fitted = machine().on_card(name), machine()
    assert not card.rates
    for ours, theirs, nominal in (
        (
            made.constants.bfloat16_tflops_per_core * made.cores,
            fitted.constants.bfloat16_tflops_per_core * fitted.cores,
            "bfloat16_tflops",
        ),
        (made.attention.forward.tflops, fitted.attention.forward.tflops, "bfloat16_tflops"),
        (made.constants.memory_gbs, fitted.constants.memory_gbs, "memory_gbs"),
        (made.experts.memory_gbs, fitted.experts.memory_gbs, "memory_gbs"),
        (made.constants.p2p_gbs, fitted.constants.p2p_gbs, "link_gbs"),
        (made.scaled.product.egress_gbs, fitted.scaled.product.egress_gbs, "link_gbs"),
    ):
        shares = ours / getattr(card.nominal, nominal), theirs / getattr(known.nominal, nominal)
        assert shares[0] == pytest.approx(shares[1])
    assert (made.constants.float8_tflops_per_core is None) == (card.nominal.float8_tflops is None)
    large = 1 << 28
    by_engine = [one.copies.choose("put", large, 0).microseconds for one in (made, fitted)]
    faster = card.nominal.link_gbs / known.nominal.link_gbs
    assert by_engine[1] / by_engine[0] == pytest.approx(faster, rel=0.1)


def leaves(tree: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, (*at, str(name)))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value, at)
    else:
        yield at, tree


def test_what_bounds_a_rate_is_said_of_every_rate_and_latencies_stay() -> None:
    """Every name that has a ratio occurs; what has a rate's name and none is of one block."""
    known = chips.cards()["h200"]
    assert set(known.ratios(known).values()) == {1.0}
    names = known.ratios(known).keys()
    fitted, other = machine(), machine().on_card("h20")
    cuda = torch_device("cuda")
    seen = [at for one in (fitted, cuda) for at, _ in leaves(one.model_dump())]
    found = {f"{section}.{at[-1]}" for at in seen for section in at} | {at[-1] for at in seen}
    assert names <= found
    rates = {at[-1] for at in seen if re.search(r"_gbs$|tflops", at[-1])}
    of_hosts = {"nic_gbs", "nic_most_gbs", "group_gbs", "host_gbs", "p2p_most_gbs"}
    of_a_block = {"block_gbs", "comm_block_gbs", "block_sums_gbs"}
    assert rates - names == {*of_hosts, *of_a_block, "most_gbs"}
    latencies = [
        [
            (at, us)
            for at, us in leaves(one.model_dump())
            if at[-1].endswith("_us") and at[-1] not in names
        ]
        for one in (fitted, other)
    ]
    assert latencies[0]
    assert latencies[0] == latencies[1]


@pytest.mark.parametrize(
    ("op", "options"),
    [
        *((op, {}) for op in SIZES),
        *(
            ("all_gather_gemm", {"dtype": "float8_e4m3fn", "scales": "row", "path": path})
            for path in ("library", "fused")
        ),
    ],
)
def test_every_op_is_predicted_by_the_card(op: str, options: dict[str, str]) -> None:
    """An H20 has a seventh of the products of an H200."""
    slow, fast = (
        times_of(planned(name, "hopper", op, **options)) for name in ("NVIDIA H20", "NVIDIA H200")
    )
    assert slow.compute_us > 3 * fast.compute_us


def test_a_schedule_follows_the_card() -> None:
    """Own tokens that are multiplied while others travel: products take seven times as long on an
    H20, so fewer tiles of them fill that time."""
    of_card = {}
    for name in ("NVIDIA H20", "NVIDIA H200"):
        made = planned(name, "hopper", "moe_dispatch_gemm").schedule
        assert isinstance(made, DispatchSchedule)
        of_card[name] = made.early_tiles
    assert 0 < 3 * of_card["NVIDIA H20"] < of_card["NVIDIA H200"]


def test_a_norm_takes_longer_where_memory_is_slower() -> None:
    """An A100 has less than half of the bandwidth of an H200."""

    def more_us(name: str) -> float:
        around = Around(norm=Norm(residual=True, eps=1e-6))
        normed = times_of(planned(name, op="all_reduce", around=around))
        return normed.pipelined_us - times_of(planned(name, op="all_reduce")).pipelined_us

    assert more_us("NVIDIA A100-SXM4-80GB") > 2 * more_us("NVIDIA H200") > 0


def test_a_users_file_may_name_the_card(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    given = machine().on_card("a100").constants.model_copy(
        update={"name": "mine", "measured": True}
    )  # fmt: skip
    file.write_text(given.model_dump_json())
    plan = planned("NVIDIA A100-SXM4-80GB", file=file)
    assert (plan.card, times_of(plan).constants, times_of(plan).measured) == ("a100", "mine", True)
    file.write_text(given.model_copy(update={"card": "a1000"}).model_dump_json())
    with pytest.raises(InputFileError, match="card 'a1000' is unknown; known: h200, h800"):
        planned("NVIDIA A100-SXM4-80GB", file=file)


# ---- products that are not listed ----------------------------------------------------------------

A30 = {"architecture": "sm_80", "cores": 56, "clock_mhz": 1440.0, "memory_gbs": 933.12}
GEFORCE = {"architecture": "sm_89", "clock_mhz": 2520.0, "memory_gbs": 1008.096}


@pytest.mark.parametrize(
    ("name", "architecture", "cores", "clock_mhz", "bfloat16", "e4m3", "float32"),
    [
        ("A30", "sm_80", 56, 1440, 165, None, 10.3), ("A10", "sm_86", 72, 1695, 125, None, 31.2),
        ("RTX A6000", "sm_86", 84, 1800, 154.8, None, 38.7),
        ("GeForce RTX 3090", "sm_86", 82, 1695, 71, None, 35.6),
        ("L4", "sm_89", 58, 2040, 121, 242, 30.3),
        ("GeForce RTX 4090", "sm_89", 128, 2520, 165.2, 330.3, 82.6),
        ("RTX PRO 6000 Blackwell", "sm_120", 188, 2617, 503.8, 1007.6, 126),
        ("GeForce RTX 5090", "sm_120", 170, 2407, 209.5, 419, 104.8),
        ("Graphics Device", "sm_100", 148, 1850, 2250, 4500, 75),
    ],
)  # fmt: skip
def test_a_card_by_its_clock_has_the_figures_of_its_data_sheet(
    name: str, architecture: str, cores: int, clock_mhz: float, bfloat16: float,
    e4m3: float | None, float32: float,
) -> None:  # fmt: skip
    """Products of matrices in TFLOP/s, dense and added up in float32."""
    device = gpu(
        0, name=f"NVIDIA {name}", architecture=architecture, cores=cores, clock_mhz=clock_mhz,
        memory_gbs=600.0,
    )  # fmt: skip
    called = chips.by_clock(device, node((device,)))
    card = chips.card(called or "")
    assert card is not None
    found = card.nominal
    assert found.bfloat16_tflops == pytest.approx(bfloat16, rel=0.01)
    assert found.float8_tflops == (e4m3 and pytest.approx(e4m3, rel=0.01))
    assert found.float32_tflops == pytest.approx(float32, rel=0.07)
    assert (card.cores, found.memory_gbs, card.architecture) == (cores, 600, architecture)


@pytest.mark.parametrize("accelerator", ["cuda", "streams"])
def test_a_product_that_is_not_listed_is_predicted_by_its_clock(accelerator: str) -> None:
    """An A30 has half of the multiprocessors of an A100, and half of its memory's rate."""
    plan = planned("NVIDIA A30", accelerator, joined="pcie", **A30)
    called = "NVIDIA A30 by its clock (sm_80, 56 x 1440 MHz, memory 933.12 GB/s, link 31.5 GB/s)"
    times = times_of(plan)
    assert (plan.card, times.constants, times.measured) == (
        called,
        f"{called}, never measured",
        False,
    )
    known = times_of(planned("NVIDIA A100-SXM4-80GB", accelerator, joined="pcie"))
    assert times.compute_us == pytest.approx(known.compute_us * 312 / 165, rel=0.1)
    assert machine().of_plan(plan).constants.memory_gbs == pytest.approx(4000 * 933.12 / 4800)
    assert machine().of_plan(plan).constants.few_rows is None, "a Lamport exchange"
    read = LaunchPlan.model_validate_json(plan.model_dump_json())
    assert (read, read.digest()) == (plan, plan.digest())
    for unknown in ("architecture", "cores", "clock_mhz", "memory_gbs"):
        rest = {name: value for name, value in A30.items() if name != unknown}
        less = planned("10de:ffff", accelerator, **rest)
        assert less.prediction is None or times_of(less).constants == "a100, never measured"


def test_a_product_that_is_listed_keeps_its_figures_whatever_its_clock() -> None:
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200", "10de:2321", "NVIDIA H20", "NVIDIA L40S"):
        device = gpu(0, name=name, cores=99, clock_mhz=99.0, memory_gbs=99.0)
        assert machine().cards_of(worlds(node((device,)))) == ()


@pytest.mark.parametrize(("joined", "link_gbs"), [("link", 450), ("switch", 450), ("pcie", 31.5)])
def test_the_link_of_a_card_by_its_clock_is_what_the_topology_has(
    joined: str, link_gbs: float
) -> None:
    card = chips.card(planned("NVIDIA A30", joined=joined, **A30).card or "")
    assert card is not None
    assert card.nominal.link_gbs == link_gbs


@pytest.mark.parametrize("slow_first", [True, False])
def test_of_unlike_cards_by_their_clocks_the_slowest_counts(slow_first: bool) -> None:
    """Also where a name begins with another one, or is the same."""
    every = (
        gpu(0, name="NVIDIA GeForce RTX 4090 D", cores=114, **GEFORCE),
        gpu(1, name="NVIDIA GeForce RTX 4090", cores=128, **GEFORCE),
        gpu(2, name="NVIDIA GeForce RTX 4090", cores=128, **{**GEFORCE, "clock_mhz": 2600.0}),
        gpu(3, name="NVIDIA H200", architecture="sm_90", cores=132),
    )
    cores_of = {}
    for first in range(4):
        devices = every[first:] if slow_first else every[first:][::-1]
        made = machine().cards_of(worlds(node(devices)))
        found = holds(devices, claims_of("cuda").constants_by(None, made))
        assert found is not None
        cores_of[first] = (found.cores, "2520 MHz" in (found.card or ""), found.card)
    assert [each[:2] for each in cores_of.values()] == [
        (114, True), (128, True), (128, False), (132, False)
    ]  # fmt: skip


def test_plans_of_worlds_of_calls_and_of_the_command_line_know_the_clock(tmp_path: Path) -> None:
    devices = tuple(gpu(i, i, name="NVIDIA A30", **A30) for i in range(2))
    world = worlds(node(devices, fabric_known=True))
    found = mkernel.plan(
        "gemm_all_reduce", ranks_per_node=2, topology=world, accelerator="cuda", **GEMM
    )
    assert "NVIDIA A30 by its clock" in (found.card or "")
    engine = Engine(Backends("cuda", None, None), world, Identity(0, 1, 2), load_settings())
    assert engine.map.constants is not None
    assert engine.map.constants.card == found.card
    file = tmp_path / "machine.json"
    file.write_text(world.model_dump_json())
    shown = commands.run(
        command, "gemm_all_reduce", "--topology", str(file), "--nodes", "1", "--accelerator", "cuda",
        "--json", *(word for name, size in GEMM.items() for word in (f"--{name}", str(size))),
    )  # fmt: skip
    assert PlanReport.model_validate_json(shown).plan == found


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["cuda", "hopper"])
@pytest.mark.parametrize("rates", [{}, {"pcie_gbs": 63.015}])
def test_no_rate_of_nvlink_is_assumed_over_pcie(accelerator: str, rates: dict[str, float]) -> None:
    plan = planned("NVIDIA H200", accelerator, joined="pcie", **rates)
    slot = rates.get("pcie_gbs", 0.0) * defaults().paths.pcie_share or defaults().fabric.gbs
    assert plan.egress_gbs is not None
    assert plan.egress_gbs <= slot
    sent = 2 * GEMM["m"] * GEMM["n"]  # half of the rows, of 2 bytes, twice
    assert times_of(plan).comm_us >= sent / (slot * 1e3)


@pytest.mark.parametrize("op", SIZES)
@pytest.mark.parametrize("joined", ["switch", "link", "pcie"])
def test_links_carry_no_more_than_the_setting_says(
    op: str, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = planned("NVIDIA H200", "hopper", op, joined=joined, pcie_gbs=63.015)
    monkeypatch.setenv("MKERNEL_HOPPER_LINK_GBS", "20")
    claims = HopperAccelerator().capabilities().model_copy(update={"architectures": ()})
    assert claims.link_gbs == 20
    plan = planned("NVIDIA H200", "hopper", op, joined=joined, claims=claims, pcie_gbs=63.015)
    assert plan.egress_gbs == 20
    assert {route.bandwidth_gbs for route in plan.routes.classes} == {20}
    assert times_of(plan).comm_us > 2 * times_of(usual).comm_us
    differs = first_difference(usual.decisions(), plan.decisions())
    assert differs is not None
    assert usual.digest() != plan.digest(), "ranks with another setting would find out"


def test_a_users_constants_are_limited_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(constants_of("hopper").model_dump_json())
    plan = planned("NVIDIA H200", file=file, claims=claims_of("cuda", link_gbs=20.0))
    assert plan.egress_gbs == 20


SMALL: dict[str, dict[str, Any]] = {
    "all_reduce": {"m": 16, "n": 4096},
    "gemm_all_reduce": {"m": 16, "n": 4096, "k": 4096},
    "gemm_reduce_scatter": {"m": 16, "n": 4096, "k": 4096},
    "all_gather_gemm": {"m": 16, "n": 4096, "k": 4096},
}


@pytest.mark.parametrize("accelerator", ["cuda", "hopper"])
@pytest.mark.parametrize("op", SMALL)
@pytest.mark.parametrize(
    ("name", "joined", "argued"),
    [
        ("NVIDIA H200", "switch", True), ("NVIDIA H20", "link", True), ("NVIDIA H100", "pcie", False),
        ("NVIDIA A100-SXM4-80GB", "switch", False), ("NVIDIA B200", "switch", False),
        ("NVIDIA A30", "switch", False),
    ],
)  # fmt: skip
def test_lamport_exchanges_are_where_their_order_was_argued(
    accelerator: str, op: str, name: str, joined: str, argued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper by NVLink alone (device/mailbox.cuh), in whichever kernel."""
    monkeypatch.setitem(SIZES, op, SMALL[op])
    how = planned(name, accelerator, op, joined=joined).schedule
    assert how is not None
    by_mail = getattr(how, "by_mail", False) or "mail" in (getattr(how, "way", None) or "")
    assert (by_mail or isinstance(how, FewRowsSchedule)) == argued
