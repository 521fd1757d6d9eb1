"""The places of a node's devices, as a tree without the bridges at which nothing branches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mkernel.topology.model import Accelerator, Nic, Node


@dataclass
class Leaf:
    """A device, and GB/s of the link that joins it to the branch above (None: unknown)."""

    device: Accelerator | Nic
    gbs: float | None


@dataclass
class Branch:
    """A NUMA node, or a PCIe bridge at which the tree branches.

    ``gbs``: rate of the narrowest link up to the branch above; None for a NUMA node, or if unknown.
    """

    name: str
    gbs: float | None = None
    numa: int | None = None
    leaves: list[Leaf] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def all_leaves(self) -> list[Leaf]:
        """Return all leaves depth first; a branch's own come before those of the branches below."""
        return [*self.leaves, *(leaf for below in self.branches for leaf in below.all_leaves())]


def layout(node: Node, *, ethernet: bool = True) -> list[Branch]:
    """Return a branch for each NUMA node, and one more for devices whose NUMA node is unknown.

    Args:
        ethernet: include NICs that do no RDMA.
    """
    rates = {bridge.id: bridge.pcie_gbs for bridge in node.bridges}
    devices: list[Accelerator | Nic] = [
        *node.accelerators,
        *(nic for nic in node.nics if ethernet or nic.kind != "ethernet"),
    ]
    tops = {numa.id: Branch(f"NUMA {numa.id}", numa=numa.id) for numa in node.numa}
    unknown = Branch("NUMA unknown")
    for device in devices:
        if device.numa_node is None:
            _insert(unknown, device)
        else:
            number = device.numa_node
            _insert(tops.setdefault(number, Branch(f"NUMA {number}", numa=number)), device)
    branches = [top for _, top in sorted(tops.items())]
    if unknown.leaves or unknown.branches:
        branches.append(unknown)
    for top in branches:
        top.branches = [_pruned(below, rates) for below in top.branches]
        _adopt(top)
    return branches


def _insert(top: Branch, device: Accelerator | Nic) -> None:
    at = top
    for name in device.pci_path:
        below = next((branch for branch in at.branches if branch.name == name), None)
        if below is None:
            below = Branch(name)
            at.branches.append(below)
        at = below
    at.leaves.append(Leaf(device, device.pcie_gbs))


def _pruned(branch: Branch, rates: dict[str, float | None]) -> Branch:
    branch.gbs = rates.get(branch.name)
    branch.branches = [_pruned(below, rates) for below in branch.branches]
    _adopt(branch)
    if len(branch.branches) == 1 and not branch.leaves:
        (only,) = branch.branches
        only.gbs = _narrowest((only.gbs, branch.gbs))
        return only
    return branch


def _adopt(branch: Branch) -> None:
    """Take over the device of each branch that has only one."""
    for below in list(branch.branches):
        leaves = below.all_leaves()
        if len(leaves) == 1:
            branch.branches.remove(below)
            branch.leaves.append(Leaf(leaves[0].device, _narrowest((leaves[0].gbs, below.gbs))))


def _narrowest(rates: Iterable[float | None]) -> float | None:
    return min((gbs for gbs in rates if gbs is not None), default=None)
