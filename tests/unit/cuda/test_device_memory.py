"""Symmetric memory of a device, on a stand-in for the native module whose memory is memfds."""

from __future__ import annotations

import gc
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mkernel.backends.accelerators import cuda
from mkernel.backends.accelerators.cuda import native
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.errors import ArgumentError

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


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands for ``_cuda``, on a host of four devices. All memory is unmapped when a test ends."""
    made = SimpleNamespace(
        CudaError=CudaError,
        DeviceMemory=FakeMemory,
        gpu_direct=lambda device: SimpleNamespace(
            dmabuf=device != 1, ordered=device != 2, flushes=False
        ),
        devices=lambda: [SimpleNamespace(pci=f"0000:{index:02X}:00.0") for index in range(4)],
    )
    monkeypatch.setattr(cuda, "_cuda", made, raising=False)
    native.native.cache_clear()
    native.pci_address.cache_clear()
    yield
    native.native.cache_clear()
    native.pci_address.cache_clear()
    gc.collect()
    assert FakeMemory.alive == 0, "memory is left mapped"
    assert "mkernel-fds" not in [thread.name for thread in threading.enumerate()]


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


def test_what_is_wrong_with_memory_is_said() -> None:
    with pytest.raises(ValueError, match="nbytes = 0"):
        DeviceMemory.create(0, 0)
    with pytest.raises(OSError, match=r"no \d+ bytes of symmetric memory.*OUT_OF_MEMORY"):
        DeviceMemory.create(1 << 50, 0)
    with pytest.raises(OSError, match="same accelerator"):
        DeviceMemory.attach({"pid": 1, "fd": 2}, 0)
    memory = DeviceMemory.create(64, 0)
    with pytest.raises(OSError, match="no dmabuf: not supported"):
        memory.dmabuf()
    for device, why in ((1, "exports no dmabufs"), (2, "neither orders what NICs write nor")):
        with pytest.raises(OSError, match=f"no dmabuf: cuda:{device} {why}"):
            DeviceMemory.create(64, device).dmabuf()
    with pytest.raises(ValueError, match="do not fit 64 bytes"):
        memory.tensor(0, (33,), torch.bfloat16)
    memory.close()
    with pytest.raises(ValueError, match="was closed"):
        memory.export()
