"""Activations of products, which dispatch+GEMM applies to its sums before they are rounded."""

from __future__ import annotations

import torch

from mkernel.plan.model import Activation


def activate(activation: Activation, sums: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out [R, I] = silu(gate) * up from ``sums`` [R, 2I], whose first half of the columns
    is the gate; rounded once."""
    assert activation == "silu_and_mul"
    gate, up = sums.chunk(2, dim=1)
    out.copy_(torch.nn.functional.silu(gate).mul_(up))
