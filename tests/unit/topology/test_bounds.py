"""Numbers that no machine has count as unknown, whichever format they come in, and are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from devices import gpu, nic, node, world
from sysfs_tree import SysfsTree

from mkernel.errors import InputFileError
from mkernel.topology.discover import Discovery, discover, read
from mkernel.topology.model import Bridge, FabricLink

XML = (
    '<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x020700" vendor="0x15b3" '
    '{link}><nic><net name="mlx5_0" port="1" {net}/></nic></pci></cpu></system>'
)


def of_file(tmp_path: Path, text: str) -> Discovery:
    file = tmp_path / "machine"
    file.write_text(text)
    return read(file)


@pytest.mark.parametrize(
    ("speed", "gbps", "noted"),
    [
        ("400000", 400.0, None),
        ("6400000", 6400.0, None),
        ("200000000", None, "mlx5_0: speed_gbps is 200000, and no machine has more than 6400"),
        ("40000000", None, "mlx5_0: speed_gbps is 40000"),
        ("0", None, "mlx5_0: speed is 0; counted as unknown"),
        ("-1", None, "speed '-1' is no number"),
        ("nan", None, "speed 'nan' is no number"),
        ("inf", None, "speed 'inf' is no number"),
        ("1e9", None, "speed '1e9' is no number"),
        ("99999999999", None, "speed '99999999999' is no number"),
    ],
)
def test_a_ports_rate_in_nccls_file(
    tmp_path: Path, speed: str, gbps: float | None, noted: str | None
) -> None:
    found = of_file(tmp_path, XML.format(link="", net=f'speed="{speed}"'))
    assert [one.speed_gbps for one in found.topology.nodes[0].nics] == [gbps]
    assert len(found.notes) == (noted is not None)
    assert (noted or "") in "".join(note.message for note in found.notes)


@pytest.mark.parametrize(
    ("speed", "width", "gbs", "noted"),
    [
        ("32.0 GT/s PCIe", "16", 63.015, None),
        ("Unknown speed", "16", None, None),
        ("", "0", None, None),
        ("99999 GT/s", "16", None, "link_speed '99999 GT/s' is no speed"),
        ("-16 GT/s", "16", None, "link_speed '-16 GT/s' is no speed"),
        ("nan", "16", None, "link_speed 'nan' is no speed"),
        ("32.0 GT/s PCIe", "-4", None, "link_width '-4' is no number"),
        ("32.0 GT/s PCIe", "4096", None, "32.0 GT/s PCIe with 4096 lanes"),
        ("512 GT/s", "16", None, "512 GT/s with 16 lanes"),
    ],
)
def test_a_pcie_link_in_nccls_file(
    tmp_path: Path, speed: str, width: str, gbs: float | None, noted: str | None
) -> None:
    link = f'link_speed="{speed}" link_width="{width}"'
    found = of_file(tmp_path, XML.format(link=link, net=""))
    assert [one.pcie_gbs for one in found.topology.nodes[0].nics] == [gbs]
    assert len(found.notes) == (noted is not None)
    assert (noted or "") in "".join(note.message for note in found.notes)


def test_parts_of_a_dumped_machine(tmp_path: Path) -> None:
    one = node(
        (gpu(0, 0, pcie_gbs=1e300, cores=10**6, clock_mhz=1e6, memory_gbs=1e9), gpu(1, 0)),
        (nic(0, 0, pcie_gbs=513.0, speed_gbps=1e6), nic(1, 0)),
        bridges=(Bridge(id="b", pcie_gbs=1e9), Bridge(id="c", pcie_gbs=63.0)),
        fabric=(FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=10**6, gbs=1e8),),
    )
    found = of_file(tmp_path, world(one).model_dump_json())
    (seen,) = found.topology.nodes
    assert seen.accelerators[0] == gpu(0, 0)
    assert (seen.nics[0].pcie_gbs, seen.nics[0].speed_gbps) == (None, None)
    assert seen.nics[1] == one.nics[1]
    assert [bridge.pcie_gbs for bridge in seen.bridges] == [None, 63.0]
    assert (seen.fabric[0].count, seen.fabric[0].gbs) == (None, None)
    assert {note.message.partition(" is ")[0] for note in found.notes} == {
        "cuda0: pcie_gbs", "cuda0: cores", "cuda0: clock_mhz", "cuda0: memory_gbs",
        "mlx5_0: pcie_gbs", "mlx5_0: speed_gbps", "b: pcie_gbs",
        "nvlink cuda0-cuda1: count", "nvlink cuda0-cuda1: gbs",
    }  # fmt: skip


@pytest.mark.parametrize("value", [0, -400, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["speed_gbps", "pcie_gbs"])
def test_a_dumped_rate_that_is_none_is_refused(tmp_path: Path, field: str, value: float) -> None:
    data: dict[str, Any] = json.loads(world(node((), (nic(0),))).model_dump_json())
    data["nodes"][0]["nics"][0][field] = value
    with pytest.raises(InputFileError, match=rf"{field}|not JSON"):
        of_file(tmp_path, json.dumps(data))


def test_the_rate_of_a_recorded_interface(tmp_path: Path) -> None:
    """Drivers that write -1 without a sign."""
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:05.0", class_="0x020000\n", vendor="0x1af4\n")
    (function / "net/eth0").mkdir(parents=True)
    (function / "net/eth0/speed").write_text("4294967295\n")
    found = discover(tmp_path)
    assert [one.speed_gbps for one in found.topology.nodes[0].nics] == [None]
    assert any("eth0: speed_gbps" in note.message for note in found.notes)


def test_links_of_hwlocs_matrix(tmp_path: Path) -> None:
    function = (
        '<object type="PCIDev" gp_index="{0}" pci_busid="0{0}:00.0" '
        'pci_type="0302 [10de:2330] [10de:0000] 00"/>'
    )
    found = of_file(
        tmp_path,
        f'<topology version="2.0"><object type="Machine">{function.format(1)}{function.format(2)}'
        '</object><distances2hetero name="NVLinkBandwidth" nbobjs="2"><indexes>PCIDev:1 PCIDev:2'
        "</indexes><u64values>0 900000000 900000000 0</u64values></distances2hetero></topology>",
    )
    (link,) = found.topology.nodes[0].fabric
    assert link.gbs is None
    assert ["nvlink cuda0-cuda1: gbs is 900000" in note.message for note in found.notes] == [True]
