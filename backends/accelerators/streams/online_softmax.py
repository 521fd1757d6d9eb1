"""Attention of some queries over keys and values that come in blocks; everything is float32, or
float64 of such queries.

Running maximum m, sum l and weighted values o of the scores seen so far; a block with scores s, values
v and m' = max(m, max s) changes them to l·e^(m-m') + sum e^(s-m') and o·e^(m-m') + e^(s-m') v.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import torch


class OnlineSoftmax:
    """``q`` [B, Hkv, G, P, D]: queries by head of k and v, and by query head within its group. Of a
    block ``keys_at_once`` keys are scored at a time, so that memory stays bounded."""

    def __init__(self, q: torch.Tensor, scale: float, keys_at_once: int) -> None:
        self._step = keys_at_once
        self._shape = q.shape
        batch, heads, groups, rows, width = q.shape
        wide = q if q.dtype == torch.float64 else q.float()
        self._q = q * scale if wide is q else wide.mul_(scale)
        self._q = self._q.reshape(batch, heads, groups * rows, width)
        self._top = self._q.new_full((batch, heads, groups * rows, 1), float("-inf"))
        self._sum = torch.zeros_like(self._top)
        self._total = torch.zeros_like(self._q)

    def see(self, k: torch.Tensor, v: torch.Tensor, first_row: int | None = None) -> None:
        """Take in keys and values [B, Hkv, c, D].

        ``first_row``: key i is seen by rows from ``first_row + i`` on; None: by all.
        """
        step = self._step
        for start in range(0, k.shape[2], step):
            end = min(start + step, k.shape[2])
            later = None if first_row is None else first_row + start
            keys, values = (each[:, :, start:end].to(self._q.dtype) for each in (k, v))
            self._see(keys, values, later)

    def _see(self, k: torch.Tensor, v: torch.Tensor, first_row: int | None) -> None:
        scores = self._q @ k.transpose(2, 3)
        if first_row is not None:
            hide(scores.view(*self._shape[:4], k.shape[2]), first_row)
        top = torch.maximum(self._top, scores.amax(3, keepdim=True))
        # A row that has seen nothing yet has no maximum to subtract: -inf - -inf is not a number.
        base = top.masked_fill(top == float("-inf"), 0.0)
        keep = (self._top - base).exp_()
        weights = scores.sub_(base).exp_()
        self._sum.mul_(keep).add_(weights.sum(3, keepdim=True))
        self._total.mul_(keep).add_(weights @ v)
        self._top = top

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(attention [B, Hkv, G, P, D], log-sum-exp [B, Hkv, G, P]), not rounded."""
        lse = self._top + self._sum.log()
        return (self._total / self._sum).view(self._shape), lse.view(self._shape[:4])


def hide(scores: torch.Tensor, first_row: int) -> None:
    """Scores [..., P, c] of keys that a row does not see become -inf: it sees key i from row
    ``first_row + i`` on."""
    rows, keys = scores.shape[-2:]
    at = torch.arange(max(rows, keys), device=scores.device)
    scores.masked_fill_(at[None, :keys] + first_row > at[:rows, None], float("-inf"))
