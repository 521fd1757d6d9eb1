"""Memory of several GPUs, each buffer mapped on every one, in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mkernel.backends.accelerators.cuda.memory import bytes_at
from mkernel.settings import load

gpus_of: dict[str, int] = {}
"""How many GPUs a test needs, by the reason for which it may be skipped."""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips where there are fewer GPUs that reach each other."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = f"needs {count} GPU(s) of compute capability 9.0; torch sees {found}"
    gpus_of[reason] = count
    fits = found >= count and all(
        torch.cuda.get_device_capability(i)[0] == 9
        and all(torch.cuda.can_device_access_peer(i, j) for j in range(count) if j != i)
        for i in range(count)
    )
    return pytest.mark.skipif(not fits, reason=reason)


def takes_ranks(count: int) -> pytest.MarkDecorator:
    """Skips where the GPUs take fewer ranks: one each, or as the setting ``ranks_per_device`` says."""
    return needs_gpus(-(-count // load().ranks_per_device))


_RANKS = {count: pytest.param(count, marks=takes_ranks(count)) for count in (2, 4)}
worlds = pytest.mark.parametrize("world", [1, *_RANKS.values()])
several = pytest.mark.parametrize("world", [*_RANKS.values()])
pair = pytest.mark.parametrize("world", [_RANKS[2]])


class Buffer:
    """Zeroed memory of GPU ``owner`` that all of ``devices`` can address."""

    def __init__(self, owner: int, devices: Sequence[int], nbytes: int) -> None:
        from mkernel.backends.accelerators.cuda import _cuda

        self.owner, self.nbytes = owner, nbytes
        self._own = _cuda.DeviceMemory.create(owner, nbytes)
        self._mapped: dict[int, Any] = {owner: self._own}
        for device in devices:
            if device != owner:
                fd = self._own.export_fd()
                try:
                    self._mapped[device] = _cuda.DeviceMemory.attach(
                        device, fd, self._own.mapped_bytes
                    )
                finally:
                    os.close(fd)

    def address(self, device: int) -> int:
        """For kernels of ``device``."""
        return int(self._mapped[device].address)

    def bytes(self) -> torch.Tensor:
        """All of it, as the owner sees it."""
        return bytes_at(self.address(self.owner), self.nbytes, self._own)


def random_bytes(nbytes: int, device: int | str, seed: int) -> torch.Tensor:
    """Fresh for each seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, device=device, dtype=torch.uint8)
