"""PCI addresses, the place of a device in the tree of bridges, and the rate of its link.

:func:`read_tree` reads the PCI tree of sysfs: accelerators, NICs without RDMA, and links between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mkernel.topology.model import Accelerator, Bridge, KindName, Nic
from mkernel.topology.sources import kinds
from mkernel.topology.sources.files import children, read_int, read_text, resolve
from mkernel.topology.sources.findings import Findings, Notes

_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"\.(?P<function>[0-7])",
    re.IGNORECASE,
)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.IGNORECASE)
_CODING = ((5.0, 8 / 10), (32.0, 128 / 130), (128.0, 242 / 256))
"""The share of the bits on the wire that carries data, for up to this many GT/s."""
_MOST_LANES = 32


def normalise(address: str) -> str | None:
    """Return ``dddd:bb:dd.f`` in lower case, from any usual spelling (``3b:00.0``,
    ``00000000:3B:00.0``). None if it is not a PCI address."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        return None
    domain, bus, device = (int(match[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function']}"


def is_real(bridge: str) -> bool:
    """Return whether a bridge's name is the system's own, and not one that a source made up."""
    return _HOST_BRIDGE.fullmatch(bridge) is not None or normalise(bridge) is not None


def sort_key(address: str) -> tuple[int, ...]:
    """Return the sort key of a normalised address, by which drivers number devices."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


class DeviceAt(NamedTuple):
    """A device of a PCI function; most functions have only one device, which is part 0."""

    address: str
    part: int = 0


def parts(address: str, numbers: Iterable[int | None]) -> dict[DeviceAt, int | None]:
    """Return the devices of a function to which a file gives these numbers. Each different number
    is a device; without any there is one, whose number is unknown."""
    known = sorted({number for number in numbers if number is not None})
    return {DeviceAt(address, part): number for part, number in enumerate(known or [None])}


def numbered(
    known: Mapping[DeviceAt, tuple[KindName, int | None]],
) -> dict[DeviceAt, int]:
    """Return a number for each device among those of its kind, in the order of numbers: the known
    ones if all of a kind are known and different, else by address, as drivers number devices."""
    found: dict[DeviceAt, int] = {}
    by_address = sorted(known, key=lambda device: (sort_key(device.address), device.part))
    for each in dict.fromkeys(kind for kind, _ in known.values()):
        devices = [device for device in by_address if known[device][0] == each]
        numbers = [number for device in devices if (number := known[device][1]) is not None]
        if len(set(numbers)) < len(devices):
            numbers = list(range(len(devices)))
        found |= zip(devices, numbers, strict=True)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def bridges_above(device: Path) -> tuple[str, ...]:
    """Return the host bridge and PCIe bridges above a device's real sysfs folder, outermost first."""
    found = [
        part.lower()
        for part in device.parent.parts
        if _HOST_BRIDGE.fullmatch(part) or normalise(part) == part.lower()
    ]
    # A folder above the tree may look like a PCI address; the host bridge is where it starts.
    roots = [i for i, part in enumerate(found) if part.startswith("pci")]
    return tuple(found[roots[-1] :]) if roots else ()


def folder(root: Path, address: str) -> Path | None:
    """Return the real sysfs folder of a PCI function; None if the tree does not list it."""
    return resolve(root / "sys/bus/pci/devices" / address, root)


def parse_speed(text: str | None) -> float | None:
    """Parse a speed: ``16.0 GT/s PCIe`` → 16.0; None for anything else (``Unknown speed``)."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?) *GT/s", (text or "").strip())
    return (float(match[1]) or None) if match else None


def link_gbs(speed: float | None, lanes: int | None) -> float | None:
    """Return the GB/s in one direction of a link with ``speed`` GT/s per lane. None if either is
    unknown: virtual machines show links of no lanes."""
    coding = next((share for most, share in _CODING if speed and speed <= most), None)
    if speed is None or coding is None or lanes is None or not 1 <= lanes <= _MOST_LANES:
        return None
    return round(speed * lanes * coding / 8, 3)


def port_gbs(port: Path) -> float | None:
    """Return the rate of the link that a bridge's folder describes."""
    return link_gbs(_speed(port, idles=True), _lanes(port))


def device_gbs(function: Path, *, idles: bool) -> float | None:
    """Return the rate of the link above a function: the lesser of its two sides, in speed and in
    width.

    Args:
        idles: True if the link slows down with an idle device, as those of GPUs do. Then the
            fastest speed counts and not the current one. The current width counts in either case,
            since a link that was trained narrow stays so.
    """
    sides = (function, function.parent)
    speeds = [speed for side in sides if (speed := _speed(side, idles=idles)) is not None]
    lanes = [width for side in sides if (width := _lanes(side)) is not None]
    return link_gbs(min(speeds, default=None), min(lanes, default=None))


def _speed(function: Path, *, idles: bool) -> float | None:
    now = None if idles else parse_speed(read_text(function / "current_link_speed"))
    return now or parse_speed(read_text(function / "max_link_speed"))


def _lanes(function: Path) -> int | None:
    now = read_int(function / "current_link_width")
    return now or read_int(function / "max_link_width")


def numa_node(function: Path, notes: Notes) -> int | None:
    """Return the function's NUMA node. None if sysfs does not state it (no file, empty, or -1); a
    value that is no number also adds a note."""
    text = read_text(function / "numa_node")
    if text is None or text == "-1":
        return None
    if text.isdecimal() and int(text) < 2**16:
        return int(text)
    notes.add(f"{function.name}: numa_node holds {text[:40]!r}, which is no node number; ignored")
    return None


SOURCE = "sysfs PCI"


def read_tree(root: Path = Path("/")) -> Findings:
    """Return the devices that ``/sys/bus/pci/devices`` shows, whether a driver serves them or not.

    Accelerators are numbered by bus id, as drivers number them. A network function is listed as a
    NIC only if it has network interfaces and no RDMA device; RDMA devices are listed by
    :mod:`~mkernel.topology.sources.infiniband`.
    """
    notes = Notes(SOURCE)
    accelerators: list[Accelerator] = []
    nics: list[Nic] = []
    bridges: dict[str, Bridge] = {}
    numbers: Counter[KindName] = Counter()
    unclassed: list[str] = []
    for address, function in _functions(root):
        code = read_int(function / "class")
        if code is None:
            if not children(function / "infiniband"):
                unclassed.append(address)
            continue
        pci_class = code >> 8
        vendor, device = read_int(function / "vendor"), read_int(function / "device")
        kind = kinds.accelerator(pci_class, vendor, device)
        if kind is None and not kinds.is_network(pci_class):
            why = kinds.why_none(pci_class, vendor, device)
            if why is not None:
                notes.add(f"{address}: {why}")
            continue
        path = bridges_above(function)
        numa = numa_node(function, notes)
        for bridge, folder in zip(reversed(path[1:]), function.parents, strict=False):
            bridges.setdefault(bridge, Bridge(id=bridge, pcie_gbs=port_gbs(folder)))
        if kind is not None:
            accelerators.append(
                Accelerator(
                    id=kinds.accelerator_id(kind, numbers[kind]),
                    kind=kind,
                    name=kinds.model(vendor, device),
                    index=numbers[kind],
                    pci=address,
                    pci_path=path,
                    pcie_gbs=device_gbs(function, idles=True),
                    numa_node=numa,
                )
            )
            numbers[kind] += 1
        elif not children(function / "infiniband"):
            nics += [
                Nic(
                    id=interface.name,
                    kind="ethernet",
                    name=interface.name,
                    pci=address,
                    pci_path=path,
                    pcie_gbs=device_gbs(function, idles=False),
                    numa_node=numa,
                    speed_gbps=_port_speed(interface),
                )
                for interface in _interfaces(function)
            ]
    notes.add_unclassed(unclassed)
    return Findings(
        source=SOURCE,
        accelerators=tuple(accelerators),
        nics=tuple(nics),
        bridges=tuple(bridges.values()),
        notes=notes.all(),
    )


def _functions(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield addresses and real folders, by bus id."""
    found = {}
    for entry in children(root / "sys/bus/pci/devices"):
        address = normalise(entry.name)
        folder = resolve(entry, root)
        if address is not None and folder is not None:
            found[address] = folder
    for address in sorted(found, key=sort_key):
        yield address, found[address]


def _interfaces(function: Path) -> list[Path]:
    """Return folders of network interfaces; virtio's lie one folder below the function."""
    folders = [function, *(each for each in children(function) if each.name.startswith("virtio"))]
    return [interface for folder in folders for interface in children(folder / "net")]


def _port_speed(interface: Path) -> float | None:
    """Return the speed in Gb/s. sysfs has Mb/s, and -1, or nothing at all, if the link is down."""
    speed = read_int(interface / "speed")
    return speed / 1000 if speed is not None and speed > 0 else None
