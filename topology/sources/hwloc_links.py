"""Links between accelerators in hwloc's XML: matrices of MB/s between objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from mkernel.topology.model import FABRIC_HOST, FABRIC_SWITCH, FabricLink
from mkernel.topology.sources.findings import Notes
from mkernel.topology.sources.xml import Element

_KINDS = {"NVLinkBandwidth": "nvlink", "XGMIBandwidth": "xgmi"}
_MOST_OBJECTS = 512
_OBJECT = re.compile(r"(?:([A-Za-z0-9]+):)?(\d{1,18})")
"""An object: ``OSDev:802``, or ``802`` if all objects of a matrix have one type."""
_HOSTS = frozenset({"Package", "NUMANode", "Machine"})


def links(topology: Element, ends: Mapping[str, str], notes: Notes) -> Iterator[FabricLink]:
    """Yield the scale-up links of the file.

    Args:
        ends: ``gp_index`` of an object → id of the accelerator that it is or belongs to, or
            ``switch``.
    """
    for tag in ("distances2", "distances2hetero"):
        for matrix in topology.all(tag):
            kind = _KINDS.get(matrix.attributes.get("name", ""))
            if kind is not None:
                yield from _links(matrix, kind, ends, notes)


def _links(
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
