"""Synthetic machines, written as NCCL and hwloc would write them and as sysfs shows them.

A machine is sockets with trees of switches and devices. It knows what the class and the bandwidth of
each pair are, from its shape alone: the readers are judged by that, and not by each other only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from hypothesis import strategies as st
from machine_files import hwloc_bridge, hwloc_function, hwloc_object
from sysfs_tree import SysfsTree

from mkernel.topology.discover import Discovery, discover, read

GBS = {2.5: 0.25, 8.0: 0.984615, 16.0: 1.969231, 32.0: 3.938462}
"""GB/s of one lane by GT/s: 8b/10b coding, then 128b/130b."""
IDS = {
    "gpu": ("0302", "10de", "2330"),
    "cx": ("0200", "15b3", "1021"),
    "efa": ("0200", "1d0f", "efa1"),
    "infiniband": ("0207", "1fc1", "0010"),
    "ethernet": ("0200", "8086", "1572"),
}
"""PCI class, vendor and device."""
STEMS = {"gpu": "cuda", "cx": "mlx5_", "efa": "rdmap", "infiniband": "qib", "ethernet": "eth"}
RATES = {"cx": 400, "efa": 100, "infiniband": 40, "ethernet": 25}
"""Gb/s of a port."""


@dataclass(frozen=True)
class Link:
    """GT/s and lanes of a PCIe link."""

    speed: float
    lanes: int

    @property
    def gbs(self) -> float:
        return round(GBS[self.speed] * self.lanes, 3)


@dataclass(frozen=True)
class Device:
    """``kind`` is a key of IDS. ``link`` None: nobody can say how fast it is."""

    kind: str
    link: Link | None = Link(32.0, 16)


@dataclass(frozen=True)
class Switch:
    below: tuple[Device | Switch, ...]
    link: Link | None = Link(32.0, 16)


@dataclass(frozen=True)
class Socket:
    """A NUMA node; each tree hangs on a root port of a host bridge of its own."""

    trees: tuple[Device | Switch, ...]
    cpus: int = 4


@dataclass(frozen=True)
class Machine:
    """``nvlinks``: from each GPU to the switches. ``numa``: whether devices know their node.
    ``rates``: whether ports know their speed."""

    sockets: tuple[Socket, ...]
    nvlinks: int = 0
    numa: bool = True
    rates: bool = True


@dataclass
class Placed:
    """A device or switch with its addresses. ``port``: the bridge right above."""

    item: Device | Switch
    address: str
    port: str
    name: str
    below: list[Placed] = field(default_factory=list)


@dataclass
class Tree:
    socket: int
    host_bridge: str
    root: Placed


def trees(machine: Machine) -> list[Tree]:
    """Everything with addresses, in bus order, which is depth first, as firmware numbers."""
    names = {kind: count() for kind in IDS}
    made = []
    for domain, socket in enumerate(machine.sockets):
        buses = count()
        for tree in socket.trees:
            bus = next(buses)
            port = f"{domain:04x}:{bus:02x}:01.0"
            root = _place(tree, port, domain, buses, names)
            made.append(Tree(domain, f"pci{domain:04x}:{bus:02x}", root))
    return made


def _place(
    item: Device | Switch,
    port: str,
    domain: int,
    buses: Iterator[int],
    names: dict[str, Iterator[int]],
) -> Placed:
    address = f"{domain:04x}:{next(buses):02x}:00.0"
    if isinstance(item, Device):
        return Placed(item, address, port, f"{STEMS[item.kind]}{next(names[item.kind])}")
    placed = Placed(item, address, port, "")
    bus = next(buses)
    for slot, below in enumerate(item.below):
        down = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        placed.below.append(_place(below, down, domain, buses, names))
    return placed


def devices(machine: Machine) -> dict[str, tuple[Tree, list[Placed]]]:
    """Name → its tree, and the way down from the root to the device."""

    def walk(tree: Tree, way: list[Placed]) -> Iterator[tuple[str, tuple[Tree, list[Placed]]]]:
        here = way[-1]
        if isinstance(here.item, Device):
            yield here.name, (tree, way)
        for below in here.below:
            yield from walk(tree, [*way, below])

    return {name: found for tree in trees(machine) for name, found in walk(tree, [tree.root])}


def expected(machine: Machine, one: str, other: str) -> tuple[str, float | None]:
    """Class of a pair, and GB/s of the narrowest link. Between sockets 16 GB/s are assumed."""
    known = devices(machine)
    (tree, way), (other_tree, other_way) = known[one], known[other]
    crossed, kind = [*way, *other_way], "NODE"
    if tree.root is not other_tree.root and machine.numa and tree.socket != other_tree.socket:
        kind = "SYS"
    if tree.host_bridge == other_tree.host_bridge:
        addresses = [each.address for each in way]
        shared = [each.address for each in other_way if each.address in addresses]
        own = [each for each in way if each.address not in shared]
        others = [each for each in other_way if each.address not in shared]
        crossed, kind = own + others, "PIX" if len(own) == len(others) == 1 else "PXB"
    rates = [each.item.link.gbs for each in crossed if each.item.link is not None]
    if kind == "SYS":
        rates.append(16.0)
    if machine.rates:
        ends = (way[-1].item, other_way[-1].item)
        rates += [RATES[e.kind] / 8 for e in ends if isinstance(e, Device) and e.kind in RATES]
    return kind, min(rates, default=None)


def nccl_xml(machine: Machine) -> str:
    """What ``NCCL_TOPO_DUMP_FILE`` gets: no root and downstream ports, a switch is one element."""
    system = Element("system", version="1")
    everything = trees(machine)
    for number, socket in enumerate(machine.sockets):
        numaid = {"numaid": str(number)} if machine.numa else {}
        mask = (1 << socket.cpus) - 1 << number * 32
        words = [f"{mask >> 32 * word & 0xFFFFFFFF:08x}" for word in range(len(machine.sockets))]
        cpu = SubElement(system, "cpu", numaid, affinity=",".join(reversed(words)), arch="x86_64")
        for tree in everything:
            if tree.socket == number:
                _nccl(cpu, tree.root, machine)
    return tostring(system, encoding="unicode")


def _nccl(above: Element, placed: Placed, machine: Machine) -> None:
    item = placed.item
    pci_class, vendor, device = ("0604", "", "") if isinstance(item, Switch) else IDS[item.kind]
    function = SubElement(above, "pci", {"busid": placed.address, "class": f"0x{pci_class}00"})
    if item.link is not None:
        function.set("link_speed", f"{item.link.speed} GT/s PCIe")
        function.set("link_width", str(item.link.lanes))
    if isinstance(item, Switch):
        for below in placed.below:
            _nccl(function, below, machine)
        return
    function.set("vendor", f"0x{vendor}")
    function.set("device", f"0x{device}")
    if item.kind == "gpu":
        dev = placed.name.removeprefix("cuda")
        gpu = SubElement(function, "gpu", dev=dev, sm="90", gdr="1")
        if machine.nvlinks:
            ends = {"target": "fffffff:ff:ff.0", "tclass": "0x068000"}
            SubElement(gpu, "nvlink", ends, count=str(machine.nvlinks))
    else:
        speed = {"speed": str(RATES[item.kind] * 1000)} if machine.rates else {}
        SubElement(SubElement(function, "nic"), "net", speed, name=placed.name, port="1", gdr="0")


def hwloc_xml(machine: Machine) -> str:
    """What ``lstopo --of xml`` prints: every port, links in GB/s, no rates of ports, no NVLink."""
    topology = Element("topology", version="2.0")
    nodes = f"0x{(1 << len(machine.sockets)) - 1:08x}"
    whole = hwloc_object(topology, "Machine", nodeset=nodes)
    everything = trees(machine)
    for number, socket in enumerate(machine.sockets):
        words = ["0x" + f"{(1 << socket.cpus) - 1:08x}"] + [""] * number
        node = {"nodeset": f"0x{1 << number:08x}", "cpuset": ",".join(words)}
        package = hwloc_object(whole, "Package", os_index=str(number), **node)
        hwloc_object(package, "NUMANode", os_index=str(number), **node)
        for tree in everything:
            if tree.socket == number:
                bus = f"{tree.host_bridge[3:7]}:[{tree.host_bridge[8:]}-ff]"
                above = package if machine.numa else whole
                host = hwloc_object(above, "Bridge", bridge_type="0-1", bridge_pci=bus)
                _hwloc(host, tree.root)
    return tostring(topology, encoding="unicode")


def _hwloc(above: Element, placed: Placed) -> None:
    item = placed.item
    gbs = f"{item.link.gbs if item.link is not None else 0.0:.6f}"
    port = hwloc_bridge(above, placed.port, gbs)
    if isinstance(item, Switch):
        inside = hwloc_bridge(port, placed.address, gbs)
        for below in placed.below:
            _hwloc(inside, below)
        return
    function = hwloc_function(port, placed.address, *IDS[item.kind], gbs)
    types = {"gpu": "5", "ethernet": "2"}
    name = f"opencl0d{placed.name.removeprefix('cuda')}" if item.kind == "gpu" else placed.name
    hwloc_object(function, "OSDev", name=name, osdev_type=types.get(item.kind, "3"))


def write_sysfs(machine: Machine, root: Path) -> SysfsTree:
    """A recorded tree, links of both sides included."""
    files = SysfsTree(root)
    for number, socket in enumerate(machine.sockets):
        files.numa(number, f"{32 * number}-{32 * number + socket.cpus - 1}" if socket.cpus else "")
    for tree in trees(machine):
        numa = f"{tree.socket}\n" if machine.numa else "-1\n"
        _sysfs(files, tree.root, tree.host_bridge, numa, machine)
    return files


def _sysfs(files: SysfsTree, placed: Placed, above: str, numa: str, machine: Machine) -> None:
    item, path = placed.item, f"{above}/{placed.port}/{placed.address}"
    link = None
    if item.link is not None:
        link = (f"{item.link.speed} GT/s PCIe", str(item.link.lanes))
    bridge = ("0604", "1000", "c030")
    ids = bridge if isinstance(item, Switch) else IDS[item.kind]
    for where, (pci_class, vendor, device), side in (
        (f"{above}/{placed.port}", bridge, None),
        (path, ids, link),  # which describes both sides of the link
    ):
        function = files.pci(
            where,
            numa=numa,
            vendor=f"0x{vendor}\n",
            class_=f"0x{pci_class}00\n",
            device=f"0x{device}\n",
            link=side,
        )
    if isinstance(item, Device) and item.kind == "ethernet":
        (function / "net" / placed.name).mkdir(parents=True)
        speed = RATES[item.kind] * 1000 if machine.rates else -1
        (function / "net" / placed.name / "speed").write_text(f"{speed}\n")
    elif isinstance(item, Device) and item.kind != "gpu":
        rate = f"{RATES[item.kind]} Gb/sec (4X)\n" if machine.rates else None
        files.rdma(placed.name, function, rate=rate)
    for below in placed.below:
        _sysfs(files, below, path, numa, machine)


def found(machine: Machine, how: str, folder: Path) -> Discovery:
    """What is read of the machine, as ``nccl``, ``hwloc`` or ``sysfs`` in ``folder`` shows it."""
    if how == "sysfs":
        write_sysfs(machine, folder / "tree")
        return discover(folder / "tree")
    file = folder / f"{how}.xml"
    file.write_text(nccl_xml(machine) if how == "nccl" else hwloc_xml(machine))
    return read(file)


_links = st.none() | st.builds(Link, st.sampled_from(sorted(GBS)), st.sampled_from([1, 4, 8, 16]))
_devices = st.builds(Device, st.sampled_from(["gpu", "gpu", *IDS]), _links)
_trees = st.recursive(
    _devices,
    lambda below: st.builds(Switch, st.lists(below, max_size=4).map(tuple), _links),
    max_leaves=8,
)
_sockets = st.builds(Socket, st.lists(_trees, max_size=3).map(tuple), st.integers(0, 8))
machines = st.builds(
    Machine,
    st.lists(_sockets, min_size=1, max_size=4).map(tuple),
    numa=st.booleans(),
    rates=st.booleans(),
)
"""Machines of up to four sockets, with holes: empty sockets and switches, links and NUMA nodes that
nobody knows, ports without a rate."""


def dgx(nvlinks: int = 18) -> Machine:
    """Two sockets with four switches each; a GPU and a NIC below every one."""
    pair = Switch((Device("gpu"), Device("cx")))
    return Machine((Socket((pair,) * 4, cpus=32),) * 2, nvlinks=nvlinks)
