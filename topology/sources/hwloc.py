"""hwloc XML, as ``lstopo --of xml`` of hwloc 2 and 3 writes it.

It names the parts of a node, their places on PCIe, and the rates of the links there; if hwloc was
built with NVIDIA's or AMD's library, also the rates of links between accelerators. Rates of NICs'
ports are not in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mkernel.errors import InputFileError
from mkernel.topology.model import (
    FABRIC_HOST,
    FABRIC_SWITCH,
    Accelerator,
    Bridge,
    FabricLink,
    KindName,
    Nic,
    NumaNode,
)
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.cpu import parse_cpu_mask
from mkernel.topology.sources.findings import Findings, Notes
from mkernel.topology.sources.xml import BusIds, Element, Place

SOURCE = "hwloc XML"
ROOT = "topology"
"""The tag of the root element."""

_NETWORK, _OPENFABRICS, _COPROCESSOR = 2, 3, 5
_NETWORK_BIT, _OPENFABRICS_BIT, _COPROCESSOR_BIT = 1 << 4, 1 << 5, 1 << 3
"""The types of operating-system devices: numbers in hwloc 2, bits in hwloc 3."""
_ACTIVE = "4"
"""The state of a port that lets data through."""
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_HOST_BUS = re.compile(r"([0-9a-f]{1,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:nvml|rsmi)(\d{1,4})")
"""The names of operating-system devices that carry the driver's own number of a GPU."""


class _Gpu(NamedTuple):
    kind: KindName
    place: Place
    element: Element
    ids: tuple[int, int]
    number: int | None


def read(topology: Element, path: Path) -> Findings:
    """Return the machine of the file.

    Raises:
        InputFileError: another version of hwloc, no machine in it, a bus id that is none, or one
            that occurs twice.
    """
    version = topology.attributes.get("version", "1 (none is given)")
    if not version.startswith(("2.", "3.")):
        raise InputFileError(
            f"topology file {path}: hwloc version is {version[:40]}; expected 2.x or 3.x, as "
            "`lstopo --of xml` writes"
        )
    machine = next(topology.all("object"), None)
    if machine is None:
        raise InputFileError(f"topology file {path}: <topology> holds no <object>; is it whole?")
    return _Reader(path, bits=version.startswith("3.")).read(topology, machine)


