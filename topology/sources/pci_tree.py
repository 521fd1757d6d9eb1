"""Accelerators, NICs without RDMA and links between them, from the PCI tree of sysfs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mkernel.topology.model import Accelerator, Bridge, KindName, Nic
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.files import children, read_int, resolve
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "sysfs PCI"


def read(root: Path = Path("/")) -> Findings:
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
        path = pci.bridges(function)
        numa = pci.numa_node(function, notes)
        for bridge, folder in zip(reversed(path[1:]), function.parents, strict=False):
            bridges.setdefault(bridge, Bridge(id=bridge, pcie_gbs=pci.port_gbs(folder)))
        if kind is not None:
            accelerators.append(
                Accelerator(
                    id=kinds.accelerator_id(kind, numbers[kind]),
                    kind=kind,
                    name=kinds.model(vendor, device),
                    index=numbers[kind],
                    pci=address,
                    pci_path=path,
                    pcie_gbs=pci.device_gbs(function, idles=True),
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
                    pcie_gbs=pci.device_gbs(function, idles=False),
                    numa_node=numa,
                    speed_gbps=_speed(interface),
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
        address = pci.normalise(entry.name)
        folder = resolve(entry, root)
        if address is not None and folder is not None:
            found[address] = folder
    for address in sorted(found, key=pci.sort_key):
        yield address, found[address]


def _interfaces(function: Path) -> list[Path]:
    """Return folders of network interfaces; virtio's lie one folder below the function."""
    folders = [function, *(each for each in children(function) if each.name.startswith("virtio"))]
    return [interface for folder in folders for interface in children(folder / "net")]


def _speed(interface: Path) -> float | None:
    """Return the speed in Gb/s. sysfs has Mb/s, and -1, or nothing at all, if the link is down."""
    speed = read_int(interface / "speed")
    return speed / 1000 if speed is not None and speed > 0 else None
