"""The machine of this process as its drivers and the chosen backends see it, whole or split into
nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.nic import NicBackend
from mkernel.errors import BackendUnavailable
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.settings import Settings
from mkernel.topology.discover import discover
from mkernel.topology.model import Accelerator, KindName, Nic, Topology
from mkernel.topology.placement import visible
from mkernel.topology.rails import keep_rails
from mkernel.topology.reshape import (
    keep_accelerators,
    oversubscribe,
    reached_together,
    split_into_nodes,
)
from mkernel.world.identity import Backends


def machine_topology(backends: Backends) -> Topology:
    """Return this machine as its drivers and the chosen backends see it (one node), without devices
    that the environment hides, and with only those of its RDMA ports that are rails."""
    nic = registry.nic(backends.nic) if backends.nic else None
    return _topology(registry.accelerator(backends.accelerator), nic, backends.verbs or "system")


def _topology(
    accelerator: AcceleratorBackend, nic: NicBackend | None = None, verbs: str = "system"
) -> Topology:
    nics = nic.probe(verbs) if nic else ()
    devices = accelerator.probe()
    found = _with_no_p2p(
        discover(accelerators=devices, nics=nics).topology,
        accelerator,
        {one.kind for one in devices},
    )
    if nic:
        found, _ = keep_rails(found, nic.name, nic.kinds or {port.kind for port in nics})
    if any(one.pci and not one.emulated for one in devices):
        return found  # such a backend is shown what is visible, and `shown` keeps to that
    node = found.nodes[0]
    left = visible(node.accelerators, os.environ, {**_visibility(), **accelerator.visibility})
    return found.model_copy(update={"nodes": (keep_accelerators(node, left),)})


def _with_no_p2p(
    machine: Topology, accelerator: AcceleratorBackend, kinds: set[KindName]
) -> Topology:
    """Return the machine with the pairs of devices of these kinds that the backend reports as out of
    each other's reach."""
    node = machine.nodes[0]
    own = [one for one in node.accelerators if one.kind in kinds and not one.emulated]
    known = {frozenset(pair) for pair in node.no_p2p}
    more = (pair for pair in accelerator.no_p2p(own) if frozenset(pair) not in known)
    node = node.model_copy(update={"no_p2p": (*node.no_p2p, *more)})
    return machine.model_copy(update={"nodes": (node,)})


def ranks_together(
    accelerator: AcceleratorBackend, ranks: int | None, settings: Settings
) -> int | None:
    """Return how many of a host's ranks, one after another, are on devices that reach each other's
    memory, and so are a node. None: all of them, or the accelerator has no other way between them.

    Args:
        ranks: number of ranks on this host; None: one a device.
    """
    devices = accelerator.probe() if splits(accelerator.capabilities()) else ()
    if not devices or devices[0].emulated:
        return None
    machine = _topology(accelerator)
    if len(devices) > 1:  # otherwise each rank sees only its own
        machine = shown(machine, devices)
    node = oversubscribe(machine, settings.ranks_per_device).nodes[0]
    kept = [one for one in node.accelerators if one.kind == devices[0].kind and not one.emulated]
    ranks = len(kept) if ranks is None else ranks
    each = reached_together((keep_accelerators(node, kept),), ranks)
    return None if each == ranks else each


def splits(claims: AcceleratorCapabilities) -> bool:
    """Return whether ranks that do not reach each other's memory can be nodes of their own: kernels put
    what crosses nodes, and it may rest in host memory."""
    return not claims.process_group and claims.between_nodes and claims.stages


def _visibility() -> dict[str, str]:
    """Return the variables that hide devices, as the installed backends know them."""
    found: dict[str, str] = {}
    for name in registry.names(registry.ACCELERATORS):
        with suppress(Exception):  # a backend that breaks knows nothing
            found |= registry.accelerator(name).visibility
    return found


