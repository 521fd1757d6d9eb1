"""A call's tensors where kernels can address them: at multiples of 16 bytes."""

from __future__ import annotations

import torch

ALIGNMENT = 16


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if kernels can read it, else a copy that lies so, without gaps."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if kernels can write to it, else one to copy from when they have written it."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else torch.empty_like(tensor)


def deliver(written: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the caller's tensor, where kernels wrote to another."""
    if written is not out:
        out.copy_(written)
