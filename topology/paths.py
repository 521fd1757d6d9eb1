"""How near two devices of one node are: path classes as NCCL names them.

``LOC`` same device, ``PIX`` at most one PCIe switch between, ``PXB`` several, ``PHB`` through the
host bridge, ``NODE`` same NUMA node, ``SYS`` across NUMA nodes.
"""

from __future__ import annotations

from typing import Literal

from mkernel.topology.model import Accelerator, Nic

PathClass = Literal["LOC", "PIX", "PXB", "PHB", "NODE", "SYS"]
CLASSES: tuple[PathClass, ...] = ("LOC", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Best first."""


def classify(one: Accelerator | Nic, other: Accelerator | Nic) -> PathClass:
    """Path class of a pair in one node.

    Where PCI positions are unknown, the NUMA nodes decide; where those are unknown too, the pair
    counts as ``NODE``: unknown devices are all equally near, so that sharing stays balanced.
    """
    if one.pci is not None and one.pci == other.pci:
        return "LOC"
    shared = 0
    for left, right in zip(one.pci_path, other.pci_path, strict=False):
        if left != right:
            break
        shared += 1
    if shared > 1:
        # A switch shows as one upstream bridge (shared) and one downstream bridge a device, so one
        # further bridge on each side still is the same switch.
        below = max(len(one.pci_path), len(other.pci_path)) - shared
        return "PIX" if below <= 1 else "PXB"
    if shared == 1:
        return "PHB"
    if one.numa_node is None or other.numa_node is None or one.numa_node == other.numa_node:
        return "NODE"
    return "SYS"


def distance(one: Accelerator | Nic, other: Accelerator | Nic) -> int:
    """Rank of the path class: 0 is nearest."""
    return CLASSES.index(classify(one, other))
