"""The hopper backend's host side where there is no GPU: a stand-in for the native module on memfds."""

from __future__ import annotations

import gc
import json
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.backends.accelerators import hopper
from mkernel.backends.accelerators.hopper import capabilities, dispatch, native
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.device_session import HopperLaunch
from mkernel.backends.accelerators.hopper.memory import DeviceMemory
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.runtime import _runtime
from mkernel.errors import ArgumentError, BackendUnavailable, Unsupported

PAGE = 4096


class CudaError(RuntimeError):
    pass


class FakeMemory:
    """Device memory as pages of a memfd, device ``n`` or a mapping for it."""

    alive = 0

    def __init__(self, device: int, fd: int, mapped: int) -> None:
        self.device, self.mapped_bytes, self._fd = device, mapped, os.dup(fd)
        self.pages = mmap.mmap(self._fd, mapped)
        self.address = 0x7000_0000_0000 + 0x1000 * FakeMemory.alive
        FakeMemory.alive += 1

    @staticmethod
    def create(device: int, nbytes: int) -> FakeMemory:
        if nbytes > 1 << 40:
            raise CudaError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
        fd = os.memfd_create("mkernel-fake", os.MFD_CLOEXEC)
        mapped = -(-nbytes // PAGE) * PAGE
        os.ftruncate(fd, mapped)
        made = FakeMemory(device, fd, mapped)
        os.close(fd)
        return made

    @staticmethod
    def attach(device: int, fd: int, mapped: int) -> FakeMemory:
        if device == 3:
            raise CudaError("cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE (101)")
        return FakeMemory(device, fd, mapped)

    def export_fd(self) -> int:
        return os.dup(self._fd)

    def export_dmabuf(self) -> int:
        raise CudaError("not supported")

    def write_word(self, offset: int, value: int) -> None:
        self.pages[offset : offset + 8] = value.to_bytes(8, "little")

    def __del__(self) -> None:
        FakeMemory.alive -= 1
        os.close(self._fd)


@dataclass
class FakeDevice:
    index: int
    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multiprocessors: int = 100
    memory_bytes: int = 1 << 37

    @property
    def pci(self) -> str:
        return f"0000:{self.index:02X}:00.0"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = SimpleNamespace(
        CudaError=CudaError,
        DeviceMemory=FakeMemory,
        versions=lambda: (13000, 13000),
        devices=lambda: [FakeDevice(index) for index in range(4)],
    )
    monkeypatch.setattr(hopper, "_hopper", made, raising=False)
    native.native.cache_clear()
    native.pci_address.cache_clear()
    yield made
    native.native.cache_clear()
    native.pci_address.cache_clear()
    gc.collect()
    assert FakeMemory.alive == 0, "memory is left mapped"
    assert "mkernel-fds" not in [thread.name for thread in threading.enumerate()]


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_peers_map_what_was_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory.create(PAGE + 1, 0)
    descriptor = json.loads(json.dumps(memory.export()))
    assert memory.export() == descriptor, "one offer for all peers"
    peers = [DeviceMemory.attach(descriptor, device) for device in (1, 2)]
    memory.write_word(PAGE, 77)
    for peer in peers:
        assert peer.nbytes == PAGE + 1
        assert peer._alive().pages[PAGE] == 77  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="device 3 cannot map a peer's memory"):
        DeviceMemory.attach(descriptor, 3)
    with pytest.raises(ArgumentError, match="a GPU of its own for each rank"):
        DeviceMemory.attach(descriptor, 0)
    monkeypatch.setenv("MKERNEL_RANKS_PER_DEVICE", "2")
    peers.append(DeviceMemory.attach(descriptor, 0))
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="nobody offers"):
        DeviceMemory.attach(descriptor, 1)
    assert peers[0]._alive().pages[PAGE] == 77  # type: ignore[attr-defined]
    for peer in peers:
        peer.close()


@pytest.mark.usefixtures("fake")
def test_descriptors_are_not_left_open() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(3):
        memory = DeviceMemory.create(100, 0)
        peer = DeviceMemory.attach(memory.export(), 1)
        del memory
        gc.collect()
        peer.close()
    assert count() == before


@pytest.mark.usefixtures("fake")
def test_what_is_wrong_with_memory_is_said() -> None:
    with pytest.raises(ValueError, match="nbytes = 0"):
        DeviceMemory.create(0, 0)
    with pytest.raises(OSError, match=r"no \d+ bytes of symmetric memory.*OUT_OF_MEMORY"):
        DeviceMemory.create(1 << 50, 0)
    with pytest.raises(OSError, match="same accelerator"):
        DeviceMemory.attach({"pid": 1, "fd": 2}, 0)
    memory = DeviceMemory.create(64, 0)
    with pytest.raises(OSError, match="no dmabuf"):
        memory.dmabuf()
    with pytest.raises(ValueError, match="do not fit 64 bytes"):
        memory.tensor(0, (33,), torch.bfloat16)
    memory.close()
    with pytest.raises(ValueError, match="was closed"):
        memory.export()


