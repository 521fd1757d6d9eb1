"""What `mkernel doctor` says of verbs providers, ports and ways to device memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from mkernel.backends.contracts.status import Status
from mkernel.backends.nics import report
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.nics.provider import peermem_module
from mkernel.topology.model import Nic

NIC = Nic(id="mlx5_0", kind="cx", name="mlx5_0")


@dataclass(frozen=True)
class Device:
    """The fields of the native ``DeviceInfo`` that a report reads."""

    state: str = "ACTIVE"
    active: bool = True
    link_layer: str = "Ethernet"
    speed_gbps: float = 400.0
    mtu: int = 4096
    firmware: str = "28.39.1002"
    gid_index: int = 3
    gid: str = "00000000000000000000ffff0a000001"
    gid_type: str = "RoCE v2"
    dmabuf: bool = True


def status(device: Device, lacks: Status | None = None) -> Status:
    return report.port_status(cast(Any, device), lambda verbs, nic: ("", lacks), "system", NIC)


@pytest.mark.parametrize("gid_index", [0, 3])
def test_a_port_tells_all_that_matters(gid_index: int) -> None:
    found = status(Device(gid_index=gid_index))
    assert found.usable
    for word in ("ACTIVE", "Ethernet", "400 Gb/s", "MTU 4096", "28.39.1002"):
        assert word in found.detail
    assert f"GID {gid_index} 10.0.0.1" in found.detail
    assert "RoCE v2" in found.detail
    assert "no dmabuf" not in found.detail
    assert "no dmabuf" in status(replace(Device(), dmabuf=False)).detail


@pytest.mark.parametrize(
    ("device", "remedy"),
    [
        (replace(Device(), active=False, state="DOWN"), "link"),
        (replace(Device(), gid_index=-1, gid="port 1 has no GID"), "address"),
    ],
)
def test_a_port_that_cannot_carry_says_what_to_do(device: Device, remedy: str) -> None:
    found = status(device)
    assert not found.usable
    assert remedy in found.remedy


def test_what_a_backend_misses_comes_first() -> None:
    found = status(
        replace(Device(), active=False), Status(False, "no RDMA write", "another device")
    )
    assert "no RDMA write" in found.detail
    assert found.remedy == "another device"


def test_the_way_to_device_memory() -> None:
    assert report.device_memory_status(True, None).detail == "by dmabuf"
    assert (
        "nvidia_peermem is loaded too" in report.device_memory_status(True, "nvidia_peermem").detail
    )
    by_module = report.device_memory_status(False, "nvidia_peermem")
    assert by_module.usable
    assert "nvidia_peermem" in by_module.detail
    neither = report.device_memory_status(False, None)
    assert not neither.usable
    assert "dmabuf" in neither.remedy
    assert "nvidia_peermem" in neither.remedy


def test_peermem_is_looked_for_among_the_loaded_modules(tmp_path: Path) -> None:
    assert peermem_module(tmp_path) is None
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert peermem_module(tmp_path) == "nvidia_peermem"


@pytest.mark.parametrize("backend", [Cx7Nic(), EfaNic()])
def test_the_software_device_is_reported(backend: Cx7Nic | EfaNic) -> None:
    ((name, found),) = backend.details("soft")
    assert name == "soft0 port 1"
    assert found.usable
    assert "softverbs" in found.detail
    assert "RoCE v2" in found.detail
    assert ("RDMA write" in found.detail) == (backend.name == "efa")


def test_a_device_without_rdma_writes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_RDMA_WRITE", "0")
    ((_, found),) = EfaNic().details("soft")
    assert not found.usable
    assert "no RDMA write" in found.detail


def test_what_is_not_there_has_no_details() -> None:
    assert Cx7Nic().details("/nowhere/libnothing.so") == ()


def test_a_library_of_unknown_version_is_none_the_worse() -> None:
    known, unknown = (
        report.library_status(f"/usr/lib/libibverbs.so{end}") for end in (".1.14.44.0", "")
    )
    assert (known.usable, known.detail.split()[0]) == (True, "44")
    assert unknown.usable
    assert "version unknown" in unknown.detail


def test_as_much_locked_memory_as_it_takes_is_enough() -> None:
    for enough in (report._LOCKED_BYTES, resource.RLIM_INFINITY):
        assert report.locked_memory_status(enough).usable
    assert not report.locked_memory_status(report._LOCKED_BYTES - 1).usable
    little = report.locked_memory_status(8 << 20)
    assert "8 MiB" in little.detail
    assert "ulimit" in little.remedy


def test_ports_of_other_backends_have_no_row() -> None:
    def abilities(verbs: str, nic: Nic) -> tuple[str, Status | None]:
        return "all", None

    assert report.details("soft", lambda nic: False, abilities) == ()
    assert len(report.details("soft", lambda nic: True, abilities)) == 1
