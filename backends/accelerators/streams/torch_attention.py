"""Attention of some queries on some keys, and its gradients, by the kernel that torch's scaled dot
product attention uses on a CPU.

The kernel scores blocks in caches and returns the log-sum-exp of the scores, so that results on
parts of the keys can be merged, and memory does not grow with queries times keys. It computes in
float32 (float64 for float64 tensors): nothing is rounded before parts are merged. Inputs for which
torch does not choose that kernel (``torch.nn.attention.sdpa_kernel`` is respected), and everything
on other devices, use the explicit implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from mkernel.backends.accelerators.streams import explicit_attention

_aten = torch.ops.aten
_FLASH = int(SDPBackend.FLASH_ATTENTION.value)
_PRECISE = 128.0
"""Largest log-sum-exp that is precise enough to weight a part by: its rounding error is the
weight's relative error."""


class Seen(NamedTuple):
    """The result of queries on some keys: ``out`` [B, Hq, R, D], normalised, and its weight e^top ·
    sum [B, Hq, R]; ``sum`` None: 1."""

    out: Tensor
    top: Tensor
    sum: Tensor | None = None


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which parts are attended to."""
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Seen:
    """Compute attention of q [B, Hq, R, D] on k and v [B, Hkv, C, D], with any strides, in the
    dtype that :func:`compute_dtype` returns; ``scale`` is positive. Causal: query i sees keys 0 to
    i, and R = C."""
    if _taken_by_kernel(q, k, v, causal, scale):
        out, lse = _forward(q, k, v, causal, scale)
        if _sound(q, k, lse):
            return Seen(out, lse)
    return Seen(*explicit_attention.attend(q, k, v, causal=causal, scale=scale))


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
    k and v.

    ``out`` and its gradient, of q's shape and dtype, and ``lse`` [B, Hq, R] cover all keys that the
    queries see; the other arguments are those of :func:`attend`.
    """
    if _taken_by_kernel(q, k, v, causal, scale):
        return _backward(q, k, v, (out, of_out, lse), causal, scale)
    return explicit_attention.gradients(of_out, q, k, v, out, lse, causal=causal, scale=scale)


def _taken_by_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> bool:
    """Return whether torch chooses the kernel for such tensors; otherwise it would materialise the
    scores."""
    if q.device.type != "cpu":
        return False
    asked = q[:, : k.shape[1]]
    return torch._fused_sdp_choice(asked, k, v, None, 0.0, causal, scale=scale) == _FLASH


def _sound(q: Tensor, k: Tensor, lse: Tensor) -> bool:
    """Return whether the kernel's result equals the explicit implementation's. The latter keeps the
    maximum and the sum of scores apart, and if all scores of a query are NaN its result is NaN, not
    zeros."""
    if not bool(torch.isfinite(q.sum() + k.sum())):
        return False
    return bool(lse.abs().amax() <= _PRECISE)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Call the kernel, which takes equally many heads of keys and of queries, once or once per
    batch entry."""
    if q.shape[1] == k.shape[1]:
        return _kernel(q, k, v, causal, scale)
    made = [_kernel(*_batch(at, q, k, v), causal, scale) for at in range(len(q))]
    out, lse = (torch.stack(each).flatten(1, 2) for each in zip(*made, strict=True))
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_queries: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the kernel's backward. ``of_queries``: out, its gradient and lse."""
    if q.shape[1] == k.shape[1]:
        return _kernel_backward(q, k, v, *of_queries, causal, scale)
    made = []
    for at in range(len(q)):
        out, of_out, lse = (_heads(each[at], k.shape[1]) for each in of_queries)
        made.append(_kernel_backward(*_batch(at, q, k, v), out, of_out, lse, causal, scale))
    of_q, of_k, of_v = (torch.stack(each) for each in zip(*made, strict=True))
    return of_q.flatten(1, 2), of_k.sum(2), of_v.sum(2)


def _batch(at: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of one batch entry in which its heads of keys are a batch [Hkv, G, ...]; in each
    of these, all heads have the same keys."""
    queries, (kv_heads, groups) = q[at], (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = (each[at][:, None].expand(-1, groups, -1, -1) for each in (k, v))
    return _heads(queries, kv_heads), keys, values


def _heads(queries: Tensor, kv_heads: int) -> Tensor:
    return queries.view(kv_heads, -1, *queries.shape[1:])


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _kernel_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    of_out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = (
        _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    )
    return found
