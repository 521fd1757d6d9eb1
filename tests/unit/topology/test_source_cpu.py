from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import SysfsTree

from mkernel.topology.sources import cpu


def test_two_numa_nodes_with_memory(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0-1,4", kib=2048)
    tree.numa(1, "2-3", kib=None)
    found = cpu.read(tmp_path)
    assert [(n.id, n.cpus, n.memory_bytes) for n in found.numa] == [
        (0, (0, 1, 4), 2048 * 1024),
        (1, (2, 3), None),
    ]
    assert found.notes == ()


def test_nodes_are_in_numeric_order(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    for node in (10, 2, 0):
        tree.numa(node, str(node))
    nodes = cpu.read(tmp_path).numa
    assert [n.id for n in nodes] == [0, 2, 10]


@pytest.mark.parametrize("file", ["cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"])
def test_only_cpus_that_are_online_and_allowed(tmp_path: Path, file: str) -> None:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0-7")
    tree.write("sys/devices/system/cpu/online", "0-5\n")
    tree.write(f"sys/fs/cgroup/{file}", "4-7\n")
    nodes = cpu.read(tmp_path).numa
    assert nodes[0].cpus == (4, 5)


def test_memory_only_node_is_kept(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0")
    tree.numa(1, "")
    found = cpu.read(tmp_path)
    assert [n.cpus for n in found.numa] == [(0,), ()]
    assert found.notes == ()


def test_without_numa_nodes_all_cpus_are_node_0(tmp_path: Path) -> None:
    SysfsTree(tmp_path).write("sys/devices/system/cpu/online", "0-3")
    found = cpu.read(tmp_path)
    assert [(n.id, n.cpus) for n in found.numa] == [(0, (0, 1, 2, 3))]
    assert "no NUMA nodes" in found.notes[0].message


def test_an_empty_tree_is_only_a_note(tmp_path: Path) -> None:
    found = cpu.read(tmp_path)
    assert found.numa == ()
    assert "no usable CPU" in found.notes[-1].message


def test_garbage_is_reported_and_ignored(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0-1")
    tree.numa(1, "7-3")
    tree.numa(2, "0-99999999999")
    tree.write("sys/devices/system/node/node3x/cpulist", "9")
    (tmp_path / "sys/devices/system/node/node4").mkdir()
    found = cpu.read(tmp_path)
    assert [(n.id, n.cpus) for n in found.numa] == [(0, (0, 1)), (1, ()), (2, ()), (4, ())]
    assert len(found.notes) == 2


def test_a_cpu_in_two_nodes_is_reported(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.numa(0, "0-1")
    tree.numa(1, "1-2")
    found = cpu.read(tmp_path)
    assert [n.cpus for n in found.numa] == [(0, 1), (2,)]
    assert "CPU 1" in found.notes[0].message


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_parse_back(cpus: set[int]) -> None:
    assert cpu.parse_cpu_list(",".join(map(str, sorted(cpus)))) == cpus
    low, high = min(cpus), max(cpus)
    assert cpu.parse_cpu_list(f"{low}-{high}") == set(range(low, high + 1))


@given(st.text(max_size=30))
def test_any_text_is_a_list_or_a_value_error(text: str) -> None:
    try:
        cpus = cpu.parse_cpu_list(text)
    except ValueError:
        return
    assert all(0 <= number < 65536 for number in cpus)


def test_the_real_machine_has_cpus() -> None:
    nodes = cpu.read().numa
    assert any(node.cpus for node in nodes)


def test_the_longest_mask_is_one() -> None:
    words = cpu._MOST_CPUS // 32
    assert cpu.parse_cpu_mask(",".join(["1", *["0"] * (words - 1)])) == {cpu._MOST_CPUS - 32}
    with pytest.raises(ValueError, match="is for more than"):
        cpu.parse_cpu_mask(",".join(["0"] * (words + 1)))
