from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
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


def test_what_is_no_address_is_no_bridge() -> None:
    device = Path("/sys/devices/pci0000:00/0000:00:01.0/virtual/0000:01:00.0")
    assert pci.bridges_above(device) == ("pci0000:00", "0000:00:01.0")


def test_bridges_start_at_the_host_bridge() -> None:
    path = Path("/backup/0000:99:00.0/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0")
    assert pci.bridges_above(path) == ("pci0000:80", "0000:80:01.0")
    assert pci.bridges_above(Path("/sys/devices/virtual/0000:81:00.0")) == ()


class FakeNvml:
    """As much of pynvml as the source calls; ``fail`` names calls that raise."""

    def __init__(
        self, gpus: list[tuple[str | bytes, str | bytes]], fail: Collection[str] = ()
    ) -> None:
        self.gpus, self.fail, self.closed = gpus, fail, 0
        self.links: dict[tuple[int, int], tuple[int, str]] = {}
        """(GPU, link) → kind and address of the other end; any other link is down or not there."""
        self.refused: dict[tuple[int, int], int] = {}
        self.nodes: dict[int, list[int]] = {}
        self.capability = (9, 0)
        self.split: set[int] = set()
        self.confidential = self.together = 0
        self.c_nvmlSystemConfComputeSettings_v1_t = pynvml.c_nvmlSystemConfComputeSettings_v1_t

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

    def nvmlDeviceGetMemoryAffinity(self, handle: int, words: int, scope: int) -> list[int]:
        self._call("affinity")
        return (self.nodes.get(handle, []) + [0] * words)[:words]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        self._call("capability")
        return self.capability

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._call("state")
        if link >= 18:
            raise RuntimeError("Invalid Argument")
        return int((handle, link) in self.links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        self._call("remote type")
        return self.links[handle, link][0]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        self._call("remote address")
        return SimpleNamespace(busId=self.links[handle, link][1])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        self._call("p2p")
        assert index == 1, "writes are what kernels do"
        return self.refused.get((one, other), 0)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        self._call(f"mig{handle}")
        pending = 1 - (handle in self.split)  # until the next reset
        return [int(handle in self.split), pending]

    def nvmlSystemGetConfComputeState(self) -> Any:
        self._call("state of confidential computing")
        return SimpleNamespace(environment=2, ccFeature=self.confidential, devToolsMode=0)

    def nvmlSystemGetConfComputeSettings(self, settings: Any) -> int:
        self._call("settings of confidential computing")
        settings._obj.multiGpuMode = self.together or 7
        return 0 if self.together else 3  # not supported


def test_gpus_with_their_place_on_pcie(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.pci("pci0000:38/0000:38:01.0/0000:3b:00.0", numa="1\n", vendor="0x10de")
    library = FakeNvml([(b"NVIDIA H200", b"00000000:3B:00.0"), ("NVIDIA H200", "0000:5d:00.0")])
    found = nvml.read(tmp_path, library)
    (first, second), notes = found.accelerators, found.notes
    assert (first.id, first.kind, first.name, first.index) == ("cuda0", "cuda", "NVIDIA H200", 0)
    assert (first.pci, first.numa_node, first.memory_bytes) == ("0000:3b:00.0", 1, 1 << 37)
    assert first.pci_path == ("pci0000:38", "0000:38:01.0")
    assert (second.id, second.numa_node, second.pci_path) == ("cuda1", None, ())
    assert notes == ()
    assert library.closed == 1


@pytest.mark.parametrize("call", ["init", "count"])
def test_a_driver_that_fails_is_a_note(tmp_path: Path, call: str) -> None:
    library = FakeNvml([("GPU", "0000:3b:00.0")], fail={call, "shutdown"})
    found = nvml.read(tmp_path, library)
    assert found.accelerators == ()
    assert f"{call} failed" in found.notes[0].message


def test_one_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    library = FakeNvml([("A", "0000:3b:00.0"), ("B", "0000:5d:00.0")], fail={"handle0"})
    found = nvml.read(tmp_path, library)
    assert [gpu.id for gpu in found.accelerators] == ["cuda1"]
    assert "GPU 0" in found.notes[0].message


def test_an_absent_module_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nvml.importlib, "import_module", gone)
    found = nvml.read()
    assert found.accelerators == ()
    assert "nvidia-ml-py does not import" in found.notes[0].message


TWO = [("A", "0000:01:00.0"), ("B", "0000:02:00.0")]


def test_links_to_switches_count_together(tmp_path: Path) -> None:
    library = FakeNvml(TWO)
    for gpu in range(2):
        library.links |= {(gpu, link): (2, f"0000:c{link % 4}:00.0") for link in range(18)}
    found = nvml.read(tmp_path, library)
    assert [(link.ends, link.count, link.gbs) for link in found.fabric] == [
        (("cuda0", "switch"), 18, 450.0),
        (("cuda1", "switch"), 18, 450.0),
    ]
    assert (found.notes, found.no_p2p) == ((), ())


@pytest.mark.parametrize("fail", [{"remote type"}, {"remote type", "remote address"}])
def test_ends_that_a_virtual_machine_hides_are_switches(tmp_path: Path, fail: set[str]) -> None:
    library = FakeNvml(TWO, fail=fail)
    library.links = {(gpu, link): (2, "ffffffff:ff:ff.0") for gpu in range(2) for link in range(18)}
    found = nvml.read(tmp_path, library)
    assert [(link.ends[1], link.count) for link in found.fabric] == [("switch", 18)] * 2


@pytest.mark.parametrize("fail", [(), ("state",), ("count",)])
def test_links_that_are_all_down_are_known_unless_nobody_answers(
    fail: tuple[str, ...], tmp_path: Path
) -> None:
    """Virtual machines may hide links, and then their absence says nothing."""
    gpus = [("NVIDIA H100 PCIe", f"0000000{i}:3B:00.0") for i in range(2)]
    found = nvml.read(tmp_path, FakeNvml(gpus, fail))
    assert (found.fabric, found.fabric_known) == ((), not fail)


def test_links_between_gpus_are_one_a_pair(tmp_path: Path) -> None:
    library = FakeNvml(TWO)
    library.links = {
        (0, 0): (0, "00000000:02:00.0"),
        (0, 3): (0, "00000000:02:00.0"),
        (0, 4): (0, "00000000:99:00.0"),  # of another container
        (0, 5): (1, "0000:04:00.0"),
        (1, 0): (0, "00000000:01:00.0"),
    }
    found = nvml.read(tmp_path, library)
    assert [(link.ends, link.count, link.gbs) for link in found.fabric] == [
        (("cuda0", "cuda1"), 2, 50.0),
        (("cuda0", "host"), 1, 25.0),
    ]
    assert [note.message for note in found.notes] == [
        "cuda1 has 1 links to cuda0, which has 2 back"
    ]


def test_unknown_generation_leaves_the_rate_open(tmp_path: Path) -> None:
    library = FakeNvml(TWO, fail={"capability"})
    library.links = {(0, 0): (2, ""), (1, 0): (2, "")}
    assert [link.gbs for link in nvml.read(tmp_path, library).fabric] == [None, None]


def test_pairs_whose_driver_refuses_peer_access(tmp_path: Path) -> None:
    library = FakeNvml([*TWO, ("C", "0000:03:00.0")])
    library.refused = {(0, 2): 1, (1, 2): 6}  # chipset; unknown
    assert nvml.read(tmp_path, library).no_p2p == (("cuda0", "cuda2"),)
    unknown = nvml.read(tmp_path, FakeNvml(TWO, fail={"p2p"}))
    assert unknown.no_p2p == ()
    assert "p2p failed" in unknown.notes[0].message


def test_the_driver_knows_numa_nodes_that_sysfs_does_not(tmp_path: Path) -> None:
    SysfsTree(tmp_path).pci("pci0000:00/0000:01:00.0", numa="-1", vendor="0x10de")
    library = FakeNvml([*TWO, ("C", "0000:03:00.0")])
    library.nodes = {0: [0, 2], 1: [3], 2: []}
    assert [gpu.numa_node for gpu in nvml.read(tmp_path, library).accelerators] == [65, None, None]
    silent = FakeNvml(TWO, fail={"affinity"})
    assert {gpu.numa_node for gpu in nvml.read(tmp_path, silent).accelerators} == {None}


@pytest.mark.parametrize(
    ("speed", "lanes", "gbs"),
    [
        ("2.5 GT/s PCIe", 1, 0.25),
        ("8.0 GT/s PCIe", 16, 15.754),
        ("16 GT/s", 16, 31.508),
        ("32.0 GT/s PCIe", 16, 63.015),
        ("64.0 GT/s PCIe", 16, 121.0),
        ("Unknown speed", 16, None),
        ("32.0 GT/s PCIe", 0, None),
        ("32.0 GT/s PCIe", 255, None),
        (None, 16, None),
        ("32.0 GT/s PCIe", None, None),
    ],
)
def test_rates_of_links(speed: str | None, lanes: int | None, gbs: float | None) -> None:
    assert pci.link_gbs(pci.parse_speed(speed), lanes) == gbs


def test_a_link_is_as_fast_as_its_lesser_side(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    gpu = tree.pci("pci0000:38/0000:38:01.0/0000:3b:00.0", link=("32.0 GT/s PCIe", "16"))
    assert pci.device_gbs(gpu, idles=True) == 63.015
    (gpu.parent / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    assert pci.device_gbs(gpu, idles=True) == 31.508
    (gpu / "current_link_width").write_text("8\n")
    assert pci.device_gbs(gpu, idles=True) == 15.754, "the port's speed, the GPU's width"
    (gpu / "current_link_speed").write_text("2.5 GT/s PCIe\n")
    assert pci.device_gbs(gpu, idles=True) == 15.754, "an idle GPU slows its link down"
    assert pci.device_gbs(gpu, idles=False) == 2.0, "a NIC does not"


def test_a_link_that_nobody_describes_has_no_rate(tmp_path: Path) -> None:
    assert pci.device_gbs(SysfsTree(tmp_path).pci("pci0000:00/0000:01:00.0"), idles=True) is None


def test_numa_nodes_beyond_the_first_word(tmp_path: Path) -> None:
    library = FakeNvml([("A", "0000:3b:00.0"), ("B", "0000:5d:00.0")])
    library.nodes = {0: [0, 1 << 1], 1: [1 << 3]}
    assert [gpu.numa_node for gpu in nvml.read(tmp_path, library).accelerators] == [65, 3]


@pytest.mark.parametrize(
    ("capability", "gbs"), [((6, 0), 20.0), ((7, 5), 25.0), ((8, 6), 14.0625), ((9, 0), 25.0)]
)
def test_links_are_as_fast_as_their_generation(
    tmp_path: Path, capability: tuple[int, int], gbs: float
) -> None:
    library = FakeNvml([("A", "0000:3b:00.0"), ("B", "0000:5d:00.0")])
    library.capability = capability
    for one, other in ((0, "0000:5d:00.0"), (1, "0000:3b:00.0")):
        library.links[one, 0] = (0, other)
    assert [link.gbs for link in nvml.read(tmp_path, library).fabric] == [round(gbs, 3)]


def test_a_bridge_is_as_fast_as_it_can_be(tmp_path: Path) -> None:
    """Its link slows down with an idle device below it, and is told for all of them."""
    for name, value in {
        "current_link_speed": "2.5 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_width": "16",
    }.items():
        (tmp_path / name).write_text(value)
    assert pci.port_gbs(tmp_path) == pci.link_gbs(32.0, 16)
    assert pci.device_gbs(tmp_path, idles=False) == pci.link_gbs(2.5, 16)


def test_a_gpu_that_idles_has_its_links_whole_rate(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    gpu = tree.pci("pci0000:38/0000:38:01.0/0000:3b:00.0", link=("32.0 GT/s PCIe", "16"))
    (gpu / "current_link_speed").write_text("2.5 GT/s PCIe\n")
    (found,) = nvml.read(tmp_path, FakeNvml([("A", "0000:3b:00.0")])).accelerators
    assert found.pcie_gbs == 63.015


def test_modes_in_which_gpus_are_apart() -> None:
    library = FakeNvml([*TWO, ("C", "0000:03:00.0")], fail={"mig1"})  # which knows no such mode
    assert nvml.isolation(library) == ((), False)
    library.split = {0, 2}
    assert nvml.isolation(library) == ((0, 2), False)
    library.split, library.confidential = set(), 1
    assert nvml.isolation(library) == ((), True)
    library.confidential, library.together = 0, 1  # protected PCIe: the GPUs' own mode is off
    assert nvml.isolation(library) == ((), True)
    assert library.closed == 4


@pytest.mark.parametrize("fail", ["state of confidential computing", "count"])
def test_a_driver_that_knows_no_mode_does_not_hide_another(fail: str) -> None:
    library = FakeNvml(TWO, fail={fail})
    library.split, library.together = {1}, 1
    assert nvml.isolation(library) == ((() if fail == "count" else (1,)), True)
    assert nvml.isolation(FakeNvml(TWO, fail={"init"})) == ((), False)
