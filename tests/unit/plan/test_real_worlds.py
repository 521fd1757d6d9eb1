"""Plans for machines of the clouds: as the project describes them, and as published."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from commands import run
from machine_files import ROOT, machine_file
from shipped import constants_of

from mkernel.cli.plan import PlanReport, command
from mkernel.plan.missing import WhatIf

P5 = pytest.mark.parametrize("name", ["p5.hwloc", "p5.nccl", "hwloc-aws-p5.xml"])
P4D = pytest.mark.parametrize("name", ["p4d.nccl", "nccl-aws-p4d.xml"])
NDV4 = pytest.mark.parametrize("name", ["ndv4.nccl", "nccl-azure-ndv4.xml"])


def predicted(file: Path, *flags: str, nodes: int = 16) -> PlanReport:
    """What ``hopper`` would do there, with more ranks than it takes: a what-if."""
    size = ("--nodes", str(nodes), "--ranks-per-node", "8", "--m", "131072", "--k", "8192")
    flags = ("--accelerator", "hopper", "--n", "28672", "--json", *flags)
    arguments = ["ag_gemm", "--topology", str(file), *size, *flags]
    report = PlanReport.model_validate_json(run(command, *arguments))
    assert any("worlds of at most 16 ranks" in why for why in asked(report).missing)
    return report


def asked(report: PlanReport) -> WhatIf:
    assert report.plan is None
    assert report.what_if is not None
    return report.what_if


@P5
def test_p5_stripes_over_four_rails_below_the_own_switch(name: str, tmp_path: Path) -> None:
    made = asked(predicted(machine_file(name, tmp_path)))
    assert (made.accelerator, made.nic, made.verbs) == ("hopper", "efa", "system")
    seats = made.placement.sites[0].seats
    assert len({nic for seat in seats for nic in seat.nics}) == 32
    for local in range(8):
        route = made.route(local, 8 + local)
        assert (route.kind, route.staged) == ("nic", ())
        assert [(rail.src_nic, rail.dst_nic) for rail in route.rails] == [
            (nic, nic) for nic in seats[local].nics
        ]


@P4D
def test_p4d_has_a_nic_for_two_gpus(name: str, tmp_path: Path) -> None:
    made = asked(predicted(machine_file(name, tmp_path)))
    seats = made.placement.sites[0].seats
    assert [seat.nics for seat in seats[::2]] == [seat.nics for seat in seats[1::2]]
    assert len({seat.nics for seat in seats}) == 4
    assert made.route(0, 9).staged == ()


@NDV4
def test_ndv4_has_a_nic_for_every_gpu_with_the_cpus_of_its_numa_node(
    name: str, tmp_path: Path
) -> None:
    made = asked(predicted(machine_file(name, tmp_path)))
    seats = made.placement.sites[0].seats
    assert len({seat.nics for seat in seats}) == 8
    assert {len(seat.nics) for seat in seats} == {1}
    assert [seat.proxy_cpus for seat in seats[::2]] == [seat.proxy_cpus for seat in seats[1::2]]
    assert len({seat.proxy_cpus for seat in seats}) == 4


@pytest.mark.parametrize(
    "name",
    [
        *("p5.hwloc", "p4d.nccl", "ndv4.nccl"),
        *("hwloc-aws-p5.xml", "nccl-aws-p4d.xml", "nccl-azure-ndv4.xml"),
    ],
)
def test_a_thousand_nodes_are_simulated(name: str, tmp_path: Path) -> None:
    constants = constants_of("hopper").model_copy(update={"architectures": ()})
    (tmp_path / "constants.json").write_text(constants.model_dump_json())
    flags = ("--simulate", "--constants", str(tmp_path / "constants.json"))
    report = predicted(machine_file(name, tmp_path), *flags, nodes=1024)
    found = report.simulation
    assert found is not None
    assert found.floor_us <= found.time_us < 1.2 * found.floor_us
    assert sum(one.pairs for one in asked(report).routes.classes) == 8192 * 8191


def examples() -> list[str]:
    """Plans and what-ifs that the documentation shows, each with the command that prints it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        example
        for page in pages
        for block in page.read_text().split("```")
        if block.startswith("\n$ mkernel plan ")
        for example in block.strip().split("\n\n")
    ]


@pytest.mark.parametrize("example", examples(), ids=lambda each: each.splitlines()[0])
def test_an_example_of_a_page_is_what_is_printed(example: str) -> None:
    """Every row that a page shows of a plan or a what-if, in its order."""
    asked, *rows = example.splitlines()
    arguments = shlex.split(asked.removeprefix("$ mkernel plan "))
    printed = iter([line.rstrip() for line in run(command, *arguments).splitlines()])
    assert all(row in printed for row in rows), asked


def test_a_plan_and_a_what_if_are_shown() -> None:
    shown = [example.splitlines()[1].split("  ")[0] for example in examples()]
    assert {"launch plan", "what if"} <= set(shown)
