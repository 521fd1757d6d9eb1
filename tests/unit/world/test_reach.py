"""Whether a NIC reaches a device's memory is known before anything is registered."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel.backends.contracts.nic import NicCapabilities
from mkernel.backends.contracts.status import Status
from mkernel.errors import BackendUnavailable
from mkernel.world.join import _check_reach

EXPORTS, NONE = Status(True, "by dmabuf, ordered"), Status(False, "cuda:0 exports no dmabufs")


class Device:
    name = "chip"

    def __init__(self, access: Status | None) -> None:
        self._access = access

    def nic_access(self) -> Status | None:
        return self._access


def claims(**more: bool) -> NicCapabilities:
    fields: dict[str, Any] = {"ordered": True, "dmabuf": False, "peermem": False, **more}
    return NicCapabilities(**fields)


def check(access: Status | None, staged: bool = False, **more: bool) -> None:
    device: Any = Device(access)
    _check_reach(device, "cx7", claims(**more), staged=staged)


def test_host_memory_and_staged_routes_need_no_reach() -> None:
    check(None)
    check(NONE, staged=True)


def test_either_way_is_enough() -> None:
    check(EXPORTS, dmabuf=True)
    check(NONE, peermem=True)


@pytest.mark.parametrize(("access", "dmabuf"), [(EXPORTS, False), (NONE, True)])
def test_no_way_is_an_error_that_says_what_to_do(access: Status, dmabuf: bool) -> None:
    with pytest.raises(BackendUnavailable, match=r"'cx7' cannot register memory.*GPUDIRECT=0"):
        check(access, dmabuf=dmabuf)
