"""Ascend machines from the text of npu-smi."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mkernel.topology.discover import read
from mkernel.topology.model import NumaNode
from mkernel.topology.placement import NodePaths
from mkernel.topology.sources import npu

NUMA = tuple(NumaNode(id=i, cpus=tuple(range(24 * i, 24 * i + 24))) for i in range(8))


def matrix(count: int, relation: str = "HCCS", name: str = "NPU", affinity: bool = True) -> str:
    """As ``npu-smi info -t topo``; CPUs of pairs of NPUs as on a real A2 host."""
    names = [f"{name}{i}" for i in range(count)]
    lines = ["\t   " + "       ".join([*names, *(["CPU Affinity"] if affinity else [])])]
    for i in range(count):
        cells = ["X" if i == j else relation for j in range(count)]
        cpus = [f"{24 * (i // 2)}-{24 * (i // 2) + 23}"] if affinity else []
        lines.append("       ".join([names[i], *cells, *cpus]))
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "  HCCS = Connection traversing HCCS."]
    )


def table(*addresses: str, physical: bool = False) -> str:
    """As ``npu-smi info``: two lines a device."""
    lines = ["| NPU   Name                | Health        | Power(W)    Temp(C) |"]
    lines += ["| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  |"]
    for number, address in enumerate(addresses):
        card = number // 2 if physical else number
        chip = f"{number % 2}     {number}" if physical else "0"
        model = "Ascend910" if physical else "910B3"
        lines += [f"| {card}     {model}               | OK            | 101.8       43 |"]
        lines += [f"| {chip}                   | {address}  | 0           0    / 0 |"]
    return "\n".join([*lines, "| NPU     Chip              | Process id    | Process name |"])


def test_a_mesh_of_eight() -> None:
    found = npu.parse(matrix(8), NUMA)
    assert [(a.id, a.kind, a.index) for a in found.accelerators] == [
        (f"npu{i}", "ascend", i) for i in range(8)
    ]
    assert [a.numa_node for a in found.accelerators] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(found.fabric) == 28
    assert {(link.kind, link.count, link.gbs) for link in found.fabric} == {("hccs", 1, 28.0)}
    assert found.notes == ()


def test_paths_over_hccs(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(matrix(4))
    node = read(file).topology.nodes[0]
    path = NodePaths(node).between(node.accelerators[0], node.accelerators[3])
    assert (path.kind, path.gbs) == ("HCCS", 28.0)
    assert [hop.name for hop in path.hops] == ["hccs npu0-npu3"]


def test_both_texts_give_models_and_addresses() -> None:
    found = npu.parse(table("0000:C1:00.0", "0000:01:00.0") + "\n" + matrix(2), NUMA)
    assert [(a.id, a.name, a.pci) for a in found.accelerators] == [
        ("npu0", "910B3", "0000:c1:00.0"),
        ("npu1", "910B3", "0000:01:00.0"),
    ]


def test_two_dies_a_card_have_physical_ids() -> None:
    text = table("0000:9D:00.0", "0000:9F:00.0", "0000:A1:00.0", "0000:A3:00.0", physical=True)
    found = npu.parse(text + "\n" + matrix(4, "HCCS_SW", name="Phy-ID", affinity=False))
    assert [(a.id, a.pci) for a in found.accelerators] == [
        ("npu0", "0000:9d:00.0"),
        ("npu1", "0000:9f:00.0"),
        ("npu2", "0000:a1:00.0"),
        ("npu3", "0000:a3:00.0"),
    ]
    assert {link.gbs for link in found.fabric} == {None}


def test_relations_over_pcie_are_no_links() -> None:
    found = npu.parse(matrix(2, "PHB"))
    assert len(found.accelerators) == 2
    assert found.fabric == ()


@pytest.mark.parametrize(
    ("row", "instead", "noted"),
    [
        ("NPU0 X HCCS", "NPU0 X PHB", "NPU 0 to 1 is PHB, and HCCS back; not linked"),
        ("NPU1 HCCS X", "NPU1 WHAT X", "row of NPU1 is not understood ('WHAT' in it)"),
        ("NPU1 HCCS X 0-23", "NPU1 HCCS", "row of NPU1 is not understood (too short"),
        ("NPU1 HCCS X", "NPU0 HCCS X", "row of NPU0 is not understood (too short, or a second"),
    ],
)
def test_a_matrix_that_does_not_fit_is_a_note(row: str, instead: str, noted: str) -> None:
    text = "\n".join(" ".join(line.split()) for line in matrix(2).splitlines())
    assert row in text
    found = npu.parse(text.replace(row, instead))
    assert found.fabric == ()
    assert noted in found.notes[0].message


def test_a_machine_without_the_tool_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = npu.read()
    assert (found.accelerators, found.notes) == ((), ())


def tool(folder: Path, text: str) -> None:
    file = folder / "npu-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_the_tool_is_asked_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "info").write_text(table("0000:C1:00.0", "0000:01:00.0"))
    (tmp_path / "topo").write_text(matrix(2))
    tool(tmp_path, f'if [ "$2" = -t ]; then cat {tmp_path}/topo; else cat {tmp_path}/info; fi')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = npu.read(NUMA)
    assert [a.pci for a in found.accelerators] == ["0000:c1:00.0", "0000:01:00.0"]
    assert len(found.fabric) == 1


@pytest.mark.parametrize("text", ["exit 3", "printf '\\377'"])
def test_a_tool_that_fails_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tool(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = npu.read()
    assert found.accelerators == ()
    assert "`npu-smi info` failed" in found.notes[0].message


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(npu, "_TIMEOUT_S", 0.2)
    assert "timed out" in npu.read().notes[0].message


def test_a_model_without_end_is_none() -> None:
    """A fuzzer's: names are limited, and parsing never raises."""
    row = "| 0     {} | OK |\n| 0 | 0000:C1:00.0 |\n"
    assert [one.name for one in npu.parse(row.format("910B3")).accelerators] == ["910B3"]
    assert npu.parse(row.format("910B" + "\0" * 2000)).accelerators == ()


