"""CPUs and memory by NUMA node, from sysfs."""

from __future__ import annotations

import re
from pathlib import Path

from mkernel.topology.model import NumaNode
from mkernel.topology.sources.files import children, read_text
from mkernel.topology.sources.findings import Findings, Notes

SOURCE = "sysfs cpu"
_MOST_CPUS = 65536
_ALLOWED = ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus")
"""The files with the CPUs that a container may use, in control groups version 2 and version 1. This
process's own affinity is not used: every rank of a machine must find the same topology."""


def read(root: Path = Path("/")) -> Findings:
    """Return NUMA nodes with the CPUs that may be used.

    Only CPUs that are online, and that the control group of this machine or container allows, are
    listed. A machine that shows no NUMA nodes is one node. Memory-only nodes are kept, without
    CPUs.
    """
    system = root / "sys/devices/system"
    notes = Notes(SOURCE)
    online = _cpu_file(system / "cpu/online", notes)
    allowed = None
    for name in _ALLOWED:
        allowed = allowed or _cpu_file(root / "sys/fs/cgroup" / name, notes)
    found: list[NumaNode] = []
    owner: dict[int, int] = {}
    for folder in children(system / "node"):
        match = re.fullmatch(r"node(0|[1-9]\d{0,5})", folder.name)
        if match is None:
            continue
        node = int(match[1])
        cpus = _cpu_file(folder / "cpulist", notes) or frozenset()
        twice = [cpu for cpu in sorted(cpus) if owner.setdefault(cpu, node) != node]
        if twice:
            others = sorted({owner[cpu] for cpu in twice})
            notes.add(f"node {node} lists CPU {twice[0]}, which node {others[0]} has too; ignored")
        own = {cpu for cpu in cpus if owner[cpu] == node}
        if online is not None:
            own &= online
        if allowed is not None:
            own &= allowed
        found.append(
            NumaNode(id=node, cpus=tuple(sorted(own)), memory_bytes=_memory(folder / "meminfo"))
        )
    if not found and online:
        notes.add("no NUMA nodes are listed; all CPUs count as node 0")
        usable = online if allowed is None else online & allowed
        found.append(NumaNode(id=0, cpus=tuple(sorted(usable))))
    if not any(node.cpus for node in found):
        notes.add(f"no usable CPU is listed under {system}")
    return Findings(SOURCE, numa=tuple(sorted(found, key=lambda node: node.id)), notes=notes.all())


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs: ``0-3,8`` → {0, 1, 2, 3, 8}. ValueError for anything else, or for more
    than 65,536 CPUs."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is no CPU range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= _MOST_CPUS:
            raise ValueError(f"{part!r} is no CPU range below {_MOST_CPUS}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def parse_cpu_mask(text: str) -> frozenset[int]:
    """Parse a mask of CPUs: ``0x1,,0x0000000f`` → {0, 1, 2, 3, 64}, hexadecimal words of 32 CPUs,
    the highest first. ValueError for anything else, or for more than 65,536 CPUs."""
    words = text.split(",")
    if len(words) > _MOST_CPUS // 32:
        raise ValueError(f"a mask of {len(words)} words is for more than {_MOST_CPUS} CPUs")
    mask = 0
    for word in words:
        match = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{0,8})", word.strip())
        if match is None:
            raise ValueError(f"{word[:40]!r} is no word of a CPU mask")
        mask = mask << 32 | int(match[1] or "0", 16)
    return frozenset(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def _cpu_file(path: Path, notes: Notes) -> frozenset[int] | None:
    text = read_text(path)
    if text is None:
        return None
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        notes.add(f"{path}: {error}; ignored")
        return None


def _memory(path: Path) -> int | None:
    match = re.search(r"MemTotal:\s*(\d{1,15})\s*kB", read_text(path) or "")
    return int(match[1]) * 1024 if match else None
