"""Attention of some queries on some keys, and its gradients, for tensors that torch has no kernel for.

Everything is float32 (float64 for float64 tensors). One block of keys is scored at a time, so that
memory stays bounded.

Forward: running maximum m, sum l and weighted values o of the scores seen so far; a block with scores
s, values v and m' = max(m, max s) changes them to l·e^(m-m') + sum e^(s-m') and
o·e^(m-m') + e^(s-m') v.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

Backward, with scores s = scale·q kᵀ, their log-sum-exp, p = e^(s - lse) and delta = sum(dO·O) a
query, dS = p·(dO vᵀ - delta), dQ = scale·dS k, dK = scale·dSᵀ q, dV = pᵀ dO.
Source: Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_SCORES = 1 << 23
"""Number of scores held at once."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of q [B, Hq, R, D] on k and v [B, Hkv, C, D]. Causal: query i sees keys 0
    to i, and R = C.

    Returns:
        out [B, Hq, R, D], zeros where all scores are -inf; the largest score of each query [B, Hq,
        R]; and the sum of e^(score - largest) [B, Hq, R].
    """
    heads, rows = q.shape[1:3]
    queries = _rows_of_groups(q, k.shape[1]) * scale
    top = queries.new_full((*queries.shape[:3], 1), float("-inf"))
    total, summed = torch.zeros_like(queries), torch.zeros_like(top)
    for keys, values, first in _blocks(queries, k, v):
        scores = _scores(queries, keys, rows, first if causal else None)
        higher = torch.maximum(top, scores.amax(3, keepdim=True))
        # A row that has seen nothing yet has no maximum to subtract: -inf - -inf is NaN.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        keep = (top - base).exp_()
        weights = scores.sub_(base).exp_()
        summed.mul_(keep).add_(weights.sum(3, keepdim=True))
        total.mul_(keep).add_(weights @ values)
        top = higher
    each = (q.shape[0], heads, rows)
    total /= summed.masked_fill(summed == 0, 1.0)
    return total.view(*each, -1), top.view(each), summed.view(each)


def gradients(
    of_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of these keys to the gradient of q, and of these queries to those of
    k and v, not rounded.

    ``out`` and its gradient [B, Hq, R, D] and ``lse`` [B, Hq, R] cover all keys that the queries
    see; the other arguments are those of :func:`attend`.
    """
    kv_heads, rows = k.shape[1], q.shape[2]
    queries, of_outs, outs = (_rows_of_groups(each, kv_heads) for each in (q, of_out, out))
    queries = queries * scale
    sums = _rows_of_groups(lse[..., None], kv_heads)
    delta = (of_outs * outs).sum(3, keepdim=True)
    of_q = torch.zeros_like(queries)
    of_k, of_v = (torch.zeros_like(each, dtype=queries.dtype) for each in (k, v))
    for keys, values, first in _blocks(queries, k, v):
        part = slice(first, first + keys.shape[2])
        scores = _scores(queries, keys, rows, first if causal else None)
        weights = scores.sub_(sums).exp_()
        of_v[:, :, part] = weights.transpose(2, 3) @ of_outs
        of_scores = (of_outs @ values.transpose(2, 3)).sub_(delta).mul_(weights)
        of_k[:, :, part] = of_scores.transpose(2, 3) @ queries
        of_q += of_scores @ keys
    return (of_q * scale).view(q.shape), of_k, of_v


def _rows_of_groups(each: Tensor, kv_heads: int) -> Tensor:
    """Return [B, Hkv, G·R, ...]: the queries of all heads that share keys, as rows, in at least
    float32."""
    wide = each if each.dtype == torch.float64 else each.float()
    return wide.reshape(each.shape[0], kv_heads, -1, each.shape[-1])


def _blocks(queries: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield some keys, their values, and the number of the first one, in the queries' dtype."""
    step = max(1, _SCORES // queries[..., 0].numel())
    for first in range(0, k.shape[2], step):
        keys, values = (each[:, :, first : first + step].to(queries.dtype) for each in (k, v))
        yield keys, values, first


def _scores(queries: Tensor, keys: Tensor, rows: int, first: int | None) -> Tensor:
    """Return scores [B, Hkv, G·R, c]; with ``first``, -inf where key ``first`` + i comes after the
    row."""
    scores = queries @ keys.transpose(2, 3)
    if first is not None:
        at = torch.arange(rows, device=scores.device)[:, None]
        later = torch.arange(first, first + keys.shape[2], device=scores.device) > at
        batch, heads, _, width = scores.shape
        scores.view(batch, heads, -1, rows, width).masked_fill_(later, float("-inf"))
    return scores
