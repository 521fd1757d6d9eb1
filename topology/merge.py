"""Merging of several sources' findings into one machine.

Equal PCI addresses (and ports, for NICs) mean the same device; if an address is unknown, an equal
id or device name of the same kind does. Devices that one source distinguishes stay distinct: a PCI
function may have several devices, such as the chips of one card. A gap is filled from the other
source; a contradiction keeps the first source's value and is reported, never averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mkernel.topology.model import (
    FABRIC_HOST,
    FABRIC_SWITCH,
    Accelerator,
    Bridge,
    FabricLink,
    Model,
    Nic,
    Note,
    NumaNode,
)
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.chips import architecture, product
from mkernel.topology.sources.findings import Findings, Notes

_Device = TypeVar("_Device", Accelerator, Nic)
_Part = TypeVar("_Part", NumaNode, Bridge)
_AnyModel = TypeVar("_AnyModel", bound=Model)

_OWN_NAMES = frozenset({"id", "name", "index", "ends"})
"""Fields in which sources may differ without contradicting each other."""
_OF_PLACE = ("pci_path", "pcie_gbs", "numa_node")
_MOST_SHOWN = 80
_MOST_MEMORY = 1.2
"""The ratio from which the memory of two accelerators is that of different products."""


class _Contradictions(Notes):
    """Notes of one source's merge. Devices that contradict in the same way share one note."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._names: dict[tuple[str, str, str], list[str]] = {}

    def contradiction(self, name: str, field: str, mine: Any, theirs: Any) -> None:
        self._names.setdefault((field, _short(mine), _short(theirs)), []).append(name)

    def all(self) -> tuple[Note, ...]:
        for (field, mine, theirs), names in self._names.items():
            self.add(
                f"{', '.join(names)}: {field} is {theirs} here and {mine} in an earlier source; the "
                "earlier is kept"
            )
        return super().all()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def merge(sources: Iterable[Findings]) -> Findings:
    """Merge all findings into one, each thing once, in order of appearance; the earlier source is
    right.

    ``hostname`` is the first that is known. Links of accelerators have the merged ids as ends.
    """
    whole = Findings(source="merged")
    for found in sources:
        whole = _join(whole, found)
    return whole


def different(known: Findings, found: Findings) -> str | None:
    """Return why two descriptions are of different machines; None: they may be of one.

    If both name a host, that decides. Else they are if both list real accelerators and have none of
    the same place, chip and memory in common. A source that lists none of these adds to what is
    known.
    """
    hosts = [name.partition(".")[0] for name in (known.hostname, found.hostname) if name]
    if len(hosts) == 2:
        return None if hosts[0] == hosts[1] else f"hosts are {' and '.join(hosts)}"
    mine, theirs = (
        [one for one in each.accelerators if not one.emulated] for each in (known, found)
    )
    if not mine or not theirs or any(_alike(one, other) for one in mine for other in theirs):
        return None
    counts = (Counter(map(product, each)).most_common(1)[0][0] for each in (mine, theirs))
    return f"they have no accelerator in common ({' and '.join(counts)})"


def _alike(one: Accelerator, other: Accelerator) -> bool:
    """Return whether two sources may mean one accelerator: the same place, and as far as both know
    the same chip, with memory that differs by no more than what drivers keep for themselves."""
    chips = {architecture(one), architecture(other)} - {None}
    memory = sorted(each.memory_bytes or 0 for each in (one, other))
    return (
        _same(one, other)
        and one.kind == other.kind
        and len(chips) < 2
        and (not memory[0] or memory[1] < _MOST_MEMORY * memory[0])
    )


def _join(known: Findings, found: Findings) -> Findings:
    notes = _Contradictions(found.source)
    accelerators, names = _devices(known.accelerators, found.accelerators, notes)
    nics, _ = _devices(known.nics, found.nics, notes)
    return Findings(
        source=known.source,
        hostname=known.hostname or found.hostname,
        numa=_parts(known.numa, found.numa, "NUMA node", notes),
        accelerators=accelerators,
        nics=nics,
        bridges=_parts(known.bridges, found.bridges, "bridge", notes),
        fabric=_links(known.fabric, found.fabric, names, notes),
        fabric_known=known.fabric_known or found.fabric_known,
        no_p2p=_pairs((*known.no_p2p, *((names[a], names[b]) for a, b in found.no_p2p))),
        notes=known.notes + found.notes + notes.all(),
    )


