"""One machine seen by several sources is one machine: merges what they report of a device.

Same PCI address (and port, for NICs) is the same device; where an address is unknown, the same id
or device name of the same kind is. A gap is filled from the other source; a contradiction keeps
the first source's value and is reported, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from mkernel.topology.model import Accelerator, Nic, Note

_Device = TypeVar("_Device", Accelerator, Nic)
_OWN_NAMES = frozenset({"id", "name", "index"})
"""Fields in which sources may differ without contradicting each other."""


def merge(
    first: Iterable[_Device], second: Iterable[_Device], source: str
) -> tuple[tuple[_Device, ...], tuple[Note, ...]]:
    """Devices of both, each once, in order of appearance. ``source`` names where ``second`` is
    from, for the notes."""
    merged = list(first)
    notes: list[Note] = []
    for device in second:
        for place, known in enumerate(merged):
            if _same(known, device):
                merged[place] = _combine(known, device, source, notes)
                break
        else:
            merged.append(_distinct(device, {known.id for known in merged}, source, notes))
    return tuple(merged), tuple(notes)


def _same(one: _Device, other: _Device) -> bool:
    if isinstance(one, Nic) and isinstance(other, Nic) and one.port != other.port:
        return False
    if one.pci is not None and other.pci is not None:
        return one.pci == other.pci
    if one.kind != other.kind:
        return False
    # An RDMA device's name is unique on a machine; an accelerator's is only its model.
    return one.id == other.id or (isinstance(one, Nic) and one.name == other.name)


def _combine(known: _Device, device: _Device, source: str, notes: list[Note]) -> _Device:
    fill = {}
    for field in type(known).model_fields:
        mine, theirs = getattr(known, field), getattr(device, field)
        if mine == theirs or theirs in (None, ()) or field in _OWN_NAMES:
            continue
        if mine in (None, ()):
            fill[field] = theirs
        else:
            notes.append(
                Note(
                    source=source,
                    message=f"{known.id}: {field} is {theirs!r} here and {mine!r} in an earlier "
                    "source; the earlier is kept",
                )
            )
    return known.model_copy(update=fill) if fill else known


def _distinct(device: _Device, taken: set[str], source: str, notes: list[Note]) -> _Device:
    """The device under an id that no other one of the machine has."""
    if device.id not in taken:
        return device
    number = 2
    while f"{device.id}-{number}" in taken:
        number += 1
    renamed = f"{device.id}-{number}"
    notes.append(Note(source=source, message=f"a second device has the id {device.id}: {renamed}"))
    return device.model_copy(update={"id": renamed})
