"""The rows of `mkernel doctor` for a verbs provider: its ports, its library, its access to device
memory."""

from __future__ import annotations

import ipaddress
import re
import resource
from collections.abc import Callable

from mkernel.backends.contracts.status import Status
from mkernel.backends.nics import _nics
from mkernel.backends.nics.provider import SYSTEM, library_of, list_nics, peermem_module
from mkernel.errors import MkernelError
from mkernel.topology.model import Nic

_LOCKED_BYTES = 1 << 30
"""Bytes of locked memory below which registering workspaces is likely to fail."""

Row = tuple[str, Status]


def details(
    verbs: str,
    serves: Callable[[Nic], bool],
    abilities: Callable[[str, Nic], tuple[str, Status | None]],
) -> tuple[Row, ...]:
    """Return rows for the ports that a backend serves, then for what they need. Never raises.

    Args:
        abilities: returns a device's abilities, in words, and a verdict if it cannot serve.
    """
    try:
        devices = {(d.name, d.port): d for d in _nics.devices(library_of(verbs))}
    except (MkernelError, OSError, RuntimeError):
        return ()  # the provider's status says why
    rows = [
        (
            f"{nic.name} port {nic.port}",
            port_status(devices[nic.name, nic.port], abilities, verbs, nic),
        )
        for nic in list_nics(verbs)
        if serves(nic) and (nic.name, nic.port) in devices
    ]
    if verbs == SYSTEM:
        rows.append(("rdma-core", library_status(_nics.library_path(library_of(verbs)))))
    if verbs == SYSTEM and devices:
        dmabuf = all(device.dmabuf for device in devices.values())
        rows += [
            ("device memory", device_memory_status(dmabuf, peermem_module())),
            ("locked memory", locked_memory_status(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])),
        ]
    return tuple(rows)


def port_status(
    device: _nics.DeviceInfo,
    abilities: Callable[[str, Nic], tuple[str, Status | None]],
    verbs: str,
    nic: Nic,
) -> Status:
    """Return the status of one port: state, link, firmware, GID and abilities."""
    can, lacks = abilities(verbs, nic)
    speed = f"{device.speed_gbps:g} Gb/s" if device.speed_gbps else "speed unknown"
    facts = [
        f"{device.state}, {device.link_layer}, {speed}, MTU {device.mtu}",
        f"firmware {device.firmware or 'unknown'}",
        f"GID {device.gid_index} {gid_words(device.gid)} ({device.gid_type})"
        if device.gid_index >= 0
        else device.gid,
        "dmabuf" if device.dmabuf else "no dmabuf",
    ]
    if can:
        facts.append(can)
    if lacks is not None:
        return Status(False, "; ".join([*facts, lacks.detail]), lacks.remedy)
    detail = "; ".join(facts)
    if not device.active:
        return Status(False, detail, "bring the link up: cable, switch, `ip link`, subnet manager")
    if device.gid_index < 0:
        return Status(False, detail, "give the port's network interface an address")
    return Status(True, detail)


def gid_words(digits: str) -> str:
    """Format a GID as an address; an IPv4-mapped one as IPv4."""
    address = ipaddress.IPv6Address(bytes.fromhex(digits))
    return str(address.ipv4_mapped or address)


def library_status(path: str) -> Status:
    """Return the rdma-core version of a libibverbs file, read from its name
    (``libibverbs.so.1.14.44.0`` is 44)."""
    found = re.search(r"libibverbs\.so\.1\.\d+\.(\d+)", path)
    if found is None:
        return Status(True, f"{path} (version unknown)")
    return Status(True, f"{found[1]} ({path})")


def device_memory_status(dmabuf: bool, peermem: str | None) -> Status:
    """Return the way by which accelerators' memory would be registered: dmabuf, peermem or neither."""
    if dmabuf:
        return Status(True, "by dmabuf" + (f"; {peermem} is loaded too" if peermem else ""))
    if peermem:
        return Status(True, f"by {peermem}; not every device registers dmabufs")
    return Status(
        False,
        "neither dmabuf nor nvidia_peermem: host memory only",
        "use a kernel and drivers with dmabuf, or `modprobe nvidia_peermem`",
    )


def locked_memory_status(limit: int) -> Status:
    """Return whether the limit of locked memory leaves room for registrations."""
    if limit == resource.RLIM_INFINITY:
        return Status(True, "unlimited")
    words = f"{limit / 2**20:g} MiB"
    if limit >= _LOCKED_BYTES:
        return Status(True, words)
    return Status(False, words, "raise it: `ulimit -l unlimited`, or LimitMEMLOCK of the service")
