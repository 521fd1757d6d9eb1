"""What hwloc's files say beyond a tree of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.topology.discover import Discovery, read
from mkernel.topology.sources import hwloc
from mkernel.topology.sources.findings import Notes
from mkernel.topology.sources.xml import Element

HOST = '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-ff]">{}</object>'


def found(tmp_path: Path, inside: str, version: str = 'version="2.0"') -> Discovery:
    file = tmp_path / "machine.xml"
    file.write_text(
        f'<!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology {version}>'
        f'<object type="Machine" nodeset="0x1">{inside}</object></topology>'
    )
    return read(file)


def function(bus: str, ids: str, *system: str, infos: str = "") -> str:
    inside = "".join(f'<object type="OSDev" {text}</object>' for text in system)
    return (
        f'<object type="PCIDev" pci_busid="{bus}" pci_type="{ids} [0000:0000] 00" '
        f'pci_link_speed="0.000000">{infos}{inside}</object>'
    )


def rdma(name: str, infos: str = "") -> str:
    return f'name="{name}" osdev_type="3">{infos}'


def net(name: str) -> str:
    return f'name="{name}" osdev_type="2">'


def test_a_card_is_rdma_where_the_system_has_such_a_device(tmp_path: Path) -> None:
    with_rdma = function("01:00.0", "0200 [15b3:1021]", rdma("mlx5_0"), net("ens1"))
    without = function("02:00.0", "0200 [15b3:1021]", net("ens2"))
    unseen = function("03:00.0", "0200 [15b3:1021]")
    nics = found(tmp_path, HOST.format(with_rdma + without + unseen)).topology.nodes[0].nics
    assert [(n.id, n.kind, n.pci) for n in nics] == [
        ("mlx5_0", "cx", "0000:01:00.0"),
        ("ens2", "ethernet", "0000:02:00.0"),
        ("0000:03:00.0", "cx", "0000:03:00.0"),
    ]


def test_ports_with_their_state(tmp_path: Path) -> None:
    infos = '<info name="Port1State" value="4"/><info name="Port2State" value="1"/>'
    card = function("01:00.0", "0207 [15b3:1021]", rdma("mlx5_0", infos))
    nics = found(tmp_path, HOST.format(card)).topology.nodes[0].nics
    assert [(n.id, n.port, n.active) for n in nics] == [
        ("mlx5_0:1", 1, True),
        ("mlx5_0:2", 2, False),
    ]


def test_an_rdma_device_without_pci(tmp_path: Path) -> None:
    (nic,) = found(tmp_path, f'<object type="OSDev" {rdma("rxe0")}</object>').topology.nodes[0].nics
    assert (nic.id, nic.kind, nic.pci, nic.numa_node) == ("rxe0", "infiniband", None, 0)


def test_names_numbers_and_hosts(tmp_path: Path) -> None:
    infos = '<info name="PCIDevice" value="GA100"/>'
    gpus = [
        function("02:00.0", "0302 [10de:20b0]", 'name="nvml0" osdev_type="1">', infos=infos),
        function("01:00.0", "0302 [10de:20b0]", 'name="nvml1" osdev_type="1">'),
    ]
    hosted = '<info name="HostName" value="node-a"/>' + HOST.format("".join(gpus))
    seen = found(tmp_path, hosted)
    (node,) = seen.topology.nodes
    assert node.hostname == "node-a"
    assert [(a.id, a.pci, a.name) for a in node.accelerators] == [
        ("cuda0", "0000:02:00.0", "GA100"),
        ("cuda1", "0000:01:00.0", "10de:20b0"),
    ]
    assert "links between accelerators" in seen.notes[0].message


def test_consoles_and_disks_are_neither(tmp_path: Path) -> None:
    ids = ("0300 [1d0f:1111]", "0108 [1d0f:8061]", "0300 [1002:515e]")
    inside = "".join(function(f"0{n}:00.0", each) for n, each in enumerate(ids))
    (node,) = found(tmp_path, HOST.format(inside)).topology.nodes
    assert (node.accelerators, node.nics) == ((), ())


def test_an_npu_and_an_amd_gpu(tmp_path: Path) -> None:
    inside = function("01:00.0", "1200 [19e5:d802]") + function("02:00.0", "0380 [1002:74a1]")
    (node,) = found(tmp_path, HOST.format(inside)).topology.nodes
    assert [(a.kind, a.pci) for a in node.accelerators] == [
        ("ascend", "0000:01:00.0"),
        ("rocm", "0000:02:00.0"),
    ]


def test_bridges_without_range_or_type_are_survived(tmp_path: Path) -> None:
    gpu = function("01:00.0", "0302 [10de:20b0]")
    (node,) = found(
        tmp_path, f'<object type="Bridge" bridge_type="0-1">{gpu}</object>'
    ).topology.nodes
    assert node.accelerators[0].pci_path == ("bridge in line 1",)
    seen = found(tmp_path, HOST.format('<object type="PCIDev" pci_busid="01:00.0"/>'))
    assert [note.message for note in seen.notes] == ["0000:01:00.0: no pci_type; ignored"]


@pytest.mark.parametrize(
    ("numa", "noted"),
    [
        ('type="NUMANode"', "without os_index"),
        ('type="NUMANode" os_index="0" cpuset="0xf...f"', "NUMA node 0: cpuset"),
    ],
)
def test_odd_numa_nodes_are_notes(tmp_path: Path, numa: str, noted: str) -> None:
    assert noted in found(tmp_path, f"<object {numa}/>").notes[0].message


def test_two_numa_nodes_of_one_number_are_a_contradiction(tmp_path: Path) -> None:
    twice = "".join(f'<object type="NUMANode" os_index="0" cpuset="0x{n}"/>' for n in (1, 2))
    seen = found(tmp_path, twice)
    assert seen.topology.nodes[0].cpus == (0,)
    assert "NUMA node 0: cpus is (1,) here and (0,)" in seen.notes[0].message


def test_types_are_bits_in_hwloc_3(tmp_path: Path) -> None:
    devices = ['name="mlx5_0" osdev_type="32">', 'name="usnic_0" osdev_type="48">']
    cards = [
        function("01:00.0", "0200 [15b3:1021]", devices[0], 'name="ens1" osdev_type="16">'),
        function("02:00.0", "0200 [1137:0043]", devices[1]),
        function("03:00.0", "0200 [8086:1572]", 'name="ens2" osdev_type="16">'),
    ]
    nics = found(tmp_path, HOST.format("".join(cards)), 'version="3.0"').topology.nodes[0].nics
    assert [(n.id, n.kind) for n in nics] == [
        ("mlx5_0", "cx"),
        ("usnic_0", "infiniband"),
        ("ens2", "ethernet"),
    ]


def linked(tmp_path: Path, matrix: str, gpus: int = 2) -> Discovery:
    """GPUs whose nvml devices are 10, 11, …, a switch of two ports 20 and 21; a matrix."""
    functions = [
        function(f"0{n}:00.0", "0302 [10de:1db8]", f'gp_index="{10 + n}" name="nvml{n}">')
        for n in range(gpus)
    ]
    functions += [
        f'<object type="PCIDev" gp_index="{20 + n}" subtype="NVSwitch" pci_busid="0a:0{n}.0"/>'
        for n in range(2)
    ]
    file = tmp_path / "machine.xml"
    file.write_text(
        '<topology version="2.0"><object type="Machine" nodeset="0x1">'
        f"{HOST.format(''.join(functions))}</object>{matrix}</topology>"
    )
    return read(file)


def matrix(objects: str, values: str, name: str = "NVLinkBandwidth", tag: str = "hetero") -> str:
    """As hwloc writes them: long lists in several elements."""
    words = values.split()
    halves = (words[: len(words) // 2], words[len(words) // 2 :])
    parts = "".join(f"<u64values>{' '.join(half)} </u64values>" for half in halves)
    return (
        f'<distances2{tag} type="OSDev" name="{name}"><indexes>{objects} </indexes>'
        f"{parts}</distances2{tag}>"
    )


def fabric(seen: Discovery) -> list[tuple[str, tuple[str, str], float | None]]:
    return [(link.kind, link.ends, link.gbs) for link in seen.topology.nodes[0].fabric]


@pytest.mark.parametrize(
    ("objects", "values", "wanted"),
    [
        ("OSDev:10 OSDev:11", "1000000 50000 50000 1000000", [(("cuda0", "cuda1"), 50.0)]),
        (
            "OSDev:10 OSDev:11 PCIDev:20 PCIDev:21",
            "9 0 25000 50000  0 9 25000 50000  25000 25000 9 0  50000 50000 0 9",
            [(("cuda0", "switch"), 75.0), (("cuda1", "switch"), 75.0)],
        ),
        ("OSDev:10 Package:3", "9 40000 40000 9", [(("cuda0", "host"), 40.0)]),
        ("OSDev:10 OSDev:99 PCIDev:98", "9 1 1 1 9 1 1 1 9", []),
    ],
)
def test_links_by_matrix(
    tmp_path: Path, objects: str, values: str, wanted: list[tuple[tuple[str, str], float]]
) -> None:
    seen = linked(tmp_path, matrix(objects, values + " "))
    assert fabric(seen) == [("nvlink", ends, gbs) for ends, gbs in wanted]
    assert [note.message[:5] for note in seen.notes] == ([] if wanted else ["links"])


def test_a_matrix_of_one_type_and_one_of_something_else(tmp_path: Path) -> None:
    both = matrix("10 11", "9 64000 64000 9 ", "XGMIBandwidth", "") + matrix(
        "10 11", "9 1 1 9 ", "XGMIHops", ""
    )
    assert fabric(linked(tmp_path, both)) == [("xgmi", ("cuda0", "cuda1"), 64.0)]


@pytest.mark.parametrize(
    ("objects", "values", "noted"),
    [
        ("OSDev:10 OSDev:11", "9 50000 25000 9 ", "cuda1 to cuda0 is 25000 MB/s, and 50000 back"),
        ("OSDev:10 OSDev:11", "9 50000 ", "a matrix of 2 objects, 2 values; ignored"),
        ("OSDev:10 OSDev:11", "9 -5 5 9 ", "a matrix of 2 objects, 4 values; ignored"),
        ("", "", "a matrix of 0 objects"),
        ("OSDev:10 " * 600, "0 ", "a matrix of 600 objects"),
    ],
)
def test_a_matrix_that_does_not_fit_is_a_note(
    tmp_path: Path, objects: str, values: str, noted: str
) -> None:
    assert noted in linked(tmp_path, matrix(objects, values)).notes[0].message


def test_what_else_a_network_card_has_is_no_interface(tmp_path: Path) -> None:
    disk = 'name="nvme0n1" osdev_type="0">'
    card = function("01:00.0", "0200 [15b3:1021]", disk, net("ens1"))
    nics = found(tmp_path, HOST.format(card)).topology.nodes[0].nics
    assert [nic.id for nic in nics] == ["ens1"]


def test_a_device_of_one_port_is_called_as_itself(tmp_path: Path) -> None:
    card = function(
        "01:00.0", "0207 [15b3:1021]", rdma("mlx5_0", '<info name="Port1State" value="4"/>')
    )
    nics = found(tmp_path, HOST.format(card)).topology.nodes[0].nics
    assert [(n.id, n.port, n.active) for n in nics] == [("mlx5_0", 1, True)]


@pytest.mark.parametrize(
    ("text", "gbs", "noted"),
    [
        ("31.507692", 31.508, False),
        ("0.000000", None, False),
        ("", None, False),
        ("fast", None, True),
        ("1e300", None, True),
        ("-1", None, True),
        ("nan", None, True),
        ("inf", None, True),
    ],
)
def test_speeds_of_links(text: str, gbs: float | None, noted: bool) -> None:
    notes = Notes("test")
    assert hwloc._gbs(Element("object", {"pci_link_speed": text}, 1), notes) == gbs
    assert [text in note.message for note in notes.all()] == [True] * noted


def test_links_of_ports_above_a_device(tmp_path: Path) -> None:
    port = (
        '<object type="Bridge" bridge_type="1-1" pci_busid="0000:{}:00.0" '
        'pci_type="0604 [1000:c030] [0000:0000] 00" pci_link_speed="{}">{}</object>'
    )
    card = function("03:00.0", "0200 [15b3:1021]", rdma("mlx5_0"))
    inside = port.format("01", "31.5", port.format("02", "15.75", card))
    node = found(tmp_path, HOST.format(inside)).topology.nodes[0]
    links = {bridge.id: bridge.pcie_gbs for bridge in node.bridges}
    assert links == {"0000:01:00.0": 31.5, "0000:02:00.0": 15.75}
    assert node.nics[0].pci_path == ("pci0000:00", *links)


def test_numbers_have_31_bits() -> None:
    for text, number in (
        ("2147483647", 2147483647),
        ("2147483648", None),
        ("-1", None),
        ("x", None),
    ):
        assert Element("object", {"os_index": text}, 1).number("os_index") == number


COPROCESSOR = 'name="{}" osdev_type="5">'


@pytest.mark.parametrize("code", ["0300", "0302", "0380", "1200"])
@pytest.mark.parametrize("device", ["66a1", "6860", "73a3", "7448", "74a1"])
def test_amds_gpus_of_each_class(tmp_path: Path, code: str, device: str) -> None:
    inside = function("01:00.0", f"{code} [1002:{device}]") + function(
        "02:00.0", "0300 [1002:515e]"
    )
    seen = found(tmp_path, HOST.format(inside))
    assert [(one.kind, one.pci) for one in seen.topology.nodes[0].accelerators] == [
        ("rocm", "0000:01:00.0")
    ]
    assert [note.message for note in seen.notes] == [
        "0000:02:00.0: 1002:515e, of class 0300, counts as a console and not as an accelerator; left "
        "out"
    ]


def test_what_the_system_computes_on_is_no_console(tmp_path: Path) -> None:
    console = function("01:00.0", "0300 [1002:1586]")
    used = function("01:00.0", "0300 [1002:1586]", COPROCESSOR.format("opencl0d0"))
    for inside, kinds in ((console, []), (used, ["rocm"])):
        (node,) = found(tmp_path, HOST.format(inside)).topology.nodes
        assert [one.kind for one in node.accelerators] == kinds


def test_a_console_of_huawei_is_no_npu(tmp_path: Path) -> None:
    inside = function("01:00.0", "0300 [19e5:1711]") + function("02:00.0", "1200 [19e5:d802]")
    (node,) = found(tmp_path, HOST.format(inside)).topology.nodes
    assert [(one.id, one.pci) for one in node.accelerators] == [("npu0", "0000:02:00.0")]


def test_an_unknown_kind_of_accelerator_is_noted(tmp_path: Path) -> None:
    seen = found(tmp_path, HOST.format(function("01:00.0", "1200 [1da3:1020]")))
    assert seen.topology.nodes[0].accelerators == ()
    assert "1da3:1020, of class 1200, is no known kind" in seen.notes[0].message


def test_partitions_of_one_function_are_apart(tmp_path: Path) -> None:
    parts = (COPROCESSOR.format(f"rsmi{n}") for n in (1, 0))
    inside = function("01:00.0", "1200 [1002:74a1]", *parts)
    seen = found(tmp_path, HOST.format(inside + function("02:00.0", "1200 [1002:74a1]")))
    assert [(one.index, one.pci) for one in seen.topology.nodes[0].accelerators] == [
        (0, "0000:01:00.0"), (1, "0000:01:00.0"), (2, "0000:02:00.0")
    ]  # fmt: skip
