"""Derivatives of the MoE ops on an accelerator that has no calls of them: composed of its dispatch and
combines, whose handle they take, and of torch's grouped product.

Gradients of rows travel as tokens do, and gradients of tokens come home as results do, with weights of
1. Weights are appended to the rows, as bytes. A row's place (token, slot) follows from the ids with
which a routing begins. A gradient of a weight comes home in the column of its slot, as the sum of two
bfloat16 numbers: exact to 2^-17.

The products of rows are rounded to bfloat16, where the calls of ``streams`` keep float32; gradients of
tokens travel as results of GEMM+combine do. Sums are float32, in an order that plan and shapes fix, so
the same call gives the same bits. Nothing here waits for the device or reads rows that are nobody's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mkernel.backends.contracts.memory import aligned
from mkernel.ops.registration import ops
from mkernel.world.world import World

_PARTS = frozenset(("moe_dispatch", "moe_combine", "moe_gemm_combine"))
_LEAST_TORCH = "2.9"
"""The first torch whose grouped product of groups without rows is zero; before, it hangs."""
_GROUPS = 1024
"""Torch multiplies fewer groups than that."""


def composes(world: World, op: str, counts: Tensor, *operands: Tensor) -> bool:
    """Return whether a call of ``op`` is composed: the accelerator that has the handles lacks the op
    but has its parts, the world has one node, and torch's grouped product takes the operands: bfloat16,
    in rows of a multiple of 16 bytes. Otherwise a companion runs the call, or none does. All ranks find
    the same."""
    claims = world.engine("moe_dispatch_gemm").claims
    return (
        op not in claims.ops
        and world.identity.nodes == 1
        and _PARTS.issubset(claims.ops)
        and claims.routing_of_ids
        and claims.takes_routing(world.identity.nodes)
        and counts.numel() < _GROUPS
        and torch.__version__ >= _LEAST_TORCH
        and all(each.dtype == torch.bfloat16 and each.shape[-1] % 8 == 0 for each in operands)
    )


def dispatch(
    world: World,
    of_outputs: Tensor,
    x: Tensor,
    w: Tensor,
    handle: tuple[Tensor, Tensor],
    top_k: int,
    chunk: int | None,
    invariant: str | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, which are such results if the dispatch was ``invariant``, and of w.
    ``chunk``: of the dispatch."""
    rows = _sent(world, x, handle, top_k, len(of_outputs), chunk)
    ones = torch.ones((len(x), top_k), device=x.device)
    of_x = ops.moe_gemm_combine(
        of_outputs, w.transpose(1, 2), *handle, ones, invariant=invariant, group=world.name
    )
    return of_x, _of_weights(rows, of_outputs, w, _ends(handle[0], len(rows)))


