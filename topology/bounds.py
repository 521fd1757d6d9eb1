"""Bounds on what a machine can have, since larger rates or counts in a source are mistakes.

A rate in kb/s that is read as Mb/s would plan for a machine that nobody has. Such numbers count as
unknown, and a note names each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from mkernel.topology.model import Accelerator, Bridge, FabricLink, Model, Nic, Node, Note
from mkernel.topology.sources.findings import Findings, Notes

_Part = TypeVar("_Part", Accelerator, Nic, Bridge, FabricLink)
_Sized = TypeVar("_Sized", Findings, Node)

_MOST: Mapping[type[Model], Mapping[str, float]] = MappingProxyType(
    {
        Accelerator: {"pcie_gbs": 512, "cores": 4096},
        Nic: {"speed_gbps": 6400, "pcie_gbs": 512},
        Bridge: {"pcie_gbs": 512},
        FabricLink: {"gbs": 16384, "count": 1024},
    }
)
"""The largest plausible value by kind of part: 32 lanes of PCIe 7, and some eight times the values
of the fastest ports, links and chips of 2026."""


def believed(found: _Sized, source: str) -> tuple[_Sized, tuple[Note, ...]]:
    """Return the findings without numbers that no machine has, and a note of ``source`` about each
    of these."""
    notes = Notes(source)
    parts: dict[str, Any] = {
        name: _believed(getattr(found, name), notes)
        for name in ("accelerators", "nics", "bridges", "fabric")
    }
    if not notes.all():
        return found, ()
    if isinstance(found, Node):
        return found.model_copy(update=parts), notes.all()
    return replace(found, **parts), notes.all()


def _believed(parts: Iterable[_Part], notes: Notes) -> tuple[_Part, ...]:
    return tuple(_within(part, notes) for part in parts)


def _within(part: _Part, notes: Notes) -> _Part:
    most = _MOST[type(part)]
    wrong = [field for field in most if (getattr(part, field) or 0) > most[field]]
    name = f"{part.kind} {'-'.join(part.ends)}" if isinstance(part, FabricLink) else part.id
    for field in wrong:
        value = getattr(part, field)
        notes.add(
            f"{name}: {field} is {value:g}, and no machine has more than {most[field]:g}; counted as "
            "unknown"
        )
    return part.model_copy(update=dict.fromkeys(wrong)) if wrong else part
