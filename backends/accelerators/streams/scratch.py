"""Buffers of calls, reused from one call to the next.

On a CPU every fresh page costs a fault: 12 MB fresh took 5.8 ms to fill on the machine of
``bench/results/streams.json``, and 0.2 ms when reused. Devices with streams use torch's caching
allocator, which also knows what other streams still use.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch


class Scratch:
    """One worker thread's buffers. Calls run one after another, so each name has one user at a
    time."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, where: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised, contiguous buffer, valid until the call ends. It must not reach
        users."""
        if where.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=where)
        nbytes = prod(shape) * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._kept[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(dtype).view(tuple(shape))

    def drop(self) -> None:
        """Release all buffers, because messages of a call that failed may still write to them."""
        self._kept.clear()
