"""The bytes that kernels bring to L2 while ranks exchange (``kernels/prefetch.hpp``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.backends.accelerators.hopper.native import native

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.hopper import _hopper


def prefetched_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of ``prefetch`` that a call prefetches, the first ones; 0 where it has none."""
    given = tensors.get("prefetch")
    return 0 if given is None else min(given.nbytes, machine().prefetch.most_bytes)


def prefetch_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, _hopper.Prefetch]:
    """Return the argument by which native code prefetches ``prefetch``; empty where a call has none."""
    nbytes = prefetched_bytes(tensors)
    if nbytes == 0:
        return {}
    return {"prefetch": native().Prefetch(tensors["prefetch"].data_ptr(), nbytes)}
