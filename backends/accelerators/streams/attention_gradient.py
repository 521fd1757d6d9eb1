"""Gradients of attention, block by block of keys and values; everything is float32, or float64 of such.

With scores s = scale·q kᵀ, their log-sum-exp, and p = e^(s - lse): delta = sum(dO·O) - dlse a query,
dS = p·(dO vᵀ - delta), dQ = scale·dS k, dK = scale·dSᵀ q, dV = pᵀ dO. No block needs another one.
Source: Dao et al., "FlashAttention", 2022, with the gradient of the log-sum-exp beside.
"""

from __future__ import annotations

import torch

from mkernel.backends.accelerators.streams.online_softmax import hide


class AttentionGradient:
    """Of some queries. ``q``, ``out`` and its gradient [B, Hkv, G, P, D]: by head of k and v, and by
    query head within its group; ``lse`` and its gradient [B, Hkv, G, P]. Of a block ``keys_at_once``
    keys are scored at a time, so that memory stays bounded."""

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        of_out: torch.Tensor,
        of_lse: torch.Tensor | None,
        *,
        scale: float,
        keys_at_once: int,
    ) -> None:
        self._step, self._scale, self._shape, self._sums = keys_at_once, scale, q.shape, lse.dtype
        self._q = self._flat(q) * scale
        self._of_out = self._flat(of_out)
        self._lse = self._flat(lse[..., None])
        self._delta = (self._of_out * self._flat(out)).sum(3, keepdim=True)
        if of_lse is not None:
            self._delta -= self._flat(of_lse[..., None])
        self._of_q = torch.zeros_like(self._q)

    def _flat(self, queries: torch.Tensor) -> torch.Tensor:
        batch, heads, groups, rows, width = queries.shape
        return queries.to(self._sums).reshape(batch, heads, groups * rows, width)

    def see(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        of_k: torch.Tensor,
        of_v: torch.Tensor,
        first_row: int | None = None,
    ) -> None:
        """Take in keys and values [B, Hkv, c, D], and add to their gradients, of lse's dtype.

        ``first_row``: key i is seen by rows from ``first_row + i`` on; None: by all.
        """
        for start in range(0, k.shape[2], self._step):
            part = slice(start, start + self._step)
            later = None if first_row is None else first_row + start
            keys, values = k[:, :, part].to(self._sums), v[:, :, part].to(self._sums)
            self._see(keys, values, of_k[:, :, part], of_v[:, :, part], later)

    def _see(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        of_k: torch.Tensor,
        of_v: torch.Tensor,
        first_row: int | None,
    ) -> None:
        scores = self._q @ k.transpose(2, 3)
        if first_row is not None:
            hide(scores.view(*self._shape[:4], k.shape[2]), first_row)
        weights = scores.sub_(self._lse).exp_()
        of_v += weights.transpose(2, 3) @ self._of_out
        of_scores = (self._of_out @ v.transpose(2, 3)).sub_(self._delta).mul_(weights)
        of_k += of_scores.transpose(2, 3) @ self._q
        self._of_q += of_scores @ k

    def result(self) -> torch.Tensor:
        """The gradient of q [B, Hkv, G, P, D], not rounded."""
        return (self._of_q * self._scale).view(self._shape)
