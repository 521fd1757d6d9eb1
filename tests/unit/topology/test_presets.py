"""Machines that a name stands for, and descriptions that users write."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import run
from machine_files import machine_file

from mkernel.cli import plan, probe
from mkernel.errors import InputFileError, NoRoute
from mkernel.probe.report import report
from mkernel.topology import presets
from mkernel.topology.defaults import defaults
from mkernel.topology.discover import Discovery, read
from mkernel.topology.model import Accelerator, Nic, Node
from mkernel.topology.sources.chips import capability


class Expected(NamedTuple):
    """The GPUs, the rails of each and what plans for several nodes take."""

    product: str
    rails: int
    kind: str
    gbps: float
    accelerator: str
    nic: str | None


H100 = "NVIDIA H100 SXM5 80 GB"
MACHINES = {
    "dgx-h100": Expected(H100, 1, "cx", 400, "hopper", "cx7"),
    "p5.48xlarge": Expected(H100, 4, "efa", 100, "hopper", "efa"),
    "p5en": Expected("NVIDIA H200 SXM 141 GB", 2, "efa", 200, "hopper", "efa"),
    "p4d": Expected("NVIDIA A100 SXM4 40 GB", 1, "efa", 100, "cuda", "efa"),
    "nd-h100-v5": Expected(H100, 1, "cx", 400, "hopper", "cx7"),
    "a3-mega": Expected(H100, 1, "gpudirect-tcpxo", 200, "hopper", None),
    "910b-8": Expected("Ascend 910B", 1, "hccn", 200, "streams", None),
    "dgx-b200": Expected("NVIDIA B200", 1, "cx", 400, "cuda", "cx7"),
}
every = pytest.mark.parametrize("name", MACHINES)


def planned(name: str, *flags: str) -> plan.PlanReport:
    sizes = ("--m", "16384", "--n", "8192", "--k", "8192")
    text = run(plan.command, "all_gather_gemm", "--topology", name, *sizes, "--json", *flags)
    return plan.PlanReport.model_validate_json(text)


def test_every_preset_is_tested() -> None:
    assert {presets.find(name) for name in MACHINES} == {
        presets.find(name) for name in presets.presets()
    }


@every
def test_a_machine_has_its_devices_where_they_are(name: str) -> None:
    found = read(Path(name))
    node, seen, expected = found.topology.nodes[0], report(found), MACHINES[name]
    assert [one.index for one in node.accelerators] == list(range(8))
    nics = {nic.id: nic for nic in node.nics if nic.kind != "ethernet"}
    assert {(nic.kind, nic.speed_gbps) for nic in nics.values()} == {(expected.kind, expected.gbps)}
    owners = Counter(nic for own in seen.affinity.values() for nic in own)
    assert {len(own) for own in seen.affinity.values()} == {expected.rails}
    assert set(owners) == set(nics)
    assert set(owners.values()) == ({2} if name == "p4d" else {1})
    for one in node.accelerators:
        for nic in seen.affinity[one.id]:
            assert seen.paths[one.id][nic].kind in ("PIX", "LOC"), (
                "below one switch, or on the chip"
            )
    assert Counter(one.numa_node for one in node.accelerators).most_common()[-1][1] in (2, 4)
    assert found.notes[0].message.startswith("described from public figures, never measured")


@every
def test_links_carry_what_their_generation_does(name: str) -> None:
    node = read(Path(name)).topology.nodes[0]
    assert node.fabric_known
    found = capability(node.accelerators[0])
    generation = 0 if found is None else 10 * found[0] + found[1]
    for link in node.fabric:
        each = defaults().fabrics[link.kind].gbs(generation)
        assert link.count is not None
        assert each is not None
        assert link.gbs == link.count * each


@every
def test_a_machine_is_planned_for_with_the_nics_that_it_has(name: str) -> None:
    expected = MACHINES[name]
    nodes = ("--nodes", "1") if name == "a3-mega" else ()
    report = planned(name, *nodes)
    assert report.plan is not None
    assert (report.plan.accelerator, report.plan.nic) == (expected.accelerator, expected.nic)
    assert report.plan.ranks_per_node == 8
    assert any("never measured" in note for note in report.notes)
    unmeasured = report.plan.prediction is None or not report.plan.prediction.measured
    assert unmeasured == (expected.product not in (H100, "NVIDIA H200 SXM 141 GB"))


@pytest.mark.parametrize(
    ("name", "flags"), [("a3-mega", ()), ("910b-8", ("--accelerator", "ascend"))]
)
def test_nics_that_no_backend_drives_are_named(name: str, flags: tuple[str, ...]) -> None:
    with pytest.raises(NoRoute) as raised:
        planned(name, *flags)
    said = str(raised.value)
    assert f"no installed NIC backend drives the {MACHINES[name].kind} ports" in said
    assert "--nodes 1" in said
    if name == "a3-mega":
        report = planned(name, "--accelerator", "streams")
        assert report.plan is not None
        assert report.plan.nodes == 2


@pytest.mark.parametrize(
    ("name", "first"),
    [("P5EN.48xlarge", "p5en.48xlarge"), ("p4d.24xlarge", "p4d"), ("p5", "p5.48xlarge")],
)
def test_other_names_stand_for_the_same_machine(name: str, first: str) -> None:
    assert read(Path(name)).topology == read(Path(first)).topology


def test_a_name_of_no_machine_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputFileError) as raised:
        planned("dgx-h1000")
    said = str(raised.value)
    assert "topology file dgx-h1000: No such file or directory; nor is it a preset: " in said
    assert all(name in said for name in presets.presets())


def test_the_list_has_a_line_for_each() -> None:
    lines = run(probe.command, "--list").splitlines()
    for name, described in presets.presets().items():
        (line,) = (each for each in lines if each.split(",")[0].split(" ")[0] == name)
        assert line.endswith(described.about)
        assert all(alias in line for alias in described.aliases)
    assert "never measured" in lines[-1]
    rows = json.loads(run(probe.command, "--list", "--json"))
    assert [row["name"] for row in rows] == list(presets.presets())
    assert all(row["sources"] for row in rows)


@every
def test_a_saved_preset_is_a_file_to_edit(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    run(probe.command, "--topology", name, "--save", str(file))
    saved = json.loads(file.read_text())
    assert {"about", "sources", "kinds", "trees"} <= set(saved)
    first = next(iter(saved["kinds"]))
    saved["kinds"][first]["memory_gib"] = 7
    file.write_text(json.dumps(saved))
    ours, theirs = read(file), read(Path(name))
    assert ours.notes == theirs.notes[1:], "it is no preset any more"
    changed, node = ours.topology.nodes[0], theirs.topology.nodes[0]
    assert {one.memory_bytes for one in changed.accelerators} == {7 << 30}
    same = {"hostname", "accelerators"}
    assert changed.model_dump(exclude=same) == node.model_dump(exclude=same)


def test_what_is_no_preset_is_saved_as_a_dumped_topology(tmp_path: Path) -> None:
    file, source = tmp_path / "mine.json", machine_file("p5.hwloc", tmp_path)
    run(probe.command, "--from", str(source), "--save", str(file))
    assert read(file).topology == read(source).topology


@pytest.mark.parametrize("name", ["p5.hwloc", "p5.nccl", "p4d.nccl"])
def test_a_description_is_read_as_the_files_that_are_made_of_it(name: str, tmp_path: Path) -> None:
    theirs, ours = read(machine_file(name, tmp_path)), read(Path(name.partition(".")[0]))
    node, other = ours.topology.nodes[0], theirs.topology.nodes[0]

    def stands(node: Node) -> dict[str | None, tuple[Any, ...]]:
        devices: tuple[Accelerator | Nic, ...] = (*node.accelerators, *node.nics)
        return {each.pci: (each.kind, each.numa_node, each.pcie_gbs) for each in devices}

    def ways(found: Discovery) -> Counter[tuple[str, str | None, str]]:
        at = {nic.id: nic.pci for nic in found.topology.nodes[0].nics}
        paths = report(found).paths
        return Counter((a, at[b], way.kind) for a, row in paths.items() for b, way in row.items())

    assert stands(node) == stands(other)
    assert ways(ours) == ways(theirs)
    assert [(part.id, part.cpus) for part in node.numa] == [
        (part.id, part.cpus) for part in other.numa
    ]


OWN = {
    "cpus": {"0": "0-31"},
    "kinds": {
        "gpu": {"kind": "cuda", "name": "NVIDIA L40S", "gts": 16, "lanes": 16},
        "nic": {"class": "0200", "id": "15b3:1021", "gbps": 200},
    },
    "trees": [{"numa": 0, "devices": {"gpu": ["3b:00.0"], "nic": ["3c:00.0"]}}],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"trees": [{"numa": 0, "devices": {"fpga": ["3b:00.0"]}}]},
            "'fpga', which kinds does not",
        ),
        ({"trees": [{"numa": 0, "devices": {"gpu": ["3b"]}}]}, "'3b' is no PCI address"),
        ({"kinds": {"gpu": {"class": "0880"}}}, "nobody knows what it is"),
        ({"kinds": {"gpu": {"kind": "cuda", "speed": 3}}}, "kinds.gpu.speed"),
        ({"cpus": {"0": "0-31", "1": "31"}}, "CPU 31 of NUMA node 1 is in another"),
        ({"cpus": {"0": "0-"}}, "'0-' is no CPU range"),
        ({"links": [{"kind": "nvlink", "to": "moon"}]}, "links.0.to"),
        (
            {"trees": [{"numa": 0, "devices": {"nic": ["3c:00.0"] * 2049}}]},
            "2049 devices; expected at most 2048",
        ),
        (
            {"trees": [{"numa": 0, "devices": {"gpu": ["3c:00.0"] * 257}}]},
            "257 accelerators; expected at most 256",
        ),
    ],
)
def test_a_wrong_description_says_where(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(OWN))
    node = read(file).topology.nodes[0]
    assert ([one.id for one in node.accelerators], [nic.kind for nic in node.nics]) == (
        ["cuda0"],
        ["cx"],
    )
    file.write_text(json.dumps({**OWN, **change}))
    with pytest.raises(InputFileError) as raised:
        read(file)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 1000
