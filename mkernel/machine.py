"""This machine as sysfs, NVML and the chosen backends see it, whole or split into nodes."""

from __future__ import annotations

from mkernel.backends import registry
from mkernel.backends.base import AcceleratorBackend
from mkernel.errors import BackendUnavailable
from mkernel.identity import Backends
from mkernel.topology.discover import discover
from mkernel.topology.emulate import emulate
from mkernel.topology.model import Topology


def machine_topology(backends: Backends) -> Topology:
    """This machine as sysfs, NVML and the chosen backends see it (one node)."""
    accelerator = registry.accelerator(backends.accelerator)
    nics = () if not backends.nic else registry.nic(backends.nic).probe(backends.verbs or "system")
    return discover(accelerators=accelerator.probe(), nics=nics).topology


def emulated_topology(
    machine: Topology, backends: Backends, nodes: int, ranks_per_node: int
) -> Topology:
    """``machine`` split into emulated nodes for a world on it."""
    devices = usable_accelerator(backends.accelerator).probe()
    if not devices:
        raise BackendUnavailable(
            f"accelerator {backends.accelerator!r} finds no device; see `mkernel doctor`"
        )
    nic = None
    if backends.nic:
        found = registry.nic(backends.nic).probe(backends.verbs or "system")
        nic = found[0] if found else None
    return emulate(machine, nodes, ranks_per_node, devices[0], nic)


def usable_accelerator(name: str) -> AcceleratorBackend:
    """The backend, if it can run here. UnknownBackend, BackendUnavailable."""
    backend = registry.accelerator(name)
    status = backend.status()
    if not status.usable:
        raise BackendUnavailable(f"accelerator {name!r}: {status.detail}; {status.remedy}")
    return backend
