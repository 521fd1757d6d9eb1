"""Files of several machines: which are one machine, and which are nodes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from devices import gpu, node

from mkernel.cli.probe import command
from mkernel.topology.discover import read
from mkernel.topology.model import Accelerator, Node, Topology

GIB = 2**30


def card(index: int, **more: Any) -> Accelerator:
    fields = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB, "pci": f"0000:{index:02x}:00.0"}
    return gpu(index, **{**fields, **more})


def written(folder: Path, *nodes: Node) -> list[Path]:
    files = [folder / f"m{number}.json" for number in range(len(nodes))]
    for file, one in zip(files, nodes, strict=True):
        file.write_text(Topology(nodes=(one,)).model_dump_json())
    return files


def named(host: str, *accelerators: Accelerator) -> Node:
    return node(accelerators).model_copy(update={"hostname": host})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (named("m1", card(9, kind="ascend", name="Ascend 910B")), "NVIDIA H100 and Ascend 910B"),
        (named("m1", card(1, kind="ascend", name="Ascend 910B")), "NVIDIA H100 and Ascend 910B"),
        (named("m1", card(9), card(10)), "no accelerator in common"),
        (named("m1", card(1, name="NVIDIA A100")), "NVIDIA H100 and NVIDIA A100"),
        (named("m1", card(1, memory_bytes=141 * GIB)), "no accelerator in common"),
        (named("beta.site", card(1)), "hosts are alpha and beta"),
    ],
)
def test_another_machine_is_a_node_of_its_own(tmp_path: Path, other: Node, why: str) -> None:
    files = written(tmp_path, named("alpha", card(1)), other)
    found = read(*files)
    assert [one.id for one in found.topology.nodes] == [0, 1]
    assert [one.accelerators for one in found.topology.nodes] == [(card(1),), other.accelerators]
    assert [one.hostname for one in found.topology.nodes] == ["alpha", other.hostname]
    (note,) = (one.message for one in found.notes if one.source == "files")
    assert f"{files[1]} is node 1" in note
    assert why in note


@pytest.mark.parametrize(
    "other",
    [
        named("m1", card(1)),
        named("m1"),
        named("alpha", card(9, kind="ascend", name="Ascend 910B")),
        named("alpha.site", card(1, memory_bytes=79 * GIB)),
        named("m1", card(1, name="unknown", memory_bytes=None)),
        named("m1", card(1), card(2)),
    ],
)
def test_files_of_one_machine_stay_one(tmp_path: Path, other: Node) -> None:
    found = read(*written(tmp_path, named("alpha", card(1)), other))
    assert len(found.topology.nodes) == 1
    assert not [one for one in found.notes if one.source == "files"]


def test_files_that_follow_complete_the_machine_before_them(tmp_path: Path) -> None:
    nodes = (named("a", card(1)), named("b", card(2)), named("m2", card(2), card(3)))
    found = read(*written(tmp_path, *nodes))
    assert [[one.pci for one in each.accelerators] for each in found.topology.nodes] == [
        ["0000:01:00.0"],
        ["0000:02:00.0", "0000:03:00.0"],
    ]


def test_presets_of_unlike_machines_are_shown_whole() -> None:
    given = ("--from", "p5", "--from", "910b-8")
    shown = commands.run(command, *given)
    assert "2 nodes" in shown
    assert "cuda0: NVIDIA H100 SXM5 80 GB" in shown
    assert "npu0" in shown
    assert "host p5.48xlarge" in shown
    topology = json.loads(commands.run(command, *given, "--json"))["topology"]
    assert [one["accelerators"][0]["kind"] for one in topology["nodes"]] == ["cuda", "ascend"]
    both = commands.run(command, *given, "--matrix")
    assert both.count("node 0 · ") == both.count("node 1 · ") == 1
