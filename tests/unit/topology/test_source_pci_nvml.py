from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import SysfsTree

from mkernel.topology.sources import nvml, pci


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("3b:00.1", "0000:3b:00.1"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("0000:3b:00.8", None),
        ("pci0000:00", None),
        ("", None),
    ],
)
def test_addresses_have_one_spelling(text: str, address: str | None) -> None:
    assert pci.normalise(text) == address


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_normalising_twice_changes_nothing(domain: int, bus: int, dev: int, function: int) -> None:
    once = pci.normalise(f"{domain:08X}:{bus:02X}:{dev:02X}.{function}")
    assert once is not None
    assert pci.normalise(once) == once


def test_bridges_start_at_the_host_bridge() -> None:
    path = Path("/backup/0000:99:00.0/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0")
    assert pci.bridges(path) == ("pci0000:80", "0000:80:01.0")
    assert pci.bridges(Path("/sys/devices/virtual/0000:81:00.0")) == ()


class FakeNvml:
    """As much of pynvml as the source calls; ``fail`` names calls that raise."""

    def __init__(
        self, gpus: list[tuple[str | bytes, str | bytes]], fail: Collection[str] = ()
    ) -> None:
        self.gpus, self.fail, self.closed = gpus, fail, 0

    def _call(self, name: str) -> None:
        if name in self.fail:
            raise RuntimeError(f"{name} failed")

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlShutdown(self) -> None:
        self.closed += 1
        self._call("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._call("count")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._call(f"handle{index}")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.gpus[handle][0]

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=self.gpus[handle][1])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1 << 37)


def test_gpus_with_their_place_on_pcie(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.pci("pci0000:38/0000:38:01.0/0000:3b:00.0", numa="1\n", vendor="0x10de")
    library = FakeNvml([(b"NVIDIA H200", b"00000000:3B:00.0"), ("NVIDIA H200", "0000:5d:00.0")])
    (first, second), notes = nvml.read(tmp_path, library)
    assert (first.id, first.kind, first.name, first.index) == ("cuda0", "cuda", "NVIDIA H200", 0)
    assert (first.pci, first.numa_node, first.memory_bytes) == ("0000:3b:00.0", 1, 1 << 37)
    assert first.pci_path == ("pci0000:38", "0000:38:01.0")
    assert (second.id, second.numa_node, second.pci_path) == ("cuda1", None, ())
    assert notes == ()
    assert library.closed == 1


@pytest.mark.parametrize("call", ["init", "count"])
def test_a_driver_that_fails_is_a_note(tmp_path: Path, call: str) -> None:
    library = FakeNvml([("GPU", "0000:3b:00.0")], fail={call, "shutdown"})
    gpus, notes = nvml.read(tmp_path, library)
    assert gpus == ()
    assert f"{call} failed" in notes[0].message


def test_one_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    library = FakeNvml([("A", "0000:3b:00.0"), ("B", "0000:5d:00.0")], fail={"handle0"})
    gpus, notes = nvml.read(tmp_path, library)
    assert [gpu.id for gpu in gpus] == ["cuda1"]
    assert "GPU 0" in notes[0].message


def test_an_absent_module_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nvml.importlib, "import_module", gone)
    gpus, notes = nvml.read()
    assert gpus == ()
    assert "nvidia-ml-py does not import" in notes[0].message
