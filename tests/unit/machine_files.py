"""Files of real machines: those that the project describes, and published ones where they are present.

The presets and ``tests/data/machines`` describe machines in the project's own words: buses, NUMA
nodes, what hangs below which switch, link rates. Here a description becomes the file that NCCL or hwloc
would have. What vendors published is not part of the project; ``PUBLISHED_TOPOLOGIES`` names a folder
that has it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import pytest

from mkernel.topology import presets

ROOT = Path(__file__).parents[2]
DESCRIBED = ROOT / "tests" / "data" / "machines"
"""Machines beside the presets of ``topology/machines``."""
PUBLISHED = Path(os.environ.get("PUBLISHED_TOPOLOGIES", ROOT.parent / "shared" / "topologies"))
GBS_PER_GT = 128 / 130 / 8
"""GB/s of one lane for each GT/s, with the 128b/130b coding of PCIe 3 to 5."""


def machine_file(name: str, folder: Path) -> Path:
    """``p5.nccl`` and ``p5.hwloc`` are written into ``folder`` from the preset ``p5``; a name that ends
    in ``.xml`` is a published file, without which the test is skipped."""
    if name.endswith(".xml"):
        published = PUBLISHED / name
        if not published.exists():
            pytest.skip(f"{name} is a published file; PUBLISHED_TOPOLOGIES names no folder with it")
        return published
    described, _, how = name.rpartition(".")
    file = presets.find(described) or DESCRIBED / f"{described}.json"
    machine = json.loads(file.read_text())
    document = {"nccl": nccl, "hwloc": hwloc}[how](machine)
    file = folder / f"{name}.xml"
    file.write_bytes(tostring(document))
    return file


def nccl(machine: dict[str, Any]) -> Element:
    """As files for ``NCCL_TOPO_FILE``, which are written by hand: switches and functions alone, no
    ports, no names, no links between accelerators."""
    system = Element("system", version="1")
    for numa, cpus in machine["cpus"].items():
        cpu = SubElement(system, "cpu", numaid=numa, affinity=_mask(cpus), arch="x86_64")
        for tree in machine["trees"]:
            if tree["numa"] == int(numa):
                above = SubElement(
                    cpu,
                    "pci",
                    {"busid": _address(tree["switch"]), "class": "0x060400"},
                    **_nccl_link(machine["switch"]),
                )
                for kind, address in _functions(machine, tree):
                    SubElement(above, "pci", **_nccl_function(machine["kinds"][kind], address))
    return system


def _nccl_function(kind: dict[str, Any], address: str) -> dict[str, str]:
    found = {"busid": address, "class": f"0x{kind['class']}00", **_nccl_link(kind)}
    if "id" in kind:
        vendor, device = kind["id"].split(":")
        found |= {"vendor": f"0x{vendor}", "device": f"0x{device}"}
    return found


def _nccl_link(link: dict[str, Any]) -> dict[str, str]:
    return {"link_speed": f"{link['gts']} GT/s", "link_width": str(link["lanes"])}


def hwloc(machine: dict[str, Any]) -> Element:
    """As ``lstopo --of xml`` of hwloc 2: every bridge, rates of links, names that Linux gives."""
    topology = Element("topology", version="2.0")
    nodes = f"0x{(1 << len(machine['cpus'])) - 1:08x}"
    whole = hwloc_object(topology, "Machine", nodeset=nodes)
    for numa, cpus in machine["cpus"].items():
        own = {"nodeset": f"0x{1 << int(numa):08x}", "cpuset": _mask(cpus, "0x")}
        package = hwloc_object(whole, "Package", os_index=numa, **own)
        memory = str(machine["memory_gib"] << 30) if "memory_gib" in machine else ""
        hwloc_object(package, "NUMANode", os_index=numa, local_memory=memory, **own)
        for tree in machine["trees"]:
            if tree["numa"] == int(numa):
                _hwloc_tree(package, machine, tree)
    return topology


def _hwloc_tree(package: Element, machine: dict[str, Any], tree: dict[str, Any]) -> None:
    buses = f"0000:[{tree['host']}-ff]"
    above = hwloc_object(package, "Bridge", bridge_type="0-1", bridge_pci=buses)
    for each in ("port", "switch"):
        if each in tree:
            above = hwloc_bridge(above, _address(tree[each]), _gbs(machine["switch"]))
    for slot, (kind, address) in enumerate(_functions(machine, tree)):
        properties = machine["kinds"][kind]
        place = above
        if "switch" in tree:  # each device below a downstream port of its own, one bus further
            inside = int(tree["switch"].split(":")[-2], 16) + 1
            slot_address = f"0000:{inside:02x}:{slot // 8:02x}.{slot % 8}"
            place = hwloc_bridge(above, slot_address, _gbs(properties))
        ids = properties["class"], *properties["id"].split(":")
        function = hwloc_function(place, address, *ids, _gbs(properties))
        bus, device = (int(part, 16) for part in address.replace(".", ":").split(":")[1:3])
        if kind == "efa":
            hwloc_object(function, "OSDev", name=f"rdmap{bus}s{device}", osdev_type="3")
        elif kind == "ena":
            name = f"enp{bus}s{device}"
            if "first_slot" in tree:  # Linux prefers numbers of slots where firmware has some
                name = f"ens{tree['first_slot'] + device}"
            hwloc_object(function, "OSDev", name=name, osdev_type="2")


def hwloc_bridge(above: Element, address: str, gbs: str) -> Element:
    """A port of a switch, or a root port."""
    return hwloc_object(
        above,
        "Bridge",
        bridge_type="1-1",
        pci_busid=address,
        pci_type="0604 [1000:c030] [0000:0000] 00",
        pci_link_speed=gbs,
    )


def hwloc_function(
    above: Element, address: str, pci_class: str, vendor: str, device: str, gbs: str
) -> Element:
    """What is no bridge."""
    return hwloc_object(
        above,
        "PCIDev",
        pci_busid=address,
        pci_type=f"{pci_class} [{vendor}:{device}] [0000:0000] 00",
        pci_link_speed=gbs,
    )


def hwloc_object(parent: Element, kind: str, **attributes: str) -> Element:
    return SubElement(parent, "object", type=kind, **attributes)


def _functions(machine: dict[str, Any], tree: dict[str, Any]) -> list[tuple[str, str]]:
    """Kind and address of what hangs in a tree."""
    return [
        (kind, _address(each))
        for kind in machine["kinds"]
        for each in tree["devices"].get(kind, ())
    ]


def _address(text: str) -> str:
    """With its PCI domain, which most machines have only one of."""
    return text if text.count(":") == 2 else f"0000:{text}"


def _gbs(link: dict[str, Any]) -> str:
    """hwloc writes GB/s, and 0 where it does not know."""
    return f"{link.get('gts', 0) * GBS_PER_GT * link.get('lanes', 0):.6f}"


def _mask(cpus: str, prefix: str = "") -> str:
    """``0-3,8`` as Linux' words of 32 bits, the highest first."""
    mask = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            mask |= 1 << cpu
    words = range((mask.bit_length() - 1) // 32, -1, -1)
    return ",".join(f"{prefix}{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in words)