# ---- the backend -----------------------------------------------------------------------------------


def test_status_names_what_is_missing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HopperAccelerator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend.status().usable
    assert "4 x NVIDIA H200 (100 SMs), driver for CUDA 13.0" in backend.status().detail
    assert [device.id for device in backend.probe()] == ["cuda0", "cuda1", "cuda2", "cuda3"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch" in backend.status().detail
    assert backend.probe() == ()
    fake.devices = lambda: [FakeDevice(0, major=8)]
    assert "no device of compute capability 9.0" in backend.status().detail

    def none() -> list[FakeDevice]:
        raise CudaError("cudaGetDeviceCount failed: cudaErrorNoDevice (100)")

    fake.devices = none
    assert "cudaErrorNoDevice" in backend.status().detail
    fake.versions = lambda: (0, 13000)
    assert "no CUDA driver" in backend.status().detail
    assert backend.status().remedy


def test_a_build_without_nvcc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise BackendUnavailable("the CUDA kernels do not import: No module named '_hopper'")

    monkeypatch.setattr(native, "native", absent)
    monkeypatch.setattr(capabilities, "native", absent)
    status = HopperAccelerator().status()
    assert not status.usable
    assert "not built" in status.detail
    assert "nvcc" in status.remedy
    assert capabilities.ops() == ()
    assert HopperAccelerator().capabilities().ops == ()


def test_ops_are_those_that_the_build_has(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    made: Any = object()
    there = dispatch.Op(lambda plan: 10, lambda call, context: started.append(call) or made)
    absent = dispatch.Op(lambda plan: 10, lambda call, context: made)
    monkeypatch.setattr(dispatch, "OPS", {"all_gather_gemm": there, "gemm_all_reduce": absent})
    monkeypatch.setitem(capabilities.FUNCTIONS, "all_gather_gemm", "there")
    fake.there = None
    claimed = HopperAccelerator().capabilities()
    assert claimed.ops == ("all_gather_gemm",)
    assert claimed.compute_cores == 100
    assert claimed.stream_ordered
    assert not claimed.multicast
    assert claimed.dtype_pairs() == (("bfloat16", "bfloat16"), ("float16", "float16"))
    plan: Any = SimpleNamespace(op="all_gather_gemm", path="fused")
    workspace = HopperAccelerator().workspace(plan)
    assert (workspace.nbytes, workspace.signals, workspace.shared) == (10, 0, True)
    call: Any = SimpleNamespace(plan=plan)
    context: Any = None
    assert dispatch.executor_for(call, context) is made
    assert started == [call]
    with pytest.raises(Unsupported, match="no kernel of gemm_all_reduce; it has: all_gather_gemm"):
        dispatch.region_bytes(SimpleNamespace(op="gemm_all_reduce"))  # type: ignore[arg-type]


def test_outside_of_a_world_nothing_is_there() -> None:
    backend = HopperAccelerator()
    assert backend.failure() is None
    backend.abort(_runtime.AbortCode.timeout)
    assert backend.close(0.1)
    with pytest.raises(BackendUnavailable, match="in no world"):
        backend.allocate(10)
    with pytest.raises(BackendUnavailable, match="in no world"):
        backend.launch(Call.__new__(Call))


def test_a_failure_is_what_the_kernels_recorded() -> None:
    class Control:
        failed = False

        def outcome(self) -> tuple[_runtime.AbortCode, _runtime.Diagnosis]:
            assert self.failed, "costs more than a read"
            return _runtime.AbortCode.timeout, who

    who, control = _runtime.Diagnosis(), Control()
    backend: Any = HopperAccelerator()
    backend._session = SimpleNamespace(control=control)
    assert backend.failure() is None
    control.failed = True
    assert backend.failure() == (_runtime.AbortCode.timeout, who)


def test_a_launch_is_waited_for_until_the_device_is_past_it() -> None:
    class Order:
        looks = 0

        def finished(self, number: int) -> bool:
            assert number == 5
            self.looks += 1
            return self.looks > 20

    order: Any = Order()
    launch = HopperLaunch(order, 5, None)
    assert not launch.wait(0.0)
    assert order.looks == 1
    assert launch.wait(60.0)
    assert launch.times().seconds == {}


def test_the_native_module_loads_without_a_driver() -> None:
    try:
        from mkernel.backends.accelerators.hopper import _hopper
    except ImportError:
        pytest.skip("built without nvcc")
    driver, runtime = _hopper.versions()
    assert runtime >= 12050
    if driver == 0:
        with pytest.raises(_hopper.CudaError, match=r"cudaGetDeviceCount failed: \w+ \(\d+\)"):
            _hopper.devices()
        with pytest.raises(_hopper.CudaError):
            _hopper.ControlBlock()
