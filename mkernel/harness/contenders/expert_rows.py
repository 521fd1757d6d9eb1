"""Rows of experts at copy speed: copies of tokens, gates times ups, and weighted sums by token.

On a GPU each is one Triton kernel that reads a row once and writes a row once, as users of a
grouped product write them. Elsewhere torch does the same.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn.functional import silu


def copied(
    tokens: torch.Tensor, places: torch.Tensor, count: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return a row for each of ``places``: a copy of the token ``place // top_k``.

    ``count`` [1]: how many rows are wanted. On a device the others are left as they are.
    """
    if tokens.dtype == torch.float8_e4m3fn:
        return copied(tokens.view(torch.int16), places, count, top_k).view(tokens.dtype)
    kernels = _kernels(tokens)
    if kernels is None:
        return tokens[places // top_k]
    rows = tokens.new_empty(len(places), tokens.shape[1])
    kernels.copy(tokens.contiguous(), places, count, rows, top_k)
    return rows


def summed(
    rows: torch.Tensor, weights: torch.Tensor, home: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Return each token's weighted sum of its rows, added in float32 and rounded once.

    ``weights`` [tokens, k]. ``home`` [tokens · k]: the row of each slot. Slots whose row is not among
    the first ``count`` [1], or is no row at all, add nothing.
    """
    tokens, top_k = weights.shape
    kernels = _kernels(rows)
    if kernels is not None:
        out = rows.new_empty(tokens, rows.shape[1])
        kernels.add(rows.contiguous(), weights.contiguous(), home, count, out)
        return out
    here = home < count.clamp(max=len(rows))
    terms = rows.new_zeros(len(home), rows.shape[1], dtype=torch.float32)
    terms[here] = rows[home[here].long()].float() * weights.flatten()[here, None].float()
    return terms.view(tokens, top_k, -1).sum(1).to(rows.dtype)


def gated(both: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of the first ``count`` [1] rows, whose columns are the gates', then the
    ups'. On a device it is rounded once, and the other rows are left as they are."""
    kernels = _kernels(both)
    if kernels is None:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up
    out = both.new_empty(len(both), both.shape[1] // 2)
    kernels.gate(both.contiguous(), count, out)
    return out


def _kernels(rows: torch.Tensor) -> ModuleType | None:
    if rows.device.type == "cpu":
        return None
    from mkernel.harness.contenders import expert_kernels

    return expert_kernels
