"""The world that ``mkernel plan`` plans for: of this machine, or of the machines in a file."""

from __future__ import annotations

from pathlib import Path

from mkernel import machine, selection
from mkernel.backends import registry
from mkernel.backends.base import Status
from mkernel.errors import ArgumentError, BackendUnavailable, UnknownBackend
from mkernel.identity import Backends
from mkernel.selection import SYSTEM
from mkernel.settings import Settings
from mkernel.topology.discover import load, replicate
from mkernel.topology.model import FABRIC_SWITCH, Node, Topology
from mkernel.topology.rails import real_ports

_ACCELERATORS = {"cuda": "hopper", "ascend": "ascend"}
"""The backend of a kind of device; others run on ``streams``."""


def world_of_file(file: Path, nodes: int) -> Topology | None:
    """The nodes of a file: as they are, or its one machine ``nodes`` times, with accelerators of one
    kind, and real devices only where there are any. None: the file lists no accelerators.

    Raises:
        InputFileError: the file cannot be read.
        ArgumentError: the file has several nodes, but not ``nodes``.
    """
    found = load(file)
    if not any(node.accelerators for node in found.nodes):
        return None
    every = [one for node in found.nodes for one in node.accelerators]
    first = next((one for one in every if not one.emulated), every[0])
    found = Topology(nodes=tuple(_only(node, first.kind, first.emulated) for node in found.nodes))
    if len(found.nodes) == 1:
        return replicate(found, nodes)
    if len(found.nodes) != nodes:
        raise ArgumentError("--nodes", nodes, f"{len(found.nodes)}, the nodes of {file}")
    return found


def _only(node: Node, kind: str, emulated: bool) -> Node:
    kept = tuple(one for one in node.accelerators if one.kind == kind and one.emulated == emulated)
    ids = {one.id for one in kept} | {FABRIC_SWITCH}
    real = tuple(nic for nic in node.nics if not nic.emulated)
    return node.model_copy(
        update={
            "accelerators": kept,
            "nics": node.nics if emulated else real or node.nics,
            "fabric": tuple(link for link in node.fabric if ids >= set(link.ends)),
            "no_p2p": tuple(pair for pair in node.no_p2p if ids >= set(pair)),
        }
    )


def backends_of(world: Topology, chosen: Settings, apart: bool) -> Backends:
    """What would run on a file's world: real devices' backends, else those of the settings."""
    accelerator = next(one for node in world.nodes for one in node.accelerators)
    name = selection.backends(chosen, 1).accelerator
    if not accelerator.emulated:
        name = _ACCELERATORS.get(accelerator.kind, "streams")
    if not apart:
        return Backends(name, None, None)
    found = selection.nic_of(tuple(nic for node in world.nodes for nic in real_ports(node)))
    return Backends(name, *((found, SYSTEM) if found else selection.nic_and_verbs(chosen)))


def world_of_machine(
    backends: Backends,
    nodes: int,
    ranks_per_node: int,
    ranks_per_device: int,
    file: Path | None = None,
) -> Topology:
    """The nodes of a world that would run on this machine, split; or on the machine of a file that
    lists no accelerators, with the backend's own.

    Raises:
        BackendUnavailable: there is no device to plan for; the message says what to do.
    """
    _check_accelerator(backends.accelerator)
    _check_nic(backends)
    topology = machine.machine_topology(backends) if file is None else load(file)
    return machine.emulated_topology(topology, backends, nodes, ranks_per_node, ranks_per_device)


def _check_accelerator(name: str) -> None:
    backend = registry.accelerator(name)
    if not backend.probe():
        raise BackendUnavailable(
            f"accelerator {name!r} has no device here: {_reason(backend.status())}; "
            "to plan for another machine, give its topology with --topology"
        )


def _check_nic(backends: Backends) -> None:
    name, verbs = backends.nic, backends.verbs
    if name is None or verbs is None:
        return
    backend = registry.nic(name)
    # Any other provider is the path of a library, which is the system's verbs by another name.
    if verbs not in backend.providers and "/" not in verbs:
        raise UnknownBackend("verbs", repr(verbs), f"one of: {', '.join(backend.providers)}")
    if not backend.probe(verbs):
        raise BackendUnavailable(
            f"nic {name!r} has no device on verbs provider {verbs!r}: "
            f"{_reason(backend.status(verbs))}"
        )


def _reason(status: Status) -> str:
    return f"{status.detail}; {status.remedy}" if status.remedy else status.detail