def combine(
    world: World, of_out: Tensor, y: Tensor, handle: tuple[Tensor, Tensor], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weights."""
    rows = _weighted(world, of_out, handle, weights, len(y))
    of_weights = _home(world, rows, y, handle, weights)
    return torch.mul(rows.values, rows.weights, out=torch.empty_like(y)), of_weights


def gemm_combine(
    world: World,
    of_out: Tensor,
    h: Tensor,
    w2: Tensor,
    handle: tuple[Tensor, Tensor],
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, w2 and of the weights."""
    rows, ends = _weighted(world, of_out, handle, weights, len(h)), _ends(handle[0], len(h))
    product = torch.empty_like(h)
    if len(h):
        product = torch._grouped_mm(_packed(rows.values), aligned(w2.transpose(1, 2)), offs=ends)
    of_weights = _home(world, rows._replace(values=product), h, handle, weights)
    weighted = torch.mul(h, rows.weights, out=torch.empty_like(h))
    of_w2 = _of_weights(weighted, rows.values, w2, ends)
    nobodys = torch.arange(len(h), device=h.device) >= ends[-1]
    of_h = product.mul_(rows.weights).masked_fill_(nobodys[:, None], 0)
    return of_h, of_w2, of_weights


class _Rows(NamedTuple):
    """The rows of this rank's experts: ``values`` [R, H], float32 ``weights`` and ``slots`` [R, 1]."""

    values: Tensor
    weights: Tensor
    slots: Tensor


def _sent(
    world: World,
    x: Tensor,
    handle: tuple[Tensor, Tensor],
    top_k: int,
    count: int,
    chunk: int | None = None,
) -> Tensor:
    """Return the ``count`` rows of tokens where a handle's dispatch sent its tokens."""
    counts, routing = handle
    # In a replayed backward's memory the accelerator does not know a dispatch of its own again.
    known = world.engine("moe_dispatch_gemm").accelerator.dispatched_rows(routing)
    rows, *_ = ops.moe_dispatch(
        x, routing.new_empty((len(x), top_k)), None, counts, routing,
        num_experts=counts.numel() * world.size, capacity=count if known is None else None,
        chunk=chunk, group=world.name,
    )  # fmt: skip
    made: Tensor = rows
    return made


def _weighted(
    world: World, x: Tensor, handle: tuple[Tensor, Tensor], weights: Tensor, count: int
) -> _Rows:
    """Return the ``count`` rows of tokens, with their weights [T, k]."""
    (counts, routing), (tokens, top_k) = handle, weights.shape
    padded = torch.nn.functional.pad(weights.float(), (0, -top_k % 4))
    rows = _sent(world, torch.cat([x, padded.view(x.dtype)], 1), handle, top_k, count)
    ids = routing[: world.size * tokens * top_k]
    first, own = world.rank * counts.numel(), counts.numel()
    # A stable sort leaves the places of an expert in the order of its rows; those of others come last.
    ordered = torch.where((ids >= first) & (ids < first + own), ids, world.size * own)
    slots = ordered.sort(stable=True).indices % top_k
    slots = torch.nn.functional.pad(slots, (0, max(0, count - len(slots))))[:count, None]
    width = x.shape[1]
    there = rows[:, width:].contiguous().view(torch.float32).gather(1, slots)
    return _Rows(rows[:, :width], there, slots)


def _home(
    world: World, rows: _Rows, others: Tensor, handle: tuple[Tensor, Tensor], weights: Tensor
) -> Tensor:
    """Return the products of rows with ``others`` [R, H] at their places, [T, k] in the dtype of the
    weights; 0 where there is no row."""
    products = (rows.values * others).sum(1, dtype=torch.float32, keepdim=True)
    high = products.bfloat16()
    top_k = weights.shape[1]
    columns = torch.arange(top_k + -top_k % 4, device=products.device)
    here = rows.slots == columns
    parts = [torch.where(here, each, 0) for each in (high, (products - high).bfloat16())]
    ones = torch.ones(weights.shape, device=products.device)
    home = ops.moe_combine(torch.cat(parts, 1), *handle, ones, group=world.name).float()
    found: Tensor = home[:, :top_k] + home[:, len(columns) :][:, :top_k]
    return found.to(weights.dtype)


def _ends(counts: Tensor, rows: int) -> Tensor:
    """Return where the rows of each expert end, within the rows also where a dispatch was refused."""
    return counts.cumsum(0).clamp(max=rows).int()


def _of_weights(a: Tensor, b: Tensor, like: Tensor, ends: Tensor) -> Tensor:
    """Return a[r]^T b[r], added over the rows of each expert, as ``like`` [E/W, K, N] lies. Rows are
    the outer dimension of both operands, so an expert may have any number of them."""
    if not len(a):
        return torch.zeros_like(like)
    a, b = _packed(a), _packed(b)
    if like.is_contiguous():
        return torch._grouped_mm(a.t(), b, offs=ends)
    return torch._grouped_mm(b.t(), a, offs=ends).transpose(1, 2)


def _packed(rows: Tensor) -> Tensor:
    """Return rows, aligned; a single one is copied, since its stride may be any."""
    return aligned(rows) if len(rows) > 1 else rows.new_empty(rows.shape).copy_(rows)