def emulated_topology(
    machine: Topology,
    backends: Backends,
    nodes: int,
    ranks_per_node: int,
    settings: Settings,
) -> Topology:
    """Return ``machine`` split into emulated nodes for a world on it. Two settings are used: how
    many ranks share a device, and whether NICs read and write device memory."""
    accelerator = registry.accelerator(backends.accelerator)
    devices = accelerator.probe()
    if not devices:
        usable_accelerator(backends.accelerator)  # raises the reason, if it knows one
        raise BackendUnavailable(
            f"accelerator {backends.accelerator!r} finds no device; see `mkernel doctor`"
        )
    if not len(devices) == 1 < nodes * ranks_per_node:  # otherwise each rank sees only its own
        machine = shown(machine, devices)
    machine = oversubscribe(machine, settings.ranks_per_device)
    nic = None
    if backends.nic:
        found = registry.nic(backends.nic).probe(backends.verbs or "system")
        nic = found[0] if found else None
    split = split_into_nodes(machine, nodes, ranks_per_node, devices[0], nic)
    return _with_gpudirect(split, accelerator, settings.nic_settings.gpudirect) if nic else split


def _with_gpudirect(
    world: Topology, accelerator: AcceleratorBackend, wanted: bool | None
) -> Topology:
    """Set the NICs' access to device memory, if the user chose it, or if that memory is the host's.
    BackendUnavailable: they cannot reach it."""
    access = accelerator.nic_access()
    if access is not None and wanted is None:
        return world
    if access is not None and wanted and not access.usable:
        raise BackendUnavailable(
            f"NICs do not reach the memory of accelerator {accelerator.name!r}: {access.detail}; "
            f"{access.remedy}, or leave MKERNEL_NIC_SETTINGS__GPUDIRECT away"
        )

    def told(nic: Nic) -> Nic:
        if access is None:  # every NIC reaches it, and an emulated one does not report that
            return nic.model_copy(update={"gpudirect": True}) if nic.emulated else nic
        return nic.model_copy(update={"gpudirect": wanted})

    nodes = (
        node.model_copy(update={"nics": tuple(told(nic) for nic in node.nics)})
        for node in world.nodes
    )
    return world.model_copy(update={"nodes": tuple(nodes)})


def seated(machine: Topology, used: Sequence[tuple[str | None, int] | None]) -> Topology:
    """Return the machine with its accelerators ordered so that local ranks are placed on those they
    use: a group's ranks need not be the first of a host. It is unchanged if a rank has chosen none,
    or two have chosen the same.

    Args:
        machine: one node.
        used: the device of each of its ranks, in their order: PCI address, if it is known, and
            index among the devices that the process sees.
    """
    node = machine.nodes[0]
    real = [one for one in node.accelerators if not one.emulated]
    first: list[Accelerator] = []
    for device in used:
        if device is None:
            return machine
        pci, index = device
        named = (one for one in real if one.pci == pci) if pci else iter(real[index : index + 1])
        found = next(named, None)
        if found is None or found in first:
            return machine
        first.append(found)
    rest = tuple(one for one in node.accelerators if one not in first)
    changed = node.model_copy(update={"accelerators": (*first, *rest)})
    return machine.model_copy(update={"nodes": (changed,)})


def shown(machine: Topology, devices: tuple[Accelerator, ...]) -> Topology:
    """Return the machine without real devices of the backend's kind that the backend does not
    report: the driver also lists what the environment hides. Indices become the backend's."""
    index = {device.pci: device.index for device in devices if device.pci and not device.emulated}
    if not index or len(machine.nodes) != 1:
        return machine
    kept = tuple(
        one.model_copy(update={"index": index[one.pci]}) if one.pci in index else one
        for one in machine.nodes[0].accelerators
        if one.kind != devices[0].kind or one.emulated or one.pci is None or one.pci in index
    )
    return machine.model_copy(update={"nodes": (keep_accelerators(machine.nodes[0], kept),)})


def usable_accelerator(name: str) -> AcceleratorBackend:
    """Return the backend, if it can run here. UnknownBackend, BackendUnavailable."""
    backend = registry.accelerator(name)
    status = backend.status()
    if not status.usable:
        raise BackendUnavailable(f"accelerator {name!r}: {status.detail}; {status.remedy}")
    return backend


def usable_nic(name: str, verbs: str) -> NicBackend:
    """Return the backend, if it finds a device that is up. UnknownBackend, BackendUnavailable."""
    backend = registry.nic(name)
    status = backend.status(verbs)
    if not status.usable:
        raise BackendUnavailable(f"nic {name!r} on {verbs!r}: {status.detail}; {status.remedy}")
    return backend
