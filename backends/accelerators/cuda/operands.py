"""Alignment of a call's tensors for kernels: addresses that are multiples of 16 bytes."""

from __future__ import annotations

import torch

from mkernel.backends.contracts.memory import ALIGNMENT


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if kernels can write to it, else a new one from which it is filled
    afterwards."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else torch.empty_like(tensor)


def deliver(written: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the caller's tensor, if kernels wrote to another."""
    if written is not out:
        out.copy_(written)
