"""Processes that hold symmetric memory of a GPU each, and do what a test tells them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from mkernel.backends.accelerators.cuda.memory import DeviceMemory

TIMEOUT_S = 60.0


class Holder:
    """The process's side: its own memory and what it has mapped, by name."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.memory: dict[str, Any] = {}
        torch.cuda.set_device(device)

    def create(self, name: str, nbytes: int) -> dict[str, Any]:
        """Allocate; the descriptor."""
        self.memory[name] = made = DeviceMemory.create(nbytes, self.device)
        return made.export()

    def attach(self, name: str, descriptor: dict[str, Any]) -> None:
        """Map a peer's."""
        self.memory[name] = DeviceMemory.attach(descriptor, self.device)

    def write(self, name: str, offset: int, values: list[int]) -> None:
        """Store 64-bit values by a kernel of this device."""
        data = torch.tensor(values, device="cuda")
        self._copy(self.memory[name].address + offset, data.data_ptr(), 8 * len(values))

    def read(self, name: str, offset: int, count: int) -> list[int]:
        """Load 64-bit values by a kernel of this device."""
        data = torch.full((count,), -1, device="cuda")
        self._copy(data.data_ptr(), self.memory[name].address + offset, 8 * count)
        return [int(value) for value in data]

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        from mkernel.backends.accelerators.cuda import _kernels

        stream = torch.cuda.current_stream()
        _kernels.copy(to, source, nbytes, _kernels.Engine.plain, stream=stream.cuda_stream)
        stream.synchronize()

    def tensor(self, name: str, offset: int, shape: list[int], dtype: str) -> list[float]:
        """The memory as torch sees it, flattened; also that it is no copy, and no other's device."""
        with torch.device("cpu"):  # the user's default device says nothing of where memory lies
            made = self.memory[name].tensor(offset, shape, getattr(torch, dtype))
        assert made.data_ptr() == self.memory[name].address + offset
        assert made.device == torch.device("cuda", self.device)
        return [float(value) for value in made.flatten().float()]

    def outlives(self, name: str) -> bool:
        """Close memory that a tensor still holds, and use that."""
        made = self.memory[name].tensor(0, [1024], torch.bfloat16)
        self.memory.pop(name).close()
        made.fill_(2)
        return float(made.float().sum()) == 2048.0

    def dmabuf(self, name: str) -> tuple[str, int, int]:
        """(what the descriptor is, its size, bytes of the memory)."""
        fd = self.memory[name].dmabuf()
        try:
            kind = os.readlink(f"/proc/self/fd/{fd}")
            return kind, os.lseek(fd, 0, os.SEEK_END), self.memory[name].nbytes
        finally:
            os.close(fd)

    def close(self, name: str) -> None:
        """Let go of it."""
        self.memory.pop(name).close()

    def free_bytes(self) -> int:
        """Bytes that are free on the device."""
        return torch.cuda.mem_get_info()[0]

    def left(self) -> tuple[int, list[str]]:
        """(descriptors open, threads) of the process."""
        import threading

        return len(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()]


def serve(connection: Connection, device: int) -> None:
    """The process: run what arrives until the pipe closes."""
    holder = Holder(device)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(holder, name)(*args), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


class Rank:
    """The test's side of one process."""

    def __init__(self, device: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, device), daemon=True
        )
        self.process.start()
        theirs.close()

    def do(self, name: str, *args: Any) -> Any:
        """Run a method of the holder there. RuntimeError: what it raised."""
        self.connection.send((name, args))
        if not self.connection.poll(TIMEOUT_S):
            raise TimeoutError(f"{name} did not end within {TIMEOUT_S} s")
        result, error = self.connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.join(TIMEOUT_S)


@contextmanager
def ranks(count: int) -> Iterator[list[Rank]]:
    """Processes on devices 0 to ``count`` - 1; where there are fewer, some share one."""
    made = [Rank(number % torch.cuda.device_count()) for number in range(count)]
    try:
        yield made
    finally:
        for rank in made:
            rank.connection.close()
        for rank in made:
            rank.process.join(10)
            if rank.process.is_alive():
                rank.kill()
