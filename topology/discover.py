"""Discovery of a machine's parts: queries every source, or reads a file, and merges the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from mkernel.errors import ArgumentError, InputFileError
from mkernel.topology import presets
from mkernel.topology.merge import different, merge
from mkernel.topology.model import (
    MAX_ACCELERATORS,
    Accelerator,
    Bridge,
    FabricLink,
    Model,
    Nic,
    Node,
    Note,
    Topology,
    first_error,
)
from mkernel.topology.rails import fast, real_ports
from mkernel.topology.sources import cpu, drivers, formats, infiniband, pci
from mkernel.topology.sources.description import MARK, Description
from mkernel.topology.sources.files import read_text
from mkernel.topology.sources.findings import Findings, Notes
from mkernel.user_files import parse_json, read_file

_Sized = TypeVar("_Sized", Findings, Node)

_REAL_ROOT = Path("/")
_MOST_BYTES = 4 << 20
"""The largest file in bytes, which holds some 100 machines as JSON; one machine in XML has 1 MB at
most. Reading takes some 70 times as much memory."""
_MOST_NICS = 1024
"""The most NICs of one machine, so that tables of pairs of devices stay small."""


class Discovery(Model):
    """A machine, or the nodes of a world, and notes about what could not be found out."""

    topology: Topology
    notes: tuple[Note, ...] = ()


def discover(
    root: Path = _REAL_ROOT,
    accelerators: Iterable[Accelerator] = (),
    nics: Iterable[Nic] = (),
) -> Discovery:
    """Discover the one machine under ``root``.

    Args:
        root: the file system that holds ``sys/`` and ``proc/``. For a recorded tree (anything but
            ``/``), drivers of *this* machine are not queried.
        accelerators, nics: devices that backends report; merged with those that the sources find.

    Raises:
        ArgumentError: ``root`` is not a folder with ``sys/`` in it.
    """
    if not (root / "sys").is_dir():
        raise ArgumentError("root", str(root), "a folder that holds a recorded or real `sys`")
    hostname = read_text(root / "proc/sys/kernel/hostname")
    cpus = cpu.read(root)
    sources = [replace(cpus, hostname=hostname), infiniband.read(root)]
    if root == _REAL_ROOT:
        sources += drivers.read(root, cpus.numa)
    sources.append(Findings("accelerator backends", accelerators=tuple(accelerators)))
    tree = pci.read_tree(root)
    if root == _REAL_ROOT:
        tree = _driven(tree, merge(sources).accelerators)
    sources += [tree, Findings("NIC backends", nics=tuple(nics))]
    return _machine(sources, str(root))


def read(*paths: Path) -> Discovery:
    """Read the machine, or the nodes, of a file; or those of several files: files that follow one
    another and describe one machine are merged, and each other machine is a node of its own.

    Args:
        paths: each the name of a preset (:mod:`mkernel.topology.presets`), or a file of a format of
            :mod:`mkernel.topology.sources.formats`, or JSON: a
            :class:`~mkernel.topology.sources.description.Description`, a dumped :class:`Topology`, or
            any object with such a ``topology`` key, as ``mkernel probe --json`` prints. If files of
            one machine contradict each other, the first is right, and a note reports it. A note also
            says where a file begins another machine, and why.

    Raises:
        ArgumentError: several files, and one of them holds several nodes.
        InputFileError: no preset and missing, unreadable, too large, malformed or hostile, or none of
            these formats; states where.
    """
    found = [_file(path) for path in paths]
    if len(found) == 1:
        return found[0]
    sources = [_findings(path, one) for path, one in zip(paths, found, strict=True)]
    machines: list[tuple[list[Path], list[Findings]]] = []
    about = Notes("files")
    for path, one in zip(paths, sources, strict=True):
        why = different(merge(machines[-1][1]), one) if machines else ""
        if why is None:
            machines[-1][0].append(path)
            machines[-1][1].append(one)
            continue
        if machines:
            about.add(
                f"{path} is node {len(machines)}, another machine than the file before: {why}"
            )
        machines.append(([path], [one]))
    whole = _joined([
        _machine(parts, " and ".join(map(str, files)), _stem(files[0])) for files, parts in machines
    ])  # fmt: skip
    return whole.model_copy(update={"notes": about.all() + whole.notes})


def _findings(path: Path, found: Discovery) -> Findings:
    nodes = found.topology.nodes
    if len(nodes) != 1:
        raise ArgumentError(str(path), f"{len(nodes)} nodes", "one node, to merge it with others")
    fields = {name: getattr(nodes[0], name) for name in Node.model_fields}
    del fields["id"], fields["emulated"]
    if fields["hostname"] == _stem(path):
        fields["hostname"] = None  # the file names no host
    return Findings(path.name, notes=found.notes, **fields)


def _stem(path: Path) -> str:
    """Return the name of the machine of a file that names no host."""
    return (presets.find(str(path)) or path).stem


def _file(path: Path) -> Discovery:
    where = f"topology file {path}"
    preset = presets.find(str(path))
    try:
        text = read_file(preset or path, "topology file", _MOST_BYTES)
    except InputFileError as error:
        if os.path.lexists(path):
            raise
        raise InputFileError(
            f"{error}; nor is it a preset: {', '.join(presets.presets())} (`mkernel probe --list`)"
        ) from None
    try:
        hosts = formats.parse(text, path)
        if hosts is None:
            return _from_json(text, path, preset)
        return _joined([_machine([host], where, path.stem) for host in hosts])
    except ValidationError as error:
        raise InputFileError(f"{where}: no such machine: {first_error(error)}") from error


def load(path: Path) -> Topology:
    """Return the topology of a file that :func:`read` takes, without the notes."""
    return read(path).topology


def _driven(tree: Findings, known: Iterable[Accelerator]) -> Findings:
    """Drop the accelerators that no driver of this machine reports, since nothing can use them. In
    a container, sysfs still shows the devices of others."""
    addresses = {one.pci for one in known}
    notes = Notes(tree.source)
    for one in tree.accelerators:
        if one.pci not in addresses:
            notes.add(f"{one.kind} device {one.pci} is there, but no driver reports it; left out")
    return replace(
        tree,
        accelerators=tuple(one for one in tree.accelerators if one.pci in addresses),
        notes=tree.notes + notes.all(),
    )


def _machine(sources: Iterable[Findings], where: str, name: str = "unknown") -> Discovery:
    """Merge the sources into one machine. ``name`` is the hostname if no source knows one.
    InputFileError if there are more devices than in any machine, or they contradict each other: a
    file may hold anything."""
    found = merge(_plausible(source, where) for source in sources)
    try:
        node = Node(
            id=0,
            hostname=found.hostname or name,
            numa=found.numa,
            accelerators=found.accelerators,
            nics=tuple(sorted(found.nics, key=_by_address)),
            bridges=found.bridges,
            fabric=found.fabric,
            fabric_known=found.fabric_known,
            no_p2p=found.no_p2p,
        )
    except ValidationError as error:
        raise InputFileError(f"{where}: no such machine: {first_error(error)}") from error
    slow = Notes("rails")
    for reason, ids in fast(real_ports(node)).left_out.items():
        slow.add(f"{', '.join(ids)}: no rails: {reason}")
    return Discovery(topology=Topology(nodes=(node,)), notes=found.notes + slow.all())


def _plausible(source: Findings, where: str) -> Findings:
    """Return the plausible part of a source. InputFileError, as :func:`_limited`."""
    found, notes = believed(_limited(source, where), source.source)
    return replace(found, notes=found.notes + notes)


def _limited(found: _Sized, where: str) -> _Sized:
    """Return the findings unchanged. InputFileError if they have more devices than any machine."""
    for what, devices, most in (
        ("accelerators", found.accelerators, MAX_ACCELERATORS),
        ("NICs", found.nics, _MOST_NICS),
    ):
        if len(devices) > most:
            raise InputFileError(f"{where}: {len(devices)} {what}; expected at most {most}")
    return found


def _by_address(nic: Nic) -> tuple[bool, tuple[int, ...], int]:
    """Return the sort key of NICs, whatever the source's order, since equally near NICs are dealt
    out in this order. NICs that are not on PCI come last."""
    return nic.pci is None, pci.sort_key(nic.pci) if nic.pci else (), nic.port


def _joined(hosts: list[Discovery]) -> Discovery:
    """Join single machines as the nodes of one topology."""
    nodes = [host.topology.nodes[0] for host in hosts]
    return Discovery(
        topology=Topology(
            nodes=tuple(node.model_copy(update={"id": id_}) for id_, node in enumerate(nodes))
        ),
        notes=tuple(note for host in hosts for note in host.notes),
    )


def _from_json(text: bytes, path: Path, preset: Path | None) -> Discovery:
    try:
        data = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(
            f"topology file {path} is not JSON: {error} (nor {formats.OTHERS})"
        ) from error
    if isinstance(data, dict) and "topology" in data:
        data = data["topology"]
    if isinstance(data, dict) and MARK in data:
        found = _machine(
            [Description.model_validate(data).findings()],
            f"topology file {path}",
            _stem(path),
        )
        told = presets.note(str(path))
        return found if told is None else found.model_copy(update={"notes": (told, *found.notes)})
    try:
        topology = Topology.model_validate(data)
    except ValidationError as error:
        raise InputFileError(f"topology file {path}: {first_error(error)}") from error
    nodes: list[Node] = []
    notes: list[Note] = []
    for node in topology.nodes:
        where = f"node {node.id}"
        kept, about = believed(_limited(node, f"topology file {path}, {where}"), where)
        nodes.append(kept)
        notes += about
    return Discovery(
        topology=Topology(nodes=tuple(nodes)) if notes else topology, notes=tuple(notes)
    )


# ---- rates that no machine has -----------------------------------------------------------------
# Larger rates or counts in a source are mistakes: a rate in kb/s that is read as Mb/s would plan for a
# machine that nobody has. Such numbers count as unknown, and a note names each.

_Part = TypeVar("_Part", Accelerator, Nic, Bridge, FabricLink)

_MOST: Mapping[type[Model], Mapping[str, float]] = MappingProxyType(
    {
        Accelerator: {"pcie_gbs": 512, "cores": 4096, "clock_mhz": 16384, "memory_gbs": 65536},
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
