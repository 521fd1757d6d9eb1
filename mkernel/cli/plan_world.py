"""The world that ``mkernel plan`` plans for: of this machine, or of the machines in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mkernel import machine, selection
from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.status import Status
from mkernel.errors import ArgumentError, BackendUnavailable, NoRoute, UnknownBackend
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import OpName
from mkernel.selection import SOFT, SYSTEM
from mkernel.settings import AUTO, Settings
from mkernel.topology.discover import load
from mkernel.topology.model import Accelerator, Topology
from mkernel.topology.placement import usable_nics
from mkernel.topology.rails import keep_rails, real_ports
from mkernel.topology.reshape import of_one_kind, ranks_on_each, replicate, require_ports
from mkernel.world.identity import Backends


class PlannedWorld(NamedTuple):
    """The world to plan for. ``elsewhere``: real devices of a file, on which nothing can be
    launched from here. ``notes``: a sentence about each group of RDMA ports that are no rails, each
    accelerator backend that was passed over, and each part of unlike nodes that is left out."""

    topology: Topology
    ranks_per_node: int
    backends: Backends
    capabilities: AcceleratorCapabilities
    elsewhere: bool = False
    notes: tuple[str, ...] = ()


def planned_world(
    settings: Settings,
    op: OpName,
    file: Path | None,
    nodes: int | None,
    ranks_per_node: int | None,
    *,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> PlannedWorld:
    """Return the world, and the backends that would run on it: those that are named, else those
    that ``auto`` would choose there.

    Raises:
        InputFileError, ArgumentError: as :func:`world_of_file`. UnknownBackend. BackendUnavailable:
        nothing runs there, or has a device here; states why. NoRoute: no NIC is of the named kind.
    """
    world, left_out = world_of_file(file, nodes) if file else (None, ())
    if world is not None and ranks_per_node is None:
        ranks_per_node, uneven = ranks_on_each(world)
        left_out += uneven
    if world is not None and not world.nodes[0].accelerators[0].emulated:
        assert ranks_per_node is not None
        planned = _elsewhere(settings, op, world, ranks_per_node, accelerator, nic, verbs)
        return planned._replace(notes=left_out + planned.notes)
    name = selection.named_for(op, accelerator or settings.accelerator)
    if world is not None:
        name = selection.emulating(world.nodes[0].accelerators[0].kind, name)
    elif name == AUTO:
        name = selection.chosen_accelerator(nodes or 1, op)
    backend = registry.accelerator(name)
    if world is not None:
        assert ranks_per_node is not None
        nodes = len(world.nodes)
    else:
        _check_accelerator(name, backend)
        nodes, ranks_per_node = selection.usual_world(backend, settings, nodes, ranks_per_node)
    backends = selection.backends(settings, nodes, accelerator=name, nic=nic, verbs=verbs)
    if world is None:
        world = world_of_machine(backends, nodes, ranks_per_node, settings, file)
    return PlannedWorld(world, ranks_per_node, backends, backend.capabilities(), notes=left_out)


def _elsewhere(
    settings: Settings,
    op: OpName,
    world: Topology,
    ranks_per_node: int,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> PlannedWorld:
    device = world.nodes[0].accelerators[0]
    name = selection.named_for(op, accelerator or settings.accelerator)
    passed_over: tuple[str, ...] = ()
    if name == AUTO:
        name, others = selection.accelerator_for(
            device, len(world.nodes), op, len(world.nodes) * ranks_per_node
        )
        passed_over = tuple(
            f"not on {other.name}: it {other.detail}"
            for other in others
            if other.detail != selection.BY_NAME
        )
    claims = registry.accelerator(name).capabilities_on(device.kind)
    if len(world.nodes) == 1 or claims.process_group:
        if nic not in (None, AUTO):
            registry.nic(nic)  # it is not used, but a misspelt name is reported
        return PlannedWorld(
            world, ranks_per_node, Backends(name, None, None), claims, True, passed_over
        )
    nic, verbs = nic or settings.nic, verbs or settings.verbs
    if nic == AUTO:
        ports = tuple(port for node in world.nodes for port in real_ports(node))
        nic = selection.nic_of(ports) or selection.chosen_nic(SOFT)
    every = world
    world, left_out = keep_rails(world, nic, registry.nic(nic).kinds)
    if left_out and not any(usable_nics(node) for node in world.nodes):
        raise NoRoute(
            f"nic {nic!r} drives no RDMA port of these nodes ({'; '.join(left_out)}); leave --nic "
            "away, and the backend that drives them is taken"
        )
    require_ports(every, world, nic)
    backends = Backends(name, nic, SYSTEM if verbs == AUTO else verbs)
    return PlannedWorld(world, ranks_per_node, backends, claims, True, passed_over + left_out)


def world_of_file(file: Path, nodes: int | None) -> tuple[Topology | None, tuple[str, ...]]:
    """Return the nodes of a file, as they are, or its one machine ``nodes`` times (default: twice),
    with accelerators of one kind, and only real devices if there are any; and sentences about what
    is left out. None: the file lists no accelerators, or lists one machine with only the prototypes
    of its simulators.

    Raises:
        InputFileError: the file cannot be read.
        ArgumentError: the file has several nodes, but not ``nodes``.
        Unsupported: its nodes have no kind of accelerator in common.
    """
    found = load(file)
    every = [one for node in found.nodes for one in node.accelerators]
    if not every or (len(found.nodes) == 1 and _prototypes(every)):
        return None, ()
    found, left_out = of_one_kind(found)
    if len(found.nodes) == 1:
        return replicate(found, 2 if nodes is None else nodes), left_out
    if nodes is not None and len(found.nodes) != nodes:
        raise ArgumentError("--nodes", nodes, f"{len(found.nodes)}, the nodes of {file}")
    return found, left_out


def _prototypes(devices: Sequence[Accelerator]) -> bool:
    """Return whether they are what `mkernel probe` shows for backends that emulate devices: one of
    a kind."""
    kinds = [one.kind for one in devices]
    return all(one.emulated for one in devices) and len(set(kinds)) == len(kinds)


def world_of_machine(
    backends: Backends,
    nodes: int,
    ranks_per_node: int,
    settings: Settings,
    file: Path | None = None,
) -> Topology:
    """Return the nodes of a world that would run on this machine, split; or on the machine of a
    file that lists no accelerators, with the backend's own.

    Raises:
        BackendUnavailable: there is no device to plan for; the message states what to do.
    """
    _check_nic(backends)
    topology = machine.machine_topology(backends) if file is None else load(file)
    return machine.emulated_topology(topology, backends, nodes, ranks_per_node, settings)


def _check_accelerator(name: str, backend: AcceleratorBackend) -> None:
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
