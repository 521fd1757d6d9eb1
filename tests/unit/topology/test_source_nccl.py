"""What NCCL's files say beyond a tree of devices: missing attributes, links, networks, odd hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel.topology.discover import Discovery, read
from mkernel.topology.model import Node

GPU = '<pci busid="{bus}" class="0x030200" vendor="0x10de" device="0x2330">{inside}</pci>'


def found(tmp_path: Path, inside: str, cpu: str = 'numaid="0" affinity="0000000f"') -> Discovery:
    file = tmp_path / "system.xml"
    file.write_text(f'<system version="1"><cpu {cpu}>{inside}</cpu></system>')
    return read(file)


def node(tmp_path: Path, inside: str, **more: str) -> Node:
    return found(tmp_path, inside, **more).topology.nodes[0]


def gpus(*inside: str) -> str:
    return "".join(
        GPU.format(bus=f"0000:{i:02x}:00.0", inside=text) for i, text in enumerate(inside)
    )


def test_missing_attributes_are_gaps(tmp_path: Path) -> None:
    inside = '<pci busid="01:00.0"><gpu/></pci><pci busid="02:00.0"><nic><net/></nic></pci>'
    seen = found(tmp_path, inside, cpu="")
    (node,) = seen.topology.nodes
    (gpu,), (nic,) = node.accelerators, node.nics
    assert (gpu.id, gpu.kind, gpu.numa_node, gpu.pcie_gbs) == ("cuda0", "cuda", None, None)
    assert (nic.id, nic.kind, nic.speed_gbps) == ("0000:02:00.0", "ethernet", None)
    assert node.numa == ()
    assert [note.message for note in seen.notes] == [
        "line 1: a CPU without a NUMA node; its place is unknown"
    ]


def test_gpus_have_nccls_numbers_or_else_the_drivers(tmp_path: Path) -> None:
    numbered = node(tmp_path, gpus('<gpu dev="1"/>', '<gpu dev="0"/>'))
    assert [(a.id, a.pci) for a in numbered.accelerators] == [
        ("cuda0", "0000:01:00.0"),
        ("cuda1", "0000:00:00.0"),
    ]
    for odd in (("", '<gpu dev="0"/>'), ('<gpu dev="0"/>', '<gpu dev="0"/>')):
        assert [a.pci for a in node(tmp_path, gpus(*odd)).accelerators] == [
            "0000:00:00.0",
            "0000:01:00.0",
        ]


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ('class="0x020000" vendor="0x15b3" device="0x1021"', "cx"),
        ('class="0x020700"', "infiniband"),
        ('class="0x020000" vendor="0x1d0f" device="0xefa1"', "efa"),
        ('class="0x020000" vendor="0x1d0f" device="0xec20"', "ethernet"),
        ('class="0x020000"', "ethernet"),
    ],
)
def test_kinds_of_nics_that_no_net_describes(tmp_path: Path, attributes: str, kind: str) -> None:
    (nic,) = node(tmp_path, f'<pci busid="01:00.0" {attributes}/>').nics
    assert (nic.kind, nic.id) == (kind, "0000:01:00.0")


def test_a_net_says_name_port_rate_and_gpudirect(tmp_path: Path) -> None:
    nets = (
        '<net name="rxe0" port="1" speed="200000" gdr="1"/>'
        '<net name="rxe0" port="2" speed="-1" gdr="0"/>'
    )
    nics = node(tmp_path, f'<pci busid="01:00.0" class="0x020000"><nic>{nets}</nic></pci>').nics
    assert [(n.id, n.name, n.port, n.speed_gbps, n.gpudirect, n.kind) for n in nics] == [
        ("rxe0:1", "rxe0", 1, 200.0, True, "infiniband"),
        ("rxe0:2", "rxe0", 2, None, False, "ethernet"),
    ]


def test_two_cards_of_one_name_stay_two(tmp_path: Path) -> None:
    net = '<nic><net name="mlx5_0"/></nic>'
    seen = found(tmp_path, f'<pci busid="01:00.0">{net}</pci><pci busid="02:00.0">{net}</pci>')
    assert [(n.id, n.pci) for n in seen.topology.nodes[0].nics] == [
        ("mlx5_0", "0000:01:00.0"),
        ("mlx5_0-2", "0000:02:00.0"),
    ]
    assert "a second device has the id mlx5_0" in seen.notes[0].message


def test_a_gpu_without_a_class_is_one_by_its_element(tmp_path: Path) -> None:
    (gpu,) = node(tmp_path, '<pci busid="01:00.0" vendor="0x10de"><gpu/></pci>').accelerators
    assert gpu.kind == "cuda"


def test_networks_below_a_cpu_are_one_each_and_near_none(tmp_path: Path) -> None:
    file = tmp_path / "system.xml"
    nic = '<nic><net name="eth0" speed="10000"/><net name="mlx5_0+mlx5_1"/></nic>'
    cpus = "".join(f'<cpu numaid="{i}">{nic}</cpu>' for i in range(2))
    file.write_text(f"<system>{cpus}</system>")
    seen = read(file)
    assert [(n.id, n.kind, n.numa_node) for n in seen.topology.nodes[0].nics] == [
        ("eth0", "ethernet", None)
    ]
    assert [note.message for note in seen.notes] == [
        "mlx5_0+mlx5_1 joins ports that are listed themselves; ignored"
    ]


def test_nvlinks_by_generation_and_end(tmp_path: Path) -> None:
    to_other = '<nvlink target="0000:01:00.0" count="2" tclass="0x030200"/>'
    back = '<nvlink target="0000:00:00.0" count="2" tclass="0x030200"/>'
    switches = '<nvlink target="0000:c{}:00.0" count="9" tclass="0x068000"/>'
    c2c = '<c2c bw="44712" count="5"/>'
    power = '<nvlink target="0000:04:00.0" count="3" tclass="0x068001"/>'
    seen = node(
        tmp_path,
        gpus(
            f'<gpu sm="60">{to_other}</gpu>',
            f'<gpu sm="60">{back}{power}</gpu>',
            f'<gpu sm="90">{switches.format(0)}{switches.format(1)}</gpu>',
            f'<gpu sm="100">{switches.format("0")}{c2c}</gpu>',
            f"<gpu>{switches.format('0')}</gpu>",
        ),
    )
    assert [(link.kind, link.ends, link.count, link.gbs) for link in seen.fabric] == [
        ("nvlink", ("cuda0", "cuda1"), 2, 40.0),
        ("nvlink", ("cuda1", "host"), 3, 60.0),
        ("nvlink", ("cuda2", "switch"), 18, 450.0),
        ("nvlink", ("cuda3", "switch"), 9, 450.0),
        ("c2c", ("cuda3", "host"), 5, 223.56),
        ("nvlink", ("cuda4", "switch"), 9, None),
    ]


def test_links_that_do_not_fit_are_notes(tmp_path: Path) -> None:
    one_way = '<gpu><nvlink target="0000:01:00.0" count="4" tclass="0x03"/></gpu>'
    other_way = '<gpu><nvlink target="0000:00:00.0" count="2" tclass="0x03"/></gpu>'
    stranger = '<gpu><nvlink target="0000:99:00.0" count="2" tclass="0x03"/></gpu>'
    to_itself = '<gpu><nvlink target="0000:03:00.0" count="2" tclass="0x03"/></gpu>'
    none = '<gpu><nvlink target="0000:00:00.0" count="0" tclass="0x03"/></gpu>'
    seen = found(tmp_path, gpus(one_way, other_way, stranger, to_itself, none))
    assert [link.count for link in seen.topology.nodes[0].fabric] == [4]
    messages = [note.message for note in seen.notes]
    assert messages[0] == "cuda1 has 2 links to cuda0, which has 4 back; the latter are counted"
    assert "'0000:99:00.0', which is no accelerator of this file" in messages[1]
    assert len(messages) == 2


def test_several_ranks_of_one_gpu_are_one_accelerator(tmp_path: Path) -> None:
    link = '<nvlink target="fffffff:ff:ff.0" count="36" tclass="0x068000"/>'
    parts = [f'<gpu dev="0" sm="107" mlopart="{part}">{link}</gpu>' for part in range(2)]
    seen = node(tmp_path, gpus("".join(parts)))
    assert [a.id for a in seen.accelerators] == ["cuda0"]
    assert [link.count for link in seen.fabric] == [36]


def test_amds_files_name_their_gpus_otherwise(tmp_path: Path) -> None:
    link = '<xgmi target="0000:0{}:00.0" count="1" tclass="0x038000"/>'
    text = "".join(
        f'<pci busid="0{i}:00.0" class="0x038000"><gpu gcn="gfx942" dev="{i}">'
        f"{link.format(1 - i)}</gpu></pci>"
        for i in range(2)
    )
    seen = node(tmp_path, text)
    assert [a.id for a in seen.accelerators] == ["rocm0", "rocm1"]
    assert [(link.kind, link.ends) for link in seen.fabric] == [("xgmi", ("rocm0", "rocm1"))]


def test_consoles_and_switches_of_nvlink_are_no_accelerators(tmp_path: Path) -> None:
    seen = found(
        tmp_path,
        '<pci busid="01:00.0" class="0x030000" vendor="0x1a03" device="0x2000"/>'
        '<pci busid="02:00.0" class="0x068000" vendor="0x10de" device="0x22a3"/>',
    )
    assert seen.topology.nodes[0].accelerators == ()
    assert len(seen.notes) == 1


def test_a_large_machine_has_no_limit_of_nodes(tmp_path: Path) -> None:
    """NCCL once had one of 256 elements, which hosts overflow."""
    switches = "".join(
        f'<pci busid="{s:04x}:00:00.0" class="0x060400">'
        + "".join(
            f'<pci busid="{s:04x}:01:{d:02x}.0" class="0x0{"302" if d == 0 else "207"}00"/>'
            for d in range(12)
        )
        + "</pci>"
        for s in range(64)
    )
    seen = node(tmp_path, switches)
    assert (len(seen.accelerators), len(seen.nics), len(seen.bridges)) == (64, 704, 64)


def test_a_broken_affinity_is_a_note(tmp_path: Path) -> None:
    for mask in ("xyz", "ffffffff," * 3000):
        seen = found(tmp_path, "", cpu=f'numaid="0" affinity="{mask}"')
        assert seen.topology.nodes[0].cpus == ()
        assert "affinity" in seen.notes[0].message


AMD = '<pci busid="0{bus}:00.0" class="0x{cls}" vendor="0x1002" device="0x{device}">{gpu}</pci>'


@pytest.mark.parametrize(
    ("gpu", "architecture", "cores"),
    [
        ('<gpu dev="0" sm="304" gcn="942"/>', "gfx942", 304),
        ('<gpu dev="0" sm="228" gcn="gfx942"/>', "gfx942", 228),
        ('<gpu dev="0" sm="104" gcn="910"/>', "gfx90a", 104),
        ('<gpu dev="0" sm="120" gcn="gfx908:sramecc+:xnack-"/>', "gfx908", 120),
        ('<gpu dev="0" sm="90"/>', None, 90),
        ('<gpu dev="0" gcn="what?"/>', None, None),
        ('<gpu dev="0" sm="-1" gcn="950"/>', "gfx950", None),
        ("", None, None),
    ],
)
def test_amds_architecture_is_gcn_and_sm_counts_compute_units(
    tmp_path: Path, gpu: str, architecture: str | None, cores: int | None
) -> None:
    seen = node(tmp_path, AMD.format(bus=1, cls="120000", device="74a1", gpu=gpu))
    (one,) = seen.accelerators
    assert (one.kind, one.architecture, one.cores) == ("rocm", architecture, cores)


@pytest.mark.parametrize("cls", ["030000", "030200", "038000", "120000"])
@pytest.mark.parametrize(
    ("device", "gpu", "accelerators"),
    [
        ("66a1", "", 1),
        ("6860", "", 1),
        ("744c", "", 1),
        ("515e", '<gpu dev="0" gcn="906"/>', 1),
        ("515e", "", 0),
        ("164e", "", 0),
    ],
)
def test_amds_gpus_of_each_class_and_consoles(
    tmp_path: Path, cls: str, device: str, gpu: str, accelerators: int
) -> None:
    seen = found(tmp_path, AMD.format(bus=1, cls=cls, device=device, gpu=gpu))
    # Of the other classes there are no consoles.
    assert len(seen.topology.nodes[0].accelerators) == (accelerators or cls != "030000")
    if not accelerators and cls == "030000":
        assert f"1002:{device}, of class 0300, counts as a console" in seen.notes[0].message


def test_gpus_of_one_function_with_numbers_of_their_own_are_apart(tmp_path: Path) -> None:
    """Parts of a partitioned device, each with the function's address."""
    link = '<nvlink target="0000:00:00.0" count="4" tclass="0x030200"/>'
    parts = "".join(f'<gpu dev="{dev}" sm="90"/>' for dev in (1, 0))
    seen = node(tmp_path, gpus(parts, f'<gpu dev="2" sm="90">{link}</gpu>'))
    assert [(one.id, one.pci) for one in seen.accelerators] == [
        ("cuda0", "0000:00:00.0"),
        ("cuda1", "0000:00:00.0"),
        ("cuda2", "0000:01:00.0"),
    ]
    assert [link.ends for link in seen.fabric] == [("cuda2", "cuda0")]


