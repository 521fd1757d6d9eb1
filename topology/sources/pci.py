"""PCI addresses, and where a device sits in the tree of bridges."""

from __future__ import annotations

import re
from pathlib import Path

from mkernel.topology.model import Note
from mkernel.topology.sources.files import read_text, resolve

_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"\.(?P<function>[0-7])",
    re.IGNORECASE,
)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.IGNORECASE)


def normalise(address: str) -> str | None:
    """``dddd:bb:dd.f`` in lower case, from any usual spelling (``3b:00.0``,
    ``00000000:3B:00.0``). None where it is not a PCI address."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        return None
    domain, bus, device = (int(match[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function']}"


def bridges(device: Path) -> tuple[str, ...]:
    """Host bridge and PCIe bridges above a device's real sysfs folder, outermost first."""
    found = [
        part.lower()
        for part in device.parent.parts
        if _HOST_BRIDGE.fullmatch(part) or normalise(part) == part.lower()
    ]
    # A folder above the tree may look like a PCI address; the host bridge is where it starts.
    roots = [i for i, part in enumerate(found) if part.startswith("pci")]
    return tuple(found[roots[-1] :]) if roots else ()


def position(root: Path, address: str) -> tuple[str, ...]:
    """:func:`bridges` of a PCI address in the tree; empty where it is not listed."""
    device = resolve(root / "sys/bus/pci/devices" / address, root)
    return bridges(device) if device is not None else ()


def numa_node(device: Path, source: str) -> tuple[int | None, tuple[Note, ...]]:
    """The device folder's NUMA node. None where sysfs does not say (no file, empty, or -1); a
    value that is no number is also worth a note."""
    text = read_text(device / "numa_node")
    if text is None or text == "-1":
        return None, ()
    if text.isdecimal() and int(text) < 2**16:
        return int(text), ()
    message = f"{device.name}: numa_node holds {text[:40]!r}, which is no node number; ignored"
    return None, (Note(source=source, message=message),)