class _Reader:
    def __init__(self, path: Path, *, bits: bool) -> None:
        self._bits = bits
        self._notes = Notes(SOURCE)
        self._buses = BusIds(path, "pci_busid")
        self._numa: list[NumaNode] = []
        self._bridges: list[Bridge] = []
        self._gpus: dict[pci.DeviceAt, _Gpu] = {}
        self._nics: list[Nic] = []
        self._ends: dict[str, pci.DeviceAt] = {}
        """The GPU of each ``gp_index`` at which links may end."""
        self._switches: set[str] = set()
        """The ``gp_index`` of other objects at which links may end."""

    def read(self, topology: Element, machine: Element) -> Findings:
        self._object(machine, Place(None, ()))
        accelerators = self._numbered()
        ends = {index: accelerators[at].id for index, at in self._ends.items()}
        ends |= dict.fromkeys(self._switches, FABRIC_SWITCH)
        fabric = tuple(_links(topology, ends, self._notes))
        if not fabric and sum(one.kind == "cuda" for one in accelerators.values()) > 1:
            self._notes.add("links between accelerators are not in the file; paths are PCIe's")
        return Findings(
            source=SOURCE,
            hostname=_info(machine, "HostName") or _info(topology, "HostName"),
            numa=tuple(self._numa),
            accelerators=tuple(accelerators.values()),
            nics=tuple(self._nics),
            bridges=tuple(self._bridges),
            fabric=fabric,
            notes=self._notes.all(),
        )

    def _object(self, element: Element, place: Place) -> None:
        match element.attributes.get("type"):
            case "Bridge":
                place = self._bridge(element, place)
            case "PCIDev":
                self._function(element, place)
                return
            case "OSDev":
                if self._is_rdma(element):
                    self._rdma(element, place, None, None)
                return
            case "NUMANode":
                self._numa_node(element)
            case _:
                place = place._replace(numa=self._nearest(element))
        for child in element.all("object"):
            self._object(child, place)

    def _is(self, device: Element, number: int, bit: int) -> bool:
        """Return whether a device of the operating system has this type."""
        found = device.number("osdev_type") or 0
        return bool(found & bit) if self._bits else found == number

    def _is_rdma(self, device: Element) -> bool:
        return self._is(device, _OPENFABRICS, _OPENFABRICS_BIT)

    def _nearest(self, element: Element) -> int | None:
        """Return the NUMA node that an object belongs to, if it belongs to one alone."""
        mask = element.attributes.get("nodeset", "")
        try:
            nodes = parse_cpu_mask(mask)
        except ValueError:
            return None
        return next(iter(nodes)) if len(nodes) == 1 else None

    def _numa_node(self, element: Element) -> None:
        number = element.number("os_index")
        if number is None:
            self._notes.add(f"line {element.line}: a NUMA node without os_index; ignored")
            return
        try:
            cpus = parse_cpu_mask(element.attributes.get("cpuset", ""))
        except ValueError as error:
            self._notes.add(f"NUMA node {number}: cpuset: {error}; ignored")
            cpus = frozenset()
        memory = element.attributes.get("local_memory", "")
        size = int(memory) if re.fullmatch(r"\d{1,18}", memory) else None
        self._numa.append(NumaNode(id=number, cpus=tuple(sorted(cpus)), memory_bytes=size))

    def _bridge(self, element: Element, place: Place) -> Place:
        if element.attributes.get("bridge_type", "").startswith("0"):
            match = _HOST_BUS.match(element.attributes.get("bridge_pci", ""))
            name = f"pci{int(match[1], 16):04x}:{match[2].lower()}" if match else None
            return place._replace(bridges=(name or f"bridge in line {element.line}",))
        address = self._buses.take(element)
        self._bridges.append(Bridge(id=address, pcie_gbs=_gbs(element, self._notes)))
        return place._replace(bridges=(*place.bridges, address))

    def _function(self, element: Element, place: Place) -> None:
        address = self._buses.take(element)
        if element.attributes.get("subtype") == "NVSwitch":
            self._switches.add(element.attributes.get("gp_index", ""))
            return
        match = _PCI_TYPE.match(element.attributes.get("pci_type", ""))
        if match is None:
            self._notes.add(f"{address}: no pci_type; ignored")
            return
        pci_class, vendor, device = (int(part, 16) for part in match.groups())
        kind = kinds.accelerator(pci_class, vendor, device)
        if any(self._is(each, _COPROCESSOR, _COPROCESSOR_BIT) for each in element.all("object")):
            kind = kind or kinds.made_by(vendor)
        if kind is not None:
            self._accelerators(element, address, place, kind, (vendor, device))
        elif kinds.is_network(pci_class):
            self._network(element, address, place, (pci_class, vendor, device))
        else:
            why = kinds.why_none(pci_class, vendor, device)
            if why is not None:
                self._notes.add(f"{address}: {why}")

    def _accelerators(
        self, function: Element, address: str, place: Place, kind: KindName, ids: tuple[int, int]
    ) -> None:
        """Add the devices of a PCI function: one for each of the driver's numbers."""
        own = [(each, _driver_number(each)) for each in function.all("object")]
        found = pci.parts(address, (number for _, number in own))
        for at, number in found.items():
            self._gpus[at] = _Gpu(kind, place, function, ids, number)
        by_number = {number: at for at, number in found.items()}
        first = pci.DeviceAt(address)
        self._ends[function.attributes.get("gp_index", "")] = first
        for each, number in own:
            self._ends[each.attributes.get("gp_index", "")] = by_number.get(number, first)

    def _network(
        self, function: Element, address: str, place: Place, ids: tuple[int, int, int]
    ) -> None:
        ports = [each for each in function.all("object") if self._is_rdma(each)]
        for device in ports:
            self._rdma(device, place, function, ids[1])
        if ports:
            return
        interfaces = [
            each for each in function.all("object") if self._is(each, _NETWORK, _NETWORK_BIT)
        ]
        names = [each.attributes.get("name", address) for each in interfaces]
        # A file without any interface was made without looking for them; then the PCI ids decide.
        kind = "ethernet" if names else kinds.network(*ids)
        for name in names or [address]:
            self._add(Nic(id=name, kind=kind, name=name), place, function)

    def _rdma(
        self, device: Element, place: Place, function: Element | None, vendor: int | None
    ) -> None:
        """Add the ports of an RDMA device; ``function`` None if it is not on PCI."""
        name = device.attributes.get("name")
        if name is None:
            self._notes.add(f"line {device.line}: an RDMA device without a name; ignored")
            return
        states = {
            int(match[1]): info.attributes.get("value")
            for info in device.all("info")
            if (match := re.fullmatch(r"Port([1-9]\d{0,2})State", info.attributes.get("name", "")))
        }
        for port, state in sorted((states or {1: None}).items()):
            nic = Nic(
                id=f"{name}:{port}" if len(states) > 1 else name,
                kind=kinds.rdma(vendor),
                name=name,
                port=port,
                active=state in (None, _ACTIVE),
            )
            self._add(nic, place, function)

    def _add(self, nic: Nic, place: Place, function: Element | None) -> None:
        if function is None:
            self._nics.append(nic.model_copy(update={"numa_node": place.numa}))
            return
        self._nics.append(
            nic.model_copy(
                update={
                    "pci": pci.normalise(function.attributes["pci_busid"]),
                    "pci_path": place.bridges,
                    "pcie_gbs": _gbs(function, self._notes),
                    "numa_node": place.numa,
                }
            )
        )

    def _numbered(self) -> dict[pci.DeviceAt, Accelerator]:
        """Return GPUs with the driver's own numbers if the file has them, or else numbered by bus
        id, as drivers do."""
        numbers = pci.numbered({at: (gpu.kind, gpu.number) for at, gpu in self._gpus.items()})
        return {
            at: Accelerator(
                id=kinds.accelerator_id(gpu.kind, index),
                kind=gpu.kind,
                name=_info(gpu.element, "PCIDevice") or kinds.model(*gpu.ids),
                index=index,
                pci=at.address,
                pci_path=gpu.place.bridges,
                pcie_gbs=_gbs(gpu.element, self._notes),
                numa_node=gpu.place.numa,
            )
            for at, index in numbers.items()
            for gpu in (self._gpus[at],)
        }


