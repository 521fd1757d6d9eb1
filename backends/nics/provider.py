"""Verbs providers: the library that a provider's name refers to, and the devices that it offers.

``system`` is libibverbs, ``soft`` the software RDMA device that is installed beside the native
module; anything else is a path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mkernel.backends.contracts.status import Status
from mkernel.backends.nics import _nics
from mkernel.backends.transport import mover
from mkernel.errors import INSTALL_AGAIN, BackendUnavailable, MkernelError
from mkernel.settings import NicSettings
from mkernel.settings import load as load_settings
from mkernel.topology.model import KindName, Nic

SOFT = "soft"
SYSTEM = "system"
MELLANOX_VENDORS = frozenset({0x02C9, 0x15B3})
AMAZON_VENDOR = 0x1D0F

_INSTALL = "apt-get install libibverbs1 ibverbs-providers"


def library_of(verbs: str, settings: NicSettings | None = None) -> str:
    """Return the name or path of the library that a provider's name refers to."""
    chosen = settings or load_settings().nic_settings
    if verbs == SYSTEM:
        return _loadable(chosen.system_library)
    if verbs != SOFT:
        return _loadable(verbs)
    if chosen.soft_library is not None:
        return _loadable(chosen.soft_library)
    # Beside the native module, which an editable install keeps apart from the Python files.
    return str(Path(_nics.__file__).parent / "softverbs" / "libmkernel_softverbs.so")


def _loadable(library: str) -> str:
    """Return ``library`` unchanged. BackendUnavailable: loading anything but a regular file may
    wait for ever."""
    path = Path(library)
    if "/" in library and path.exists() and not path.is_file():
        raise BackendUnavailable(f"verbs library {library} is no regular file; name a library")
    return library


def hand_over_mover(library: str) -> None:
    """Pass this process's mover, if it has one, to a library that takes one (the soft device)."""
    native: Any = _nics
    if mover.registered():
        native.set_mover(library, mover.registered())


def provider_status(verbs: str, settings: NicSettings | None = None) -> Status:
    """Return whether the provider has a usable device. Never raises."""
    try:
        library = library_of(verbs, settings)
    except MkernelError as error:
        return Status(False, str(error), "correct that environment variable")
    try:
        devices = _nics.devices(library)
    except (OSError, RuntimeError) as error:
        return Status(False, str(error), _remedy(verbs, library, str(error)))
    if not devices:
        return Status(
            False,
            f"no RDMA device in {library}",
            "load the card's driver and check `ls /sys/class/infiniband`, or use the soft provider",
        )
    active = [device for device in devices if device.active]
    described = ", ".join(
        f"{d.name} port {d.port} {'up' if d.active else 'down'}, {d.link_layer}, "
        f"firmware {d.firmware or 'unknown'}"
        for d in devices
    )
    if not active:
        return Status(False, described, "bring a port's link up (ip link, or the switch and cable)")
    return Status(True, described)


def _remedy(verbs: str, library: str, detail: str) -> str:
    if "does not open" in detail:
        return "`ulimit -n -l` prints the limits"
    if "No such file" not in detail:
        return f"check that {library} is a verbs library of this machine's architecture"
    if verbs == SYSTEM:
        return _INSTALL
    if verbs == SOFT:
        return INSTALL_AGAIN
    return "name an existing library, `soft` or `system`"


def peermem_module(root: Path = Path("/")) -> str | None:
    """Return the loaded kernel module by which a NIC registers a GPU's memory by its address, or
    None."""
    modules = ("nvidia_peermem", "nv_peer_mem")
    return next((name for name in modules if (root / "sys/module" / name).is_dir()), None)


def list_nics(verbs: str, settings: NicSettings | None = None) -> tuple[Nic, ...]:
    """List every port of the provider's devices; empty if the provider is not usable."""
    try:
        devices = _nics.devices(library_of(verbs, settings))
    except (MkernelError, OSError, RuntimeError):
        return ()
    several = {d.name for d in devices if d.port > 1}
    return tuple(_nic(device, device.name in several) for device in devices)


def _nic(device: _nics.DeviceInfo, several: bool) -> Nic:
    soft = device.firmware.startswith("softverbs")
    pci, numa = _placement(device.sysfs)
    return Nic(
        id=f"{device.name}:{device.port}" if several else device.name,
        kind=_kind(device, soft),
        name=device.name,
        port=device.port,
        pci=pci,
        numa_node=numa,
        speed_gbps=device.speed_gbps or None,
        link_layer=_link_layer(device.link_layer),
        active=device.active,
        emulated=soft,
    )


def _kind(device: _nics.DeviceInfo, soft: bool) -> KindName:
    if soft:
        return "soft"
    if device.vendor_id in MELLANOX_VENDORS:
        return "cx"
    if device.vendor_id == AMAZON_VENDOR:
        return "efa"
    return "infiniband"


def _link_layer(name: str) -> Literal["InfiniBand", "Ethernet", "Unspecified"]:
    if name == "InfiniBand":
        return "InfiniBand"
    return "Ethernet" if name == "Ethernet" else "Unspecified"


def _placement(sysfs: str) -> tuple[str | None, int | None]:
    """Read PCI address and NUMA node from the device's sysfs folder; None for each that it lacks."""
    if not sysfs:
        return None, None
    device = Path(sysfs) / "device"
    try:
        pci = device.resolve(strict=True).name
    except OSError:
        return None, None
    try:
        numa = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        numa = -1
    return (pci if pci.count(":") == 2 else None), (numa if numa >= 0 else None)
