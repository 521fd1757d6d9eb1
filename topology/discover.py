"""What this machine is made of: asks every source and merges their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from mkernel.errors import ArgumentError, InputFileError
from mkernel.topology.emulate import emulate, replicate
from mkernel.topology.merge import merge
from mkernel.topology.model import Accelerator, Model, Nic, Node, Note, Topology
from mkernel.topology.sources import cpu, infiniband, nvml
from mkernel.topology.sources.files import read_text

__all__ = ["Discovery", "discover", "emulate", "load", "replicate"]

_REAL_ROOT = Path("/")
_MOST_BYTES = 64 << 20


class Discovery(Model):
    """One machine, and what could not be found out about it."""

    topology: Topology
    notes: tuple[Note, ...] = ()


def discover(
    root: Path = _REAL_ROOT,
    accelerators: Iterable[Accelerator] = (),
    nics: Iterable[Nic] = (),
) -> Discovery:
    """The one machine under ``root``.

    Args:
        root: the file system that holds ``sys/`` and ``proc/``. For a recorded tree (anything but
            ``/``), drivers of *this* machine are not asked.
        accelerators, nics: what backends report; merged with what the sources find.

    Raises:
        ArgumentError: ``root`` is not a folder with ``sys/`` in it.
    """
    if not (root / "sys").is_dir():
        raise ArgumentError("root", str(root), "a folder that holds a recorded or real `sys`")
    numa, notes = cpu.read(root)
    found_nics, more = infiniband.read(root)
    notes += more
    found_nics, more = merge((), found_nics, infiniband.SOURCE)  # a recorded tree may repeat itself
    notes += more
    found_accelerators: tuple[Accelerator, ...] = ()
    if root == _REAL_ROOT:
        found_accelerators, more = nvml.read(root)
        notes += more
    all_accelerators, more = merge(found_accelerators, accelerators, "accelerator backends")
    notes += more
    all_nics, more = merge(found_nics, nics, "NIC backends")
    notes += more
    node = Node(
        id=0,
        hostname=read_text(root / "proc/sys/kernel/hostname") or "unknown",
        numa=numa,
        accelerators=all_accelerators,
        nics=all_nics,
    )
    return Discovery(topology=Topology(nodes=(node,)), notes=notes)


def load(path: Path) -> Topology:
    """A topology from a JSON file: a dumped :class:`Topology`, or any object with such a
    ``topology`` key (what ``mkernel probe --json`` prints).

    Raises:
        InputFileError: missing, unreadable, above 64 MiB, or not a topology; says which field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputFileError(f"topology file {path}: {error.strerror or error}") from error
    if len(text) > _MOST_BYTES:
        raise InputFileError(f"topology file {path} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"topology file {path} is not JSON: {error}") from error
    if isinstance(data, dict) and "topology" in data:
        data = data["topology"]
    try:
        return Topology.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputFileError(f"topology file {path}: {where}: {first['msg']}") from error
