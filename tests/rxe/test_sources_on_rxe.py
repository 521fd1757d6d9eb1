"""The sources of RDMA ports on the kernel's own device: they see one port, and the same one."""

from __future__ import annotations

from pathlib import Path

from rxe_guest import DEVICE, only_in_guest, only_with_pyverbs

from mkernel.topology.merge import merge
from mkernel.topology.model import Nic
from mkernel.topology.sources import infiniband, pci, verbs
from mkernel.topology.sources.findings import Findings

pytestmark = only_in_guest


def seen() -> Nic:
    found = infiniband.read()
    assert [nic.id for nic in found.nics] == [DEVICE]
    return found.nics[0]


def test_sysfs_shows_the_port() -> None:
    port = seen()
    assert (port.kind, port.port, port.pci, port.pci_path) == ("infiniband", 1, None, ())
    assert (port.link_layer, port.active) == ("Ethernet", True)
    rate = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/rate").read_text()
    assert port.speed_gbps == float(rate.split()[0])


def test_our_own_libibverbs_says_the_same() -> None:
    from mkernel.backends.nics.provider import list_nics

    merged = merge([infiniband.read(), Findings("libibverbs", nics=list_nics("system"))])
    assert [nic.id for nic in merged.nics] == [DEVICE]
    assert [note.message for note in merged.notes if "earlier" in note.message] == []


@only_with_pyverbs
def test_pyverbs_says_the_same() -> None:
    found = verbs.read()
    assert found.notes == ()
    (port,) = found.nics
    sysfs = seen()
    assert (port.id, port.port, port.link_layer, port.active) == (DEVICE, 1, "Ethernet", True)
    assert port.speed_gbps == sysfs.speed_gbps
    merged = merge([infiniband.read(), found])
    assert [nic.id for nic in merged.nics] == [DEVICE]
    assert [note.message for note in merged.notes if "earlier" in note.message] == []


def test_the_guests_ethernet_cards_are_found() -> None:
    """virtio's, whose interfaces lie a folder below the PCI function."""
    found = {nic.id: nic for nic in pci.read_tree().nics}
    assert set(found) == {"eth0", "eth1"}
    assert {nic.kind for nic in found.values()} == {"ethernet"}
    assert all(nic.pci and nic.pci_path for nic in found.values())