def _devices(
    known: tuple[_Device, ...], found: tuple[_Device, ...], notes: _Contradictions
) -> tuple[tuple[_Device, ...], dict[str, str]]:
    """Return the devices of both, and a map from found id to merged id."""
    merged, names = list(known), {}
    taken: dict[int, _Device] = {}
    for device in found:
        places = [
            place
            for place, other in enumerate(merged)
            if _same(other, device) and not _apart(taken.get(place, device), device)
        ]
        if places:
            place = min(places, key=lambda place: merged[place].id != device.id)
            merged[place] = _combine(merged[place], device, merged[place].id, notes)
        else:
            place = len(merged)
            merged.append(_distinct(device, {other.id for other in merged}, notes))
        taken[place] = device
        names[device.id] = merged[place].id
    return tuple(_placed(merged)), names


def _apart(one: _Device, other: _Device) -> bool:
    """Return whether one source, which lists both, means different devices by them."""
    if isinstance(one, Nic):
        return one.id != other.id
    return one.kind == other.kind and isinstance(other, Accelerator) and one.index != other.index


def _placed(devices: Sequence[_Device]) -> Iterator[_Device]:
    """Yield the devices with places filled in: devices of one PCI function have one place, which a
    source may know from any of them."""
    places: dict[str, dict[str, Any]] = {}
    for device in devices:
        if device.pci is not None:
            place = places.setdefault(device.pci, {})
            for field in _OF_PLACE:
                if place.get(field) in (None, ()):
                    place[field] = getattr(device, field)
    for device in devices:
        place = places.get(device.pci or "", {})
        fill = {name: value for name, value in place.items() if getattr(device, name) in (None, ())}
        yield device.model_copy(update=fill) if fill else device


def _parts(
    known: tuple[_Part, ...], found: tuple[_Part, ...], what: str, notes: _Contradictions
) -> tuple[_Part, ...]:
    merged = {part.id: part for part in known}
    for part in found:
        first = merged.setdefault(part.id, part)
        if first is not part:
            merged[part.id] = _combine(first, part, f"{what} {part.id}", notes)
    return tuple(merged.values())


def _links(
    known: tuple[FabricLink, ...],
    found: tuple[FabricLink, ...],
    names: dict[str, str],
    notes: _Contradictions,
) -> tuple[FabricLink, ...]:
    places = {end: end for end in (FABRIC_SWITCH, FABRIC_HOST)} | names
    merged = {(link.kind, frozenset(link.ends)): link for link in known}
    for link in found:
        ends = (places[link.ends[0]], places[link.ends[1]])
        renamed = link.model_copy(update={"ends": ends})
        key = (link.kind, frozenset(ends))
        first = merged.setdefault(key, renamed)
        if first is not renamed:
            merged[key] = _combine(first, renamed, f"{link.kind} {'-'.join(ends)}", notes)
    return tuple(merged.values())


def _pairs(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple({frozenset(pair): pair for pair in pairs}.values())


def _same(one: _Device, other: _Device) -> bool:
    if isinstance(one, Nic) and isinstance(other, Nic) and one.port != other.port:
        return False
    if one.pci is not None and other.pci is not None:
        return one.pci == other.pci
    if one.kind != other.kind:
        return False
    # An RDMA device's name is unique on a machine; an accelerator's is only its model.
    return one.id == other.id or (isinstance(one, Nic) and one.name == other.name)


def _combine(known: _AnyModel, found: _AnyModel, name: str, notes: _Contradictions) -> _AnyModel:
    fill = {}
    for field in type(known).model_fields:
        mine, theirs = getattr(known, field), getattr(found, field)
        if mine == theirs or theirs in (None, ()) or field in _OWN_NAMES:
            continue
        if mine in (None, ()) or _refines(field, theirs, mine):
            fill[field] = theirs
        elif not _refines(field, mine, theirs):
            notes.contradiction(name, field, mine, theirs)
    return known.model_copy(update=fill) if fill else known


def _refines(field: str, fine: Any, coarse: Any) -> bool:
    """Return whether a value agrees with another and is more precise.

    An RDMA device of unknown vendor may turn out to be of a known one. A ``pci_path`` may leave
    bridges out: NCCL has no root ports and no downstream ports.
    """
    if field == "kind":
        return kinds.refines(fine, coarse)
    if field != "pci_path":
        return False
    rest = iter(fine)
    return all(bridge in rest for bridge in coarse if pci.is_real(bridge))


def _distinct(device: _Device, taken: set[str], notes: _Contradictions) -> _Device:
    """Return the device under an id that no other device of the machine has."""
    if device.id not in taken:
        return device
    number = 2
    while f"{device.id}-{number}" in taken:
        number += 1
    renamed = f"{device.id}-{number}"
    notes.add(f"a second device has the id {device.id}: {renamed}")
    return device.model_copy(update={"id": renamed})
