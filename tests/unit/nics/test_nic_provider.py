"""Where verbs libraries are looked for, and where their devices lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.backends.nics import provider
from mkernel.errors import BackendUnavailable
from mkernel.selection import SOFT, SYSTEM


def test_a_library_is_a_regular_file(tmp_path: Path) -> None:
    """What is none, as a pipe, may keep the loader for ever; a name is the loader's business."""
    regular = tmp_path / "libibverbs.so"
    regular.touch()
    for library in (str(regular), str(tmp_path / "not there"), "libibverbs.so.1"):
        assert provider._loadable(library) == library
    with pytest.raises(BackendUnavailable, match="is no regular file"):
        provider._loadable(str(tmp_path))


def test_a_device_lies_where_its_folder_leads(tmp_path: Path) -> None:
    function = tmp_path / "devices" / "0000:3b:00.0"
    function.mkdir(parents=True)
    (function / "numa_node").write_text("1\n")
    listed = tmp_path / "infiniband" / "mlx5_0"
    listed.mkdir(parents=True)
    (listed / "device").symlink_to(function)
    assert provider._placement(str(listed)) == ("0000:3b:00.0", 1)
    (function / "numa_node").write_text("0\n")
    assert provider._placement(str(listed)) == ("0000:3b:00.0", 0)
    (function / "numa_node").write_text("-1\n")
    assert provider._placement(str(listed)) == ("0000:3b:00.0", None)
    assert provider._placement("") == (None, None)
    assert provider._placement(str(tmp_path)) == (None, None)


@pytest.mark.parametrize(("gbps", "told"), [(0, None), (100, 100)])
def test_a_speed_of_0_is_not_known(gbps: int, told: int | None) -> None:
    device: Any = SimpleNamespace(
        name="mlx5_0", port=2, firmware="20.1", sysfs="", speed_gbps=gbps, active=True,
        link_layer="InfiniBand", vendor_id=0x15B3, transport="",
    )  # fmt: skip
    made = provider._nic(device, several=True)
    assert (made.id, made.speed_gbps, made.emulated) == ("mlx5_0:2", told, False)
    assert provider._nic(device, several=False).id == "mlx5_0"


@pytest.mark.parametrize(
    ("verbs", "detail", "remedy"),
    [
        (SYSTEM, "libibverbs.so.1: No such file or directory", provider._INSTALL),
        (SOFT, "x.so: No such file or directory", "run `pip install .`"),
        ("/x.so", "/x.so: No such file or directory", "name an existing library"),
        (SYSTEM, "x.so: wrong ELF class", "check that x.so is a verbs library of this machine's"),
        (SOFT, "mlx5_0 does not open: no memory can be locked", "`ulimit -n -l` prints the limits"),
    ],
)
def test_a_library_that_does_not_load_has_a_remedy(verbs: str, detail: str, remedy: str) -> None:
    assert provider._remedy(verbs, "x.so", detail).startswith(remedy)


UP: Any = SimpleNamespace(
    name="mlx5_0", port=1, active=True, link_layer="Ethernet", firmware="", sysfs=""
)
DOWN: Any = SimpleNamespace(**vars(UP) | {"active": False})


@pytest.mark.parametrize(
    ("devices", "usable", "said"),
    [
        ([], False, "no RDMA device in "),
        ([DOWN], False, "mlx5_0 port 1 down, Ethernet, firmware unknown"),
        ([UP], True, "mlx5_0 port 1 up, Ethernet, firmware unknown"),
        ([DOWN, UP], True, "mlx5_0 port 1 down, Ethernet, firmware unknown, mlx5_0 port 1 up"),
    ],
)
def test_a_provider_has_a_device_that_is_up(
    devices: list[Any], usable: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider._nics, "devices", lambda library: devices)
    found = provider.provider_status(SOFT)
    assert found.usable == usable
    assert found.detail.startswith(said)
    assert bool(found.remedy) != usable


@pytest.mark.parametrize("library", ["/nowhere/libnothing.so", "/"])
def test_a_provider_without_a_library_is_of_no_use(library: str) -> None:
    found = provider.provider_status(library)
    assert not found.usable
    assert library in found.detail
    assert found.remedy