def test_rows_behind_one_that_is_not_understood_count() -> None:
    text = "\n".join(" ".join(line.split()) for line in matrix(3).splitlines())
    found = npu.parse(text.replace("NPU0 X HCCS", "NPU0 X WHAT"))
    assert [link.ends for link in found.fabric] == [("npu1", "npu2")]


def chips(*lower: str, model: str = "310P3", card: int = 2) -> str:
    """Return chips of one card as ``npu-smi info`` prints them: the card again for each of them."""
    upper = f"| {card}     {model}     | OK    | NA   45  |"
    return "\n".join(f"{upper}\n| {each} | 0   1529 / 44280 |" for each in lower)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (chips("0  0  | 0000:01:00.0", "1  1  | 0000:01:00.0"), [0, 1]),
        (chips("0  4  | 0000:01:00.0", "1  5  | 0000:01:00.0"), [4, 5]),
        (chips("0     | 0000:01:00.0", "1     | 0000:01:00.0"), [0, 1]),
        (chips("0     | 0000:01:00.0") + "\n" + chips("0 | 0000:01:00.0", card=3), [2, 3]),
    ],
)
def test_chips_that_share_a_bus_are_apart_and_need_no_matrix(
    tmp_path: Path, text: str, numbers: list[int]
) -> None:
    file = tmp_path / "info.txt"
    file.write_text(text)
    found = read(file)
    (node,) = found.topology.nodes
    assert [one.index for one in node.accelerators] == numbers
    assert {one.pci for one in node.accelerators} == {"0000:01:00.0"} or len(numbers) == 1
    assert len({one.id for one in node.accelerators}) == len(numbers)
    assert NodePaths(node).between(*node.accelerators[:2]).kind == "PIX"
    assert [note.message for note in found.notes] == [
        "links between NPUs are not in the text; `npu-smi info -t topo` prints them"
    ]


def test_chips_that_share_a_bus_have_the_links_of_the_matrix(tmp_path: Path) -> None:
    file = tmp_path / "both.txt"
    table = chips("0  0  | 0000:01:00.0", "1  1  | 0000:01:00.0")
    file.write_text(f"{table}\n{matrix(2, 'SIO')}")
    found = read(file)
    assert [link.ends for link in found.topology.nodes[0].fabric] == [("npu0", "npu1")]
    assert found.notes == ()