def test_networks_of_one_function_are_apart(tmp_path: Path) -> None:
    nets = "".join(f'<net name="mlx4_{n}" port="1" speed="40000" gdr="1"/>' for n in range(2))
    text = f'<pci busid="01:00.0" class="0x020700" vendor="0x15b3"><nic>{nets}</nic></pci>'
    assert [one.id for one in node(tmp_path, text).nics] == ["mlx4_0", "mlx4_1"]


def test_functions_without_a_class_are_noted(tmp_path: Path) -> None:
    leaf = '<pci busid="00:1{}.0"{}/>'
    switch = f'<pci busid="02:00.0">{leaf.format(9, "")}</pci>'
    inside = leaf.format(6, "") + leaf.format(7, ' class="??"') + switch
    seen = found(tmp_path, inside + leaf.format(8, ' class="0x010802"'))
    assert [note.message.rpartition("; ")[2] for note in seen.notes] == [
        "left out: 0000:00:16.0, 0000:00:17.0, 0000:00:19.0"
    ]


def test_kinds_are_numbered_by_themselves(tmp_path: Path) -> None:
    inside = "".join(
        AMD.format(bus=bus, cls="120000", device="74a1", gpu="") for bus in (1, 3)
    ) + GPU.format(bus="02:00.0", inside="")
    seen = node(tmp_path, inside)
    assert {(one.id, one.pci) for one in seen.accelerators} == {
        ("rocm0", "0000:01:00.0"), ("rocm1", "0000:03:00.0"), ("cuda0", "0000:02:00.0")
    }  # fmt: skip