def _driver_number(device: Element) -> int | None:
    match = _NUMBERED.fullmatch(device.attributes.get("name", ""))
    return int(match[1]) if match else None


def _info(element: Element, name: str) -> str | None:
    for info in element.all("info"):
        if info.attributes.get("name") == name:
            return info.attributes.get("value") or None
    return None


def _gbs(element: Element, notes: Notes) -> float | None:
    """Return the speed of a link; hwloc writes GB/s, and 0 if it is unknown."""
    text = element.attributes.get("pci_link_speed", "")
    known = re.fullmatch(r"\d{1,5}(?:\.\d{1,9})?", text)
    if text and known is None:
        where = f"line {element.line}: pci_link_speed"
        notes.add(f"{where} {text[:40]!r} is no speed in GB/s; ignored")
    return round(float(text), 3) or None if known else None


_KINDS = {"NVLinkBandwidth": "nvlink", "XGMIBandwidth": "xgmi"}
_MOST_OBJECTS = 512
_OBJECT = re.compile(r"(?:([A-Za-z0-9]+):)?(\d{1,18})")
"""An object: ``OSDev:802``, or ``802`` if all objects of a matrix have one type."""
_HOSTS = frozenset({"Package", "NUMANode", "Machine"})


def _links(topology: Element, ends: Mapping[str, str], notes: Notes) -> Iterator[FabricLink]:
    """Yield the scale-up links of the file.

    Args:
        ends: ``gp_index`` of an object → id of the accelerator that it is or belongs to, or
            ``switch``.
    """
    for tag in ("distances2", "distances2hetero"):
        for matrix in topology.all(tag):
            kind = _KINDS.get(matrix.attributes.get("name", ""))
            if kind is not None:
                yield from _links_of(matrix, kind, ends, notes)


def _links_of(
    matrix: Element, kind: str, ends: Mapping[str, str], notes: Notes
) -> Iterator[FabricLink]:
    objects, values = _words(matrix, "indexes"), _words(matrix, "u64values")
    count = len(objects)
    plain = all(re.fullmatch(r"\d{1,12}", value) for value in values)
    if not 0 < count <= _MOST_OBJECTS or len(values) != count * count or not plain:
        notes.add(f"line {matrix.line}: a matrix of {count} objects, {len(values)} values; ignored")
        return
    names = [_end(each, matrix, ends) for each in objects]
    found: dict[frozenset[str], tuple[tuple[str, str], int]] = {}
    for row, one in enumerate(names):
        if one is None or one in (FABRIC_SWITCH, FABRIC_HOST):
            continue
        carried: Counter[str] = Counter()  # several ports of switches, or of the host, add up
        for column, other in enumerate(names):
            if other is not None and other != one:
                carried[other] += int(values[row * count + column])
        for other, mbs in (+carried).items():
            _, first = found.setdefault(frozenset((one, other)), ((one, other), mbs))
            if first != mbs:
                notes.add(f"{one} to {other} is {mbs} MB/s, and {first} back; the latter is kept")
    for both, mbs in found.values():
        yield FabricLink.model_validate({"kind": kind, "ends": both, "gbs": mbs / 1000})


def _end(text: str, matrix: Element, ends: Mapping[str, str]) -> str | None:
    """Return the end that an object is; None: no known end."""
    match = _OBJECT.fullmatch(text)
    if match is None:
        return None
    kind = match[1] or matrix.attributes.get("type", "")
    return FABRIC_HOST if kind in _HOSTS else ends.get(match[2])


def _words(matrix: Element, tag: str) -> list[str]:
    return [word for part in matrix.all(tag) for word in "".join(part.texts).split()]
