"""RDMA devices from ``/sys/class/infiniband``: one :class:`Nic` per port."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from mkernel.topology.model import Nic
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.files import children, read_int, read_text, resolve
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "sysfs infiniband"
LinkLayer = Literal["InfiniBand", "Ethernet", "Unspecified"]
_LAYERS: dict[str, LinkLayer] = {
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "unspecified": "Unspecified",
}


def read(root: Path = Path("/")) -> Findings:
    """Return all RDMA ports, by device and port.

    A port whose state is missing counts as down: a route over it would hang. The id is the device's
    name, with ``:port`` if the device has several.
    """
    notes = Notes(SOURCE)
    devices = children(root / "sys/class/infiniband")
    nics = [nic for entry in devices for nic in _device(entry, root, notes)]
    if not devices:
        notes.add("no RDMA device (sys/class/infiniband is absent or empty)")
    return Findings(SOURCE, nics=tuple(nics), notes=notes.all())


def _device(entry: Path, root: Path, notes: Notes) -> list[Nic]:
    folder = resolve(entry, root)
    if folder is None:
        notes.add(f"{entry.name}: its link leads nowhere; ignored")
        return []
    device = Nic(id=entry.name, kind="infiniband", name=entry.name)
    function = resolve(folder / "device", root)
    if function is not None:
        device = device.model_copy(
            update={
                "kind": kinds.rdma(read_int(function / "vendor")),
                "pci": pci.normalise(function.name),
                "pci_path": pci.bridges_above(function),
                "pcie_gbs": pci.device_gbs(function, idles=False),
                "numa_node": pci.numa_node(function, notes),
            }
        )
    if device.pci is None:
        notes.add(f"{entry.name}: no PCI address; its nearness to others is unknown")

    ports = sorted(
        (int(port.name), port)
        for port in children(folder / "ports")
        if re.fullmatch(r"[1-9]\d{0,2}", port.name)
    )
    if not ports:
        notes.add(f"{entry.name}: no ports are listed; ignored")
    nics = []
    for number, port in ports:
        state = read_text(port / "state")
        if state is None:
            notes.add(f"{entry.name} port {number}: no state; counted as down")
        nics.append(
            device.model_copy(
                update={
                    "id": entry.name if len(ports) == 1 else f"{entry.name}:{number}",
                    "port": number,
                    "speed_gbps": parse_rate(read_text(port / "rate") or ""),
                    "link_layer": _LAYERS.get((read_text(port / "link_layer") or "").lower()),
                    "active": state is not None and is_active(state),
                }
            )
        )
    return nics


def parse_rate(text: str) -> float | None:
    """Parse a rate: ``200 Gb/sec (4X HDR)`` → 200.0; None if there is no positive rate."""
    match = re.match(r"(\d{1,6}(?:\.\d{1,6})?) *Gb/s", text)
    rate = float(match[1]) if match else 0.0
    return rate or None


def is_active(state: str) -> bool:
    """Return whether a port's ``state`` (``4: ACTIVE``) lets data through."""
    number, _, word = state.partition(":")
    return number.strip() == "4" or word.strip().upper() == "ACTIVE"
