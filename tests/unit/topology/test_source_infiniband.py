from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import SysfsTree

from mkernel.topology.sources import infiniband
from mkernel.topology.sources.files import resolve

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0"


def test_a_port_with_everything(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.rdma("mlx5_0", tree.pci(f"{SWITCH}/0000:03:00.0", numa="1\n"))
    found = infiniband.read(tmp_path)
    (nic,) = found.nics
    assert found.notes == ()
    assert (nic.id, nic.name, nic.kind, nic.port) == ("mlx5_0", "mlx5_0", "cx", 1)
    assert (nic.pci, nic.numa_node, nic.speed_gbps) == ("0000:03:00.0", 1, 400.0)
    assert nic.pci_path == ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0")
    assert (nic.link_layer, nic.active) == ("InfiniBand", True)


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        ("0x15b3\n", "cx"),
        ("0x02c9\n", "cx"),
        ("0x1d0f\n", "efa"),
        ("0x8086\n", "infiniband"),
        ("", "infiniband"),
        ("zzz", "infiniband"),
    ],
)
def test_kind_by_vendor(tmp_path: Path, vendor: str, kind: str) -> None:
    tree = SysfsTree(tmp_path)
    tree.rdma("dev0", tree.pci("pci0000:00/0000:00:05.0", vendor=vendor))
    (nic,) = infiniband.read(tmp_path).nics
    assert nic.kind == kind


@pytest.mark.parametrize(
    ("numa", "noted"), [("-1\n", False), ("", False), (None, False), ("x\n", True), ("1e3", True)]
)
def test_numa_node_that_says_nothing(tmp_path: Path, numa: str | None, noted: bool) -> None:
    tree = SysfsTree(tmp_path)
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:00:05.0", numa=numa))
    found = infiniband.read(tmp_path)
    (nic,) = found.nics
    assert nic.numa_node is None
    assert bool(found.notes) is noted


def test_each_port_is_a_nic(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:05.0")
    tree.rdma("mlx4_0", function, port=1)
    tree.rdma("mlx4_0", function, port=2, state="1: DOWN\n", link_layer="Ethernet\n")
    nics = infiniband.read(tmp_path).nics
    assert [(n.id, n.port, n.active, n.link_layer) for n in nics] == [
        ("mlx4_0:1", 1, True, "InfiniBand"),
        ("mlx4_0:2", 2, False, "Ethernet"),
    ]


def test_a_port_without_files_counts_as_down(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:05.0")
    tree.rdma("mlx5_0", function, state=None, rate=None, link_layer=None)
    found = infiniband.read(tmp_path)
    (nic,) = found.nics
    assert (nic.active, nic.speed_gbps, nic.link_layer) == (False, None, None)
    assert "no state" in found.notes[0].message


def test_a_virtual_device_has_no_pci_address(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.rdma("rxe0", None, link_layer="Ethernet\n")
    found = infiniband.read(tmp_path)
    (nic,) = found.nics
    assert (nic.kind, nic.pci, nic.pci_path) == ("infiniband", None, ())
    assert "no PCI address" in found.notes[0].message


def test_broken_entries_are_notes(tmp_path: Path) -> None:
    base = tmp_path / "sys/class/infiniband"
    base.mkdir(parents=True)
    (base / "gone0").symlink_to("../../devices/nowhere")
    (base / "loop0").symlink_to("loop0")
    (base / "out0").symlink_to("../../../../..")
    (base / "bare0").mkdir()
    found = infiniband.read(tmp_path)
    assert found.nics == ()
    named = {note.message.split(":")[0] for note in found.notes}
    assert named == {"gone0", "loop0", "out0", "bare0"}


def test_links_do_not_lead_out_of_the_tree(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "tree")
    (tmp_path / "outside").mkdir()
    for name, target in (("up", "../outside"), ("absolute", str(tmp_path / "outside"))):
        (tree.root / name).symlink_to(target)
        assert resolve(tree.root / name, tree.root) is None
    (tree.root / "inside").symlink_to("/sys")
    assert resolve(tree.root / "inside", tree.root) == (tree.root / "sys").resolve()


def test_absolute_links_stay_in_the_tree(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.rdma("mlx5_0", tree.pci("pci0000:00/0000:00:05.0"))
    link = tmp_path / "sys/class/infiniband/mlx5_0"
    link.unlink()
    link.symlink_to("/sys/devices/pci0000:00/0000:00:05.0/infiniband/mlx5_0")
    (nic,) = infiniband.read(tmp_path).nics
    assert nic.pci == "0000:00:05.0"


def test_no_device_is_a_note(tmp_path: Path) -> None:
    found = infiniband.read(tmp_path)
    assert found.nics == ()
    assert "no RDMA device" in found.notes[0].message


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200 Gb/sec (4X HDR)", 200.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("0 Gb/sec", None), ("", None)],
)
def test_rates(text: str, rate: float | None) -> None:
    assert infiniband.parse_rate(text) == rate


@given(st.text(max_size=40))
def test_any_rate_text_is_a_positive_rate_or_none(text: str) -> None:
    rate = infiniband.parse_rate(text)
    assert rate is None or 0 < rate < 1e7


@pytest.mark.parametrize(
    ("state", "active"),
    [
        ("4", True),
        ("ACTIVE", False),
        ("0: ACTIVE", True),
        ("4: ACTIVE", True),
        ("1: DOWN", False),
        ("2: INIT", False),
        ("5: ACTIVE_DEFER", False),
    ],
)
def test_states(state: str, active: bool) -> None:
    assert infiniband.is_active(state) is active
