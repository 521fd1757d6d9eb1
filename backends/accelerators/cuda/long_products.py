"""Complete products of half-precision operands by torch: none of their terms is lost.

cuBLAS 12 and 13 leave the last K mod 64 terms out of some products whose K they split among blocks
(facebookexperimental/triton, pull request 2767). On H100 with torch 2.11 and CUDA 13.0 one of them is
6 x 264 x 12808, 2.5 % off. Which products are affected depends on the version, sizes, dtypes,
layouts and switches of torch, not on the values. So each kind of product that may be split is tried
once, with an A that is zero except for the last terms. A kind that loses terms is computed in two
parts, whole steps of terms and then the rest, which are added in float32 and rounded once.

``hopper`` tries kinds so. ``streams`` on GPUs multiplies every such product in two: a trial would
wait for its result behind waits for peers that have no deadline. Products of e4m3 operands and of
groups are the library's as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from mkernel.plan.two_generation_cache import TwoGenerationCache

STEP = 128
"""Terms of K per step: a multiple of the number that blocks take at a time, so that a split into
whole steps loses nothing."""
_LEAST_TERMS = 512
_MOST_RESULTS = 1 << 21
"""Largest number of results of a product that may be split. Products of more results, or of fewer
than _LEAST_TERMS terms, are assumed never to be split: they have enough tiles for every
multiprocessor."""
_ALIGNED = 16


class Matrix(NamedTuple):
    """The properties of a matrix on which cuBLAS' choice depends, apart from its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_right: TwoGenerationCache[Hashable, bool] = TwoGenerationCache()
"""A flag for each kind of product: True if torch's own product has all terms."""


def mm(a: torch.Tensor, b: torch.Tensor, *dtype: torch.dtype, out: torch.Tensor) -> None:
    """Compute out = a @ b as torch.mm does, rounded once to the dtype of ``out``: the operands' or
    float32."""
    if _has_all_terms(a, b, out, None):
        torch_mm(a, b, out)
    else:
        _in_two(None, a, b, out)


def untried_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Compute :func:`mm` without a trial: in two parts wherever the library may lose terms of
    half-precision operands. In a trial the host waits for the result, and so for everything its
    stream waits for; that wait has no deadline if the stream waits for a peer's word."""
    half = a.dtype in (torch.bfloat16, torch.float16)
    if half and _may_be_split(a, out):
        _in_two(None, a, b, out)
    else:
        torch_mm(a, b, out)


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Compute out = bias + a @ b as torch.addmm does, rounded once. ``out`` has the operands'
    dtype."""
    if _has_all_terms(a, b, out, bias):
        torch_addmm(bias, a, b, out)
    else:
        _in_two(bias, a, b, out)


def torch_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Call the library's product, which may lose terms."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


def torch_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Call the library's product with a bias, which may lose terms; the library uses another kernel
    for it than without a bias."""
    torch.addmm(bias, a, b, out=out)


def may_lose_terms(k: int) -> bool:
    """Return whether a product of ``k`` terms is one of those that are tried."""
    return k % STEP != 0 and k >= _LEAST_TERMS


def proven(device: torch.device, a: Matrix, b: Matrix, out: Matrix) -> bool:
    """Return whether the library's product of such matrices, whose addresses are multiples of 16,
    is known to have all its terms: its kind is never split, or passed the trial under the current
    switches of torch."""
    (m, k), (_, n) = a.shape, b.shape
    if not may_lose_terms(k) or not 0 < m * n <= _MOST_RESULTS:
        return True
    return _right[_kind(device, (a, b, out), (0, 0, 0), None)] is True


def _kind(
    device: torch.device,
    matrices: Sequence[Matrix],
    offsets: Sequence[int],
    bias: tuple[tuple[int, ...], int] | None,
) -> Hashable:
    """Return the key of everything that cuBLAS' choice depends on. ``offsets``: distances of the
    addresses from multiples of 16; ``bias``: the bias's shape and the same distance."""
    switches = torch.backends.cuda.matmul
    return (
        device,
        switches.allow_bf16_reduced_precision_reduction,
        switches.allow_fp16_reduced_precision_reduction,
        bias,
        *matrices,
        *offsets,
    )


def _may_be_split(a: torch.Tensor, out: torch.Tensor) -> bool:
    return may_lose_terms(a.shape[1]) and 0 < out.numel() <= _MOST_RESULTS


def _has_all_terms(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    if not _may_be_split(a, out):
        return True
    each = (a, b, out)
    kind = _kind(
        out.device,
        [Matrix(x.dtype, x.shape, x.stride()) for x in each],
        [x.data_ptr() % _ALIGNED for x in each],
        None if bias is None else (bias.shape, bias.data_ptr() % _ALIGNED),
    )
    known = _right[kind]
    if known is None:
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # the host cannot look now
        known = _tried(*each, bias)
        if known is None:
            return False
        _right[kind] = known
    return known


def _tried(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> bool | None:
    """Return whether a product like this one has its last terms; None if these rows of B cannot
    show it."""
    first = a.shape[1] // STEP * STEP
    ones = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).zero_()
    ones[:, first:] = 1
    found = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    if bias is None:
        torch_mm(ones, b, found)
    else:
        torch_addmm(torch.zeros_like(bias), ones, b, found)
    last = b[first:].float()
    wanted, largest = last.sum(0), last.abs().sum(0)
    right = ((found.float() - wanted).abs() <= 2.0**-6 * wanted.abs() + 2.0**-12 * largest).all()
    tells = largest.isfinite().all() & (wanted.abs() > 2.0**-5 * largest).any()
    told, is_right = torch.stack((tells, right)).tolist()
    return is_right if told else None


def _in_two(bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    first = a.shape[1] // STEP * STEP
    total, rest = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in "ab")
    torch_mm(a[:, :first], b[:first], total)
    torch_mm(a[:, first:], b[first:], rest)
    total += rest
    if bias is not None:
        total += bias
    out.copy_(total)
