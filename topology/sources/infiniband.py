"""RDMA devices from ``/sys/class/infiniband``: one :class:`Nic` per port."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from mkernel.topology.model import Nic, NicKind, Note
from mkernel.topology.sources import pci
from mkernel.topology.sources.files import children, read_int, read_text, resolve

SOURCE = "sysfs infiniband"
_VENDORS: dict[int, NicKind] = {0x15B3: "cx", 0x02C9: "cx", 0x1D0F: "efa"}
"""PCI vendor ids: Mellanox/NVIDIA (and its IEEE number, which some drivers report), Amazon."""

LinkLayer = Literal["InfiniBand", "Ethernet", "Unspecified"]
_LAYERS: dict[str, LinkLayer] = {
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "unspecified": "Unspecified",
}


def read(root: Path = Path("/")) -> tuple[tuple[Nic, ...], tuple[Note, ...]]:
    """All RDMA ports, by device and port, and notes.

    A port whose state is missing counts as down: a route over it would hang. The id is the device's
    name, with ``:port`` where the device has several.
    """
    base = root / "sys/class/infiniband"
    nics: list[Nic] = []
    notes: list[Note] = []
    devices = children(base)
    for entry in devices:
        device, found = _device(entry, root)
        nics += device
        notes += found
    if not devices:
        notes.append(_note("no RDMA device (sys/class/infiniband is absent or empty)"))
    return tuple(nics), tuple(notes)


def _device(entry: Path, root: Path) -> tuple[list[Nic], list[Note]]:
    notes: list[Note] = []
    folder = resolve(entry, root)
    if folder is None:
        return [], [_note(f"{entry.name}: its link leads nowhere; ignored")]
    address, numa, vendor = None, None, None
    path: tuple[str, ...] = ()
    function = resolve(folder / "device", root)
    if function is not None:
        address = pci.normalise(function.name)
        path = pci.bridges(function)
        numa, numa_notes = pci.numa_node(function, SOURCE)
        notes += numa_notes
        vendor = read_int(function / "vendor")
    if address is None:
        notes.append(_note(f"{entry.name}: no PCI address; its nearness to others is unknown"))

    ports = [
        (int(port.name), port)
        for port in children(folder / "ports")
        if re.fullmatch(r"[1-9]\d{0,2}", port.name)
    ]
    if not ports:
        notes.append(_note(f"{entry.name}: no ports are listed; ignored"))
    nics = []
    for number, port in sorted(ports):
        state = read_text(port / "state")
        if state is None:
            notes.append(_note(f"{entry.name} port {number}: no state; counted as down"))
        nics.append(
            Nic(
                id=entry.name if len(ports) == 1 else f"{entry.name}:{number}",
                kind=_VENDORS.get(vendor or 0, "infiniband"),
                name=entry.name,
                port=number,
                pci=address,
                pci_path=path,
                numa_node=numa,
                speed_gbps=parse_rate(read_text(port / "rate") or ""),
                link_layer=_LAYERS.get((read_text(port / "link_layer") or "").lower()),
                active=state is not None and is_active(state),
            )
        )
    return nics, notes


def parse_rate(text: str) -> float | None:
    """``200 Gb/sec (4X HDR)`` → 200.0; None where there is no positive rate."""
    match = re.match(r"(\d{1,6}(?:\.\d{1,6})?) *Gb/s", text)
    rate = float(match[1]) if match else 0.0
    return rate or None


def is_active(state: str) -> bool:
    """Whether a port's ``state`` (``4: ACTIVE``) lets data through."""
    number, _, word = state.partition(":")
    return number.strip() == "4" or word.strip().upper() == "ACTIVE"


def _note(message: str) -> Note:
    return Note(source=SOURCE, message=message)
