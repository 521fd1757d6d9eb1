"""A library's attention of some queries on some keys, and its gradients.

The library is cuDNN, which takes fewer heads of keys than of queries, and any layout whose rows are
packed. torch caches its plans by the strides of q, k and v only, so tensors that accompany q for
the same queries (the result, its gradient) must have the layout of q, gaps between rows included.

Under ``torch.use_deterministic_algorithms`` gradients are those of FlashAttention-2, which then
adds in a fixed order; cuDNN's backward does not promise one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Seen(NamedTuple):
    """The result of some queries on some keys: ``out`` [B, H, R, D] and ``lse`` [B, H, R] of the
    queries from ``first`` on."""

    out: Tensor
    lse: Tensor
    first: int


class Results(NamedTuple):
    """Queries with their results over all keys that they see: ``q``, ``out`` and its gradient
    ``of_out`` [B, H, R, D], in one layout; ``lse``, and its gradient ``of_lse`` or None, [B, H, R]."""

    q: Tensor
    out: Tensor
    of_out: Tensor
    lse: Tensor
    of_lse: Tensor | None

    def heads(self, which: slice) -> Results:
        """Return the results of these heads."""
        return Results(*(None if each is None else each[:, which] for each in self))  # type: ignore[arg-type]

    def rows(self, first: int) -> Results:
        """Return the results of the queries from ``first`` on."""
        if not first:
            return self
        return Results(*(None if each is None else each[:, :, first:] for each in self))  # type: ignore[arg-type]


class Gradients(NamedTuple):
    """The contribution of some keys to the gradient of queries, and of these queries to those of
    keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


def on_stream(device: int, stream: int) -> AbstractContextManager[object]:
    """Return a context in which library calls are queued on that stream. Memory that they allocate
    there is reused by calls on the same stream only, so those must be queued after every read of
    it."""
    one = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(one)


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, causal: bool, scale: float) -> Seen:
    """Attend the queries from ``first`` on to keys and values, all of which each query sees, or in
    order if ``causal``. k and v may have fewer heads."""
    seeing = q[:, :, first:] if first else q
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        seeing, k, v, None, True, 0.0, causal, False, scale=scale
    )
    # [B, H, R] or [B, H, R, 1], by the version of torch.
    return Seen(out, lse.reshape(seeing.shape[:3]), first)


def gradients(
    given: Results, k: Tensor, v: Tensor, first: int, causal: bool, scale: float
) -> Gradients:
    """Compute the gradients of :func:`attend`, given the results over all keys.

    Each is rounded to the dtype of ``q``. The library knows no gradient of the log-sum-exp. That
    gradient's contribution to the scores, p·dlse, comes from a second call, with values of 0 and
    results whose products with their gradients are -dlse; it is added to the first call's, and
    rounded once more.
    """
    given = given.rows(first)
    found = _gradients(given, k, v, causal, scale)
    if given.of_lse is None:
        return found
    ones, sums = (_zeros_lying_like(given.q) for _ in range(2))
    ones[..., :2] = 1
    sums[..., 0] = -given.of_lse
    sums[..., 1] = -(given.of_lse + sums[..., 0])  # the remainder of the first one's rounding
    more = _gradients(given._replace(out=sums, of_out=ones), k, torch.zeros_like(v), causal, scale)
    return Gradients(found.q + more.q, found.k + more.k, found.v)


def _gradients(given: Results, k: Tensor, v: Tensor, causal: bool, scale: float) -> Gradients:
    q, lse = given.q, given.lse.contiguous()
    none = torch.empty((), dtype=torch.int64, device=q.device)  # generator state; dropout is 0
    sizes = q.shape[2], k.shape[2]
    if torch.are_deterministic_algorithms_enabled():
        found = _aten._scaled_dot_product_flash_attention_backward(
            given.of_out, q, k, v, given.out, lse, None, None, *sizes, 0.0, causal, none, none,
            scale=scale,
        )  # fmt: skip
    else:
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            given.of_out, q, k, v, given.out, lse.view(*lse.shape, *_more_dimensions(q.device)),
            none, none, None, None, None, *sizes, 0.0, causal, scale=scale,
        )  # fmt: skip
    return Gradients(*found)


def _zeros_lying_like(tensor: Tensor) -> Tensor:
    """Return zeros with the same strides, also where torch's zeros_like would remove gaps."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).zero_()


@cache
def _more_dimensions(device: torch.device) -> tuple[int, ...]:
    """Return the extra dimensions of the log-sum-exp of torch's cuDNN attention after [B, H, R],
    which depend on the version of torch."""
    q = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    _, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
    more: int = lse.dim() - 3
    return (1,) * more
