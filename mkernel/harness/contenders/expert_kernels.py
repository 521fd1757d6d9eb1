"""The Triton kernels of :mod:`.expert_rows`; imported where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_jit: Callable[[Callable[..., None]], Any] = triton.jit

COLUMNS = 1024
"""Columns of one program: 16 bytes a thread of four warps, of 16-bit elements."""
ROWS = 8
"""Rows that one program copies. With one row each, programs end before enough loads are under way: that
took 1.4 to 1.6 times a copy of as many bytes on an H200."""


@_jit
def _copy(
    tokens: tl.tensor, places: tl.tensor, count: tl.tensor, out: tl.tensor, columns: tl.tensor,
    top_k: tl.constexpr, height: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * height
    most = tl.load(count)
    if first < most:
        row = first + tl.arange(0, height)
        at = tl.program_id(1) * block + tl.arange(0, block)
        token = tl.load(places + row, mask=row < most, other=0).to(tl.int64) // top_k
        kept = (row < most)[:, None] & (at < columns)[None, :]
        part = tl.load(tokens + token[:, None] * columns + at[None, :], mask=kept)
        tl.store(out + row[:, None] * columns + at[None, :], part, mask=kept)


@_jit
def _gate(
    both: tl.tensor, count: tl.tensor, out: tl.tensor, columns: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count):
        at = tl.program_id(1) * block + tl.arange(0, block)
        first = both + row * 2 * columns + at
        gate = tl.load(first, mask=at < columns).to(tl.float32)
        up = tl.load(first + columns, mask=at < columns).to(tl.float32)
        done = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + row * columns + at, done, mask=at < columns)


@_jit
def _add(
    rows: tl.tensor, weights: tl.tensor, home: tl.tensor, count: tl.tensor, out: tl.tensor,
    held: tl.tensor, columns: tl.tensor, top_k: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * top_k
    at = tl.program_id(1) * block + tl.arange(0, block)
    most = tl.minimum(tl.load(count), held)
    total = tl.zeros([block], tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(home + slots + slot).to(tl.int64)
        weight = tl.load(weights + slots + slot).to(tl.float32)
        part = tl.load(rows + row * columns + at, mask=(at < columns) & (row < most), other=0.0)
        total += weight * part.to(tl.float32)
    done = total.to(out.dtype.element_ty)
    tl.store(out + tl.program_id(0).to(tl.int64) * columns + at, done, mask=at < columns)


def copy(
    tokens: torch.Tensor, places: torch.Tensor, count: torch.Tensor, out: torch.Tensor, top_k: int
) -> None:
    """Write the token of each of the first ``count`` places to its row of ``out``."""
    columns = tokens.shape[1]
    grid = (triton.cdiv(len(places), ROWS), triton.cdiv(columns, COLUMNS))
    _copy[grid](
        tokens, places, count, out, columns, top_k=top_k, height=ROWS, block=COLUMNS
    )  # fmt: skip


def gate(both: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """Write the first ``count`` rows of silu(gate) · up."""
    columns = out.shape[1]
    _gate[(len(out), triton.cdiv(columns, COLUMNS))](both, count, out, columns, block=COLUMNS)


def add(
    rows: torch.Tensor,
    weights: torch.Tensor,
    home: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write each token's weighted sum to its row of ``out``."""
    tokens, top_k = weights.shape
    columns = rows.shape[1]
    grid = (tokens, triton.cdiv(columns, COLUMNS))
    _add[grid](
        rows, weights, home, count, out, len(rows), columns, top_k=top_k, block=COLUMNS
    )  # fmt: skip
