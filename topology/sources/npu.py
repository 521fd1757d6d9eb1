"""Ascend NPUs, from the output of ``npu-smi info`` and ``npu-smi info -t topo``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from mkernel.topology.defaults import defaults
from mkernel.topology.model import Accelerator, FabricLink, NumaNode
from mkernel.topology.sources import kinds, pci
from mkernel.topology.sources.cpu import parse_cpu_list
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "npu-smi"

_COMMANDS = (("npu-smi", "info"), ("npu-smi", "info", "-t", "topo"))
_TIMEOUT_S = 20.0
_MOST_NPUS = 1024
_MOST_CHARACTERS = 1 << 20

_DIRECT = "HCCS"
_FABRIC = {_DIRECT, "HCCS_SW", "SIO"}
"""Relations that are scale-up links: between chips, through a switch, between two dies of a chip.
Only the rate of the first is known."""
_RELATIONS = {"X", "SYS", "PHB", "PIX", "PXB", "PIB", "NA", *_FABRIC}

_NAME = re.compile(r"(?:NPU|Phy-ID)(\d{1,4})")
_CARD = re.compile(r"(\d{1,4})\s+(\S{0,32}\d{3}\S{0,32})")
"""The upper line of a device in the table of ``npu-smi info``, such as ``0  910B3``; names are
short."""
_LOWER = re.compile(r"\d{1,4}(?:\s+(\d{1,4}))?")
"""The lower line of a device, ``0``, or ``0  5`` with a physical id; its second cell is the bus id."""


def is_text(text: str) -> bool:
    """Return whether a text is the output of ``npu-smi info`` or ``npu-smi info -t topo``, or both;
    neither is ever longer than 1 MiB."""
    return len(text) <= _MOST_CHARACTERS and bool(parse(text).accelerators)


def read(numa: Sequence[NumaNode] = ()) -> Findings:
    """Return the NPUs of this machine. No ``npu-smi`` means none, without a note.

    Args:
        numa: NUMA nodes, to find the one of the CPUs that a device is nearest to.
    """
    if shutil.which(_COMMANDS[0][0]) is None:
        return Findings(SOURCE)
    texts = []
    for command in _COMMANDS:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError, UnicodeError) as error:
            notes = Notes(SOURCE)
            notes.add(f"`{' '.join(command)}` failed: {error}; no NPU is listed")
            return Findings(SOURCE, notes=notes.all())
        texts.append(done.stdout)
    return parse("\n".join(texts), numa)


def parse(text: str, numa: Sequence[NumaNode] = ()) -> Findings:
    """Return the NPUs that the texts of either command, or of both, name. Never raises."""
    notes = Notes(SOURCE)
    cards = _table(text)
    rows, affinity = _matrix(text, notes)
    if len(cards) > 1 and not rows:
        notes.add("links between NPUs are not in the text; `npu-smi info -t topo` prints them")
    accelerators = tuple(
        Accelerator(
            id=kinds.accelerator_id("ascend", number),
            kind="ascend",
            name=cards[number].model if number in cards else "NPU",
            index=number,
            pci=cards[number].pci if number in cards else None,
            numa_node=_node_of(affinity.get(number, ""), numa),
        )
        for number in sorted({*rows, *cards})
    )
    return Findings(
        SOURCE,
        accelerators=accelerators,
        fabric=_links(rows, notes),
        fabric_known=bool(rows),
        notes=notes.all(),
    )


class _Chip(NamedTuple):
    """A chip in the table of ``npu-smi info``; ``number``: its physical id, if the table has one."""

    card: int
    number: int | None
    model: str
    pci: str


def _table(text: str) -> dict[int, _Chip]:
    """Return chips by NPU number: the physical id if the table has them, else the card's number,
    else, for cards with several chips, the place in the table."""
    found: list[_Chip] = []
    card: tuple[int, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 2:
            continue
        named, chip = _CARD.fullmatch(cells[0]), _LOWER.fullmatch(cells[0])
        address = pci.normalise(cells[1])
        if address is not None and chip is not None and card is not None:
            found.append(_Chip(card[0], int(chip[1]) if chip[1] else None, card[1], address))
        elif named is not None:
            card = (int(named[1]), named[2])
    for numbers in ([chip.number for chip in found], [chip.card for chip in found]):
        known = [number for number in numbers if number is not None]
        if len(set(known)) == len(found):
            return dict(zip(known, found, strict=True))
    return dict(enumerate(found))


def _matrix(text: str, notes: Notes) -> tuple[dict[int, dict[int, str]], dict[int, str]]:
    """Return relations by row and column, and the CPUs near each NPU as text."""
    columns: list[int] = []
    rows: dict[int, dict[int, str]] = {}
    affinity: dict[int, str] = {}
    for line in text.splitlines():
        words = line.split()
        columns = _header(words) or columns
        name = _NAME.fullmatch(words[0]) if words else None
        if name is None or not columns or _header(words):
            continue
        number, relations = int(name[1]), words[1 : 1 + len(columns)]
        strange = [word for word in relations if word not in _RELATIONS]
        if strange or len(relations) < len(columns) or number in rows:
            what = f"{strange[0][:20]!r} in it" if strange else "too short, or a second one"
            notes.add(f"the row of {words[0]} is not understood ({what}); ignored")
            continue
        rows[number] = dict(zip(columns, relations, strict=True))
        affinity[number] = "".join(words[1 + len(columns) :])
    return rows, affinity


def _header(words: list[str]) -> list[int]:
    """Return the NPU numbers of a matrix's columns; empty if the line is not its header."""
    if words[-2:] == ["CPU", "Affinity"]:
        words = words[:-2]
    names = [_NAME.fullmatch(word) for word in words[:_MOST_NPUS]]
    return [int(name[1]) for name in names if name] if all(names) else []


def _links(rows: dict[int, dict[int, str]], notes: Notes) -> tuple[FabricLink, ...]:
    found = []
    for one, row in rows.items():
        for other, relation in row.items():
            back = rows.get(other, {}).get(one)
            if one >= other or back is None:
                continue
            if back != relation:
                notes.add(f"NPU {one} to {other} is {relation}, and {back} back; not linked")
            elif relation in _FABRIC:
                ends = (kinds.accelerator_id("ascend", one), kinds.accelerator_id("ascend", other))
                gbs = defaults().fabrics["hccs"].gbs() if relation == _DIRECT else None
                found.append(FabricLink(kind="hccs", ends=ends, count=1, gbs=gbs))
    return tuple(found)


def _node_of(affinity: str, numa: Sequence[NumaNode]) -> int | None:
    """Return the one NUMA node that has all of the CPUs."""
    try:
        cpus = parse_cpu_list(affinity)
    except ValueError:
        return None
    nodes = [node.id for node in numa if cpus and cpus <= set(node.cpus)]
    return nodes[0] if len(nodes) == 1 else None
