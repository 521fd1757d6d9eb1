"""The kind of a PCI function, from its class and vendor, and the known properties of kinds of
devices and links.

Other kinds work as well: a kind without known properties stands for itself.
"""

from __future__ import annotations

from mkernel.topology.defaults import defaults
from mkernel.topology.model import KindName

NVIDIA, AMD, HUAWEI = 0x10DE, 0x1002, 0x19E5
MELLANOX, MELLANOX_OUI, AMAZON = 0x15B3, 0x02C9, 0x1D0F
"""PCI vendor ids. ``MELLANOX_OUI`` is Mellanox's number at the IEEE, which some drivers report as
the vendor."""

_ACCELERATORS: dict[int, KindName] = {NVIDIA: "cuda", AMD: "rocm", HUAWEI: "ascend"}
_STEMS: dict[KindName, str] = {"cuda": "cuda", "ascend": "npu", "rocm": "rocm", "cpu": "cpu"}
FABRICS = {"nvlink": "NVLink", "xgmi": "xGMI", "hccs": "HCCS", "c2c": "C2C"}
"""The kinds of scale-up links, as people write them."""
FABRIC_CLASSES = {"nvlink": "NVL", "xgmi": "NVL", "hccs": "HCCS"}
"""The path classes of pairs that such links join, best first."""
FABRIC_LEGEND = {
    "NV#": "# NVLinks",
    "NVL": "NVLinks, nobody knows how many",
    "HCCS": "Ascend's links",
}
COUNTED_CLASSES = {"NVL": "NV"}
"""The path classes that tables write with the number of links, and the prefix of that number."""
_PROTOCOLS = {"cx": "ib-verbs", "infiniband": "ib-verbs", "efa": "srd"}
_BRIDGE, _DISPLAY, _PROCESSOR, _NETWORK = 0x0604, 0x03, 0x12, 0x02
_INFINIBAND, _VGA = 0x0207, 0x0300
_EFA_DEVICES = range(0xEFA0, 0xEFB0)
_AMD_COMPUTE = (
    range(0x66A0, 0x66B0),
    range(0x67A0, 0x6800),
    range(0x6860, 0x6880),
    range(0x6980, 0x69B0),
    range(0x7300, 0x8000),
)
"""Device ids of AMD's GPUs that compute, from Hawaii on (The PCI ID Repository). Many of them have
the VGA class, as have the consoles that servers have from ATI, and the graphics inside CPUs."""


def is_bridge(pci_class: int) -> bool:
    """Return whether it is a PCI-to-PCI bridge; classes have 16 bits here, without the programming
    interface."""
    return pci_class == _BRIDGE


def is_display(pci_class: int) -> bool:
    """Return whether it is a display or processing function: an accelerator, if its vendor makes
    any."""
    return pci_class >> 8 in (_DISPLAY, _PROCESSOR)


def accelerator(pci_class: int, vendor: int | None, device: int | None) -> KindName | None:
    """Return the kind of accelerator that a function is. None: it is none, as far as can be
    determined.

    Display and processing functions of vendors without accelerators are none, and neither are
    consoles of servers, which AMD and Huawei make too.
    """
    if pci_class == _VGA and vendor == HUAWEI:
        return None
    if pci_class == _VGA and vendor == AMD and not any(device in ids for ids in _AMD_COMPUTE):
        return None
    return made_by(vendor) if is_display(pci_class) else None


def why_none(pci_class: int, vendor: int | None, device: int | None) -> str | None:
    """Return why a display or processing function is no accelerator, for a note. None: it is one,
    or is neither, or is a console of a vendor that makes no accelerators."""
    if not is_display(pci_class) or accelerator(pci_class, vendor, device) is not None:
        return None
    name = f"{model(vendor, device)}, of class {pci_class:04x},"
    if made_by(vendor) is not None:
        return f"{name} counts as a console and not as an accelerator; left out"
    return None if pci_class == _VGA else f"{name} is no known kind of accelerator; left out"


def made_by(vendor: int | None) -> KindName | None:
    """Return the kind of accelerators that a vendor makes."""
    return _ACCELERATORS.get(vendor or 0)


def accelerator_id(kind: KindName, index: int) -> str:
    """Return the id of a device, such as ``cuda0`` or ``npu3``."""
    return f"{_STEMS[kind]}{index}"


def is_accelerator(kind: KindName) -> bool:
    """Return whether devices of a kind are accelerators that sources know."""
    return kind in _STEMS


def model(vendor: int | None, device: int | None) -> str:
    """Return a name for a device without a better known one: ``10de:2330``."""
    return "unknown" if vendor is None or device is None else f"{vendor:04x}:{device:04x}"


def is_network(pci_class: int) -> bool:
    """Return whether it is a network controller, InfiniBand or Ethernet."""
    return pci_class >> 8 == _NETWORK


def is_infiniband(pci_class: int) -> bool:
    """Return whether it is a network controller that is not Ethernet."""
    return pci_class == _INFINIBAND


def rdma(vendor: int | None) -> KindName:
    """Return the kind of a device that is known to do RDMA."""
    if vendor in (MELLANOX, MELLANOX_OUI):
        return "cx"
    return "efa" if vendor == AMAZON else "infiniband"


def network(pci_class: int, vendor: int | None, device: int | None) -> KindName:
    """Return the kind of a network function of which only the PCI ids are known: Mellanox' cards,
    Amazon's EFA and the InfiniBand class do RDMA, all others count as plain Ethernet."""
    is_efa = vendor == AMAZON and device in _EFA_DEVICES
    if is_efa or vendor == MELLANOX or is_infiniband(pci_class):
        return rdma(vendor)
    return "ethernet"


def protocol(kind: KindName) -> str:
    """Return the protocol of NICs of a kind; NICs of two kinds reach each other if it is the same."""
    return _PROTOCOLS.get(kind, kind)


def refines(fine: KindName, coarse: KindName) -> bool:
    """Return whether an RDMA device of unknown vendor may turn out to be of that kind."""
    return coarse == "infiniband" and fine in ("cx", "efa")


def fabric_class(kind: KindName) -> str:
    """Return the path class of a pair that such links join."""
    return FABRIC_CLASSES.get(kind, kind.upper())


def fabric_name(kind: KindName) -> str:
    """Return a kind of links as people write it."""
    return FABRICS.get(kind, kind)


def nvlink_gbs(capability: int | None) -> float | None:
    """Return the GB/s of one NVLink of a GPU of that compute capability (60 is 6.0). None for one
    without."""
    return None if capability is None else defaults().fabrics["nvlink"].gbs(capability)
