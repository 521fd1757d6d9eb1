"""Derivatives of the GEMM ops, by which torch differentiates ``torch.ops.mkernel``.

With W ranks, a^T the transpose of a, AG the gathering of rows and RS the sum over ranks whose rows are
scattered, 1 a row of ones:

    C = AG(a) @ b + bias    da = RS(dC @ b^T)      db = AG(a)^T @ dC      dbias = 1 @ dC
    C = RS(a @ b) + bias    da = AG(dC) @ b^T      db = a^T @ AG(dC)      dbias = 1 @ AG(dC)
    C = AR(a @ b) + bias    da = dC @ b^T          db = a^T @ dC          dbias = 1 @ dC

With a norm of C + residual (``backends/contracts/norm.py``) dC, which is dResidual too, is the norm's.

AllGather+GEMM and GEMM+ReduceScatter are each other's backward. With the first two every rank's loss is
its own, and the gradients are those of the sum of all losses; the bias of the second is one tensor that
every rank holds, and so is its gradient. C of GEMM+AllReduce is one tensor that every rank holds: so is
its gradient, the same on every rank.

Where results are invariant, gradients of a are so too, by calls of the same kind; those of b are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mkernel.backends.contracts.norm import row_mean
from mkernel.ops.around import as_rows, turned
from mkernel.ops.registration import ops
from mkernel.plan.invariance import resolved
from mkernel.world.lifecycle import current

_FEWEST_COLUMNS = 8
"""Columns of a product that is thrown away: kernels take no fewer than 16 bytes of a row."""


def _gathered(a: Tensor, b: Tensor, dim: int, options: dict[str, Any]) -> Tensor:
    """Compute AG(a) alone: what AllGather+GEMM gathers, with as few columns of b as it takes."""
    some, plain = b[:, :_FEWEST_COLUMNS], {**options, "invariant": "off"}
    gathered: Tensor = ops.all_gather_rows(a, some, gather_dim=dim, **plain)
    return gathered


def of_matrix(a: Tensor, of_c: Tensor, b: Tensor) -> Tensor:
    """Compute a^T @ dC in the layout of b: autograd copies a parameter's gradient into that layout."""
    if b.stride(0) < b.stride(1):
        return (of_c.t() @ a).t()
    return a.t() @ of_c


def _keep(ctx: Any, keywords: Any, dim: str) -> None:
    ctx.options = {name: keywords[name] for name in ("chunk", "invariant", "group")}
    ctx.dim = keywords[dim]


def _keep_promise(ctx: Any, keywords: Any) -> None:
    """Keep whether results are invariant."""
    settings = current(keywords["group"]).settings
    ctx.promised = resolved(keywords["invariant"], settings) is not None


def own_product(a: Tensor, b: Tensor, promised: bool) -> Tensor:
    """Compute a @ b on this rank alone, with invariant results if these are promised."""
    if not promised:
        return a @ b
    made: Tensor = torch.ops.mkernel.invariant_mm(a, b)
    return made


def _needs(ctx: Any) -> tuple[bool, bool, bool]:
    """Return whether a, b, bias need gradients. Torch says nothing of a bias that was left out."""
    a, b, *bias = ctx.needs_input_grad
    return a, b, any(bias)


def _given(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of those arguments that torch was given."""
    return gradients[: len(ctx.needs_input_grad)]


def _of_bias(of_c: Tensor, bias_dtype: torch.dtype) -> Tensor:
    return of_c.sum(tuple(range(of_c.dim() - 1))).to(bias_dtype)


# ---- AllGather+GEMM ------------------------------------------------------------------------------


def save_gather(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep b, and a, or the gathered A where the call returned it."""
    ctx.set_materialize_grads(False)  # zeros for the gathered A would be multiplied and sent
    a, b = inputs[:2]
    _keep(ctx, keyword_only_inputs, "gather_dim")
    if isinstance(output, Tensor):
        ctx.save_for_backward(a, None, b)
    else:
        ctx.save_for_backward(None, output[1], b)


def gather_backward(ctx: Any, of_c: Tensor | None, of_gathered: Tensor | None = None) -> Any:
    """Compute the gradients of AllGather+GEMM with one B."""
    a, kept, b = ctx.saved_tensors
    of_a, (of_b,), (of_bias,) = _of_gather(ctx, a, [b], kept, [of_c], of_gathered, *_needs(ctx))
    return _given(ctx, of_a, of_b, of_bias)


def save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep b."""
    _keep(ctx, keyword_only_inputs, "gather_dim")
    ctx.save_for_backward(inputs[1])


def rows_backward(ctx: Any, of_gathered: Tensor) -> Any:
    """Differentiate AG(a) alone; nothing depends on b."""
    (b,) = ctx.saved_tensors
    needs_a = ctx.needs_input_grad[0]
    return _of_gather(ctx, None, [b], None, [None], of_gathered, needs_a, False, False)[0], None


def save_gather_many(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    """Keep all of b, and a; the gathered A in its place where the call asks for that."""
    ctx.set_materialize_grads(False)
    a, b, _ = inputs
    _keep(ctx, keyword_only_inputs, "gather_dim")
    kept = (None, output[1]) if keyword_only_inputs["save_gathered"] else (a, None)
    ctx.save_for_backward(*kept, *b)


def gather_many_backward(ctx: Any, of_c: Sequence[Tensor | None], of_gathered: Any) -> Any:
    """Compute the gradients of AllGather+GEMM with several B."""
    a, kept, *b = ctx.saved_tensors
    needs_a, needs_b, needs_bias = ctx.needs_input_grad
    some = any(needs_bias)
    of_a, of_b, of_bias = _of_gather(
        ctx, a, b, kept, of_c, of_gathered, needs_a, any(needs_b), some
    )
    return of_a, of_b, of_bias if needs_bias else []


def _of_gather(
    ctx: Any,
    a: Tensor | None,
    b: Sequence[Tensor],
    kept: Tensor | None,
    of_c: Sequence[Tensor | None],
    of_gathered: Tensor | None,
    needs_a: bool,
    needs_b: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Compute the gradients of a, of each b, of each bias. ``kept``: the gathered A; a is needed where
    that is not there."""
    dim, nothing, dtype = ctx.dim, [None] * len(b), b[0].dtype
    given = [
        (None if each is None else turned(each.to(dtype), dim), y)
        for each, y in zip(of_c, b, strict=True)
    ]
    of_a: Tensor | None = None
    of_b: list[Tensor | None] = [*nothing]
    of_bias: list[Tensor | None] = [*nothing]
    if needs_a:
        # One sum over ranks of them all: dC @ b^T, and A's own gradient.
        parts = [(each, y.t()) for each, y in given if each is not None]
        if of_gathered is not None:
            one = torch.eye(len(b[0]), dtype=dtype, device=of_gathered.device)
            parts.append((of_gathered.to(dtype), one))
        if len(parts) > 1:
            left = torch.cat([each for each, _ in parts], dim=-1)
            right = torch.cat([each for _, each in parts])
            parts = [(left, right)]
        if parts:
            of_a = ops.gemm_reduce_scatter(*parts[0], scatter_dim=dim, **ctx.options)
    if needs_b and any(each is not None for each, _ in given):
        if kept is None:
            assert a is not None
            kept = _gathered(a, b[0], dim, ctx.options)
        rows = as_rows(kept, dim)
        of_b = [
            None if each is None else of_matrix(rows, as_rows(each, dim), y) for each, y in given
        ]
    if needs_bias:
        of_bias = [None if each is None else _of_bias(each, dtype) for each, _ in given]
    return of_a, of_b, of_bias


# ---- the reductions ------------------------------------------------------------------------------


def save_scatter(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep a and b."""
    _keep(ctx, keyword_only_inputs, "scatter_dim")
    ctx.save_for_backward(*inputs[:2])


def scatter_backward(ctx: Any, of_c: Tensor) -> Any:
    """Compute the gradients of GEMM+ReduceScatter: dC is gathered once for all gradients."""
    a, b = ctx.saved_tensors
    dim, options = ctx.dim, ctx.options
    needs_a, needs_b, needs_bias = _needs(ctx)
    of_c, other = turned(of_c.to(a.dtype), dim), b.t()
    of_a = whole = None
    if not needs_a:
        whole = _gathered(of_c, other, dim, options)
    elif needs_b or needs_bias:
        of_a, whole = ops.all_gather_gemm_gathered(of_c, other, gather_dim=dim, **options)
    else:
        of_a = ops.all_gather_gemm(of_c, other, gather_dim=dim, **options)
    of_b = of_bias = None
    if needs_b and whole is not None:
        of_b = of_matrix(as_rows(a, dim), as_rows(whole, dim), b)
    if needs_bias and whole is not None:
        of_bias = _of_bias(whole, a.dtype)
    return _given(ctx, of_a, of_b, of_bias)


def save_reduce(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep a and b."""
    _keep_promise(ctx, keyword_only_inputs)
    ctx.save_for_backward(*inputs[:2])


def reduce_backward(ctx: Any, of_c: Tensor) -> Any:
    """Compute the gradients of GEMM+AllReduce: nothing travels."""
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias = _needs(ctx)
    of_c = of_c.to(a.dtype)
    return _given(
        ctx,
        own_product(of_c, b.t(), ctx.promised) if needs_a else None,
        of_matrix(as_rows(a, 0), as_rows(of_c, 0), b) if needs_b else None,
        _of_bias(of_c, a.dtype) if needs_bias else None,
    )


def save_norm(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep a, b and the weight, and the new residual, whose rows were normalised."""
    ctx.set_materialize_grads(False)
    a, b, weight, *given = inputs
    _keep_promise(ctx, keyword_only_inputs)
    ctx.eps = keyword_only_inputs["eps"]
    ctx.residual = None if not given or given[0] is None else given[0].dtype
    ctx.save_for_backward(a, b, weight, output[1])


def norm_backward(ctx: Any, of_out: Tensor | None, of_new: Tensor | None) -> Any:
    """Compute the gradients of GEMM+AllReduce with a norm: nothing travels."""
    a, b, weight, new = ctx.saved_tensors
    of_row, of_weight = _of_norm(new, weight, ctx.eps, of_out, of_new, ctx.promised)
    of_c = of_row.to(a.dtype)
    wanted: tuple[bool, ...] = ctx.needs_input_grad
    needs_a, needs_b, needs_weight, needs_residual, needs_bias = (*wanted, False, False)[:5]
    return _given(
        ctx,
        own_product(of_c, b.t(), ctx.promised) if needs_a else None,
        of_matrix(as_rows(a, 0), as_rows(of_c, 0), b) if needs_b else None,
        of_weight if needs_weight else None,
        of_row.to(ctx.residual) if needs_residual else None,
        _of_bias(of_row, a.dtype) if needs_bias else None,
    )


def _of_norm(
    new: Tensor,
    weight: Tensor,
    eps: float,
    of_out: Tensor | None,
    of_new: Tensor | None,
    promised: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows that were normalised, unrounded, and of the weight. With
    x = r / s, s = sqrt(mean(r^2) + eps), g = dOut * weight: dr = (g - x * mean(g * x)) / s + dNew."""
    row = new.to(torch.promote_types(new.dtype, torch.float32))
    scale = torch.rsqrt(row_mean(row.square(), invariant=promised) + eps)
    x = row * scale
    of_row, of_weight = torch.zeros_like(row), torch.zeros_like(x)
    if of_out is not None:
        of_weight = of_out * x
        g = of_out * weight
        of_row = (g - x * row_mean(g * x, invariant=promised)) * scale
    if of_new is not None:
        of_row = of_row + of_new
    return of_row, of_weight.flatten(0, -2).sum(0).to(weight.dtype)


# ---- AllReduce -----------------------------------------------------------------------------------


def save_sum(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep the dtype of x."""
    ctx.dtype = inputs[0].dtype


def sum_backward(ctx: Any, of_sum: Tensor) -> Any:
    """Compute the gradients of AllReduce: nothing travels, since each rank's terms count in the sum
    that all ranks have."""
    return of_sum.to(ctx.dtype)


def save_normed_sum(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    """Keep the weight, and the new residual, whose rows were normalised."""
    ctx.set_materialize_grads(False)
    _keep_promise(ctx, keyword_only_inputs)
    x, weight, *given = inputs
    ctx.dtype, ctx.eps = x.dtype, keyword_only_inputs["eps"]
    ctx.residual = None if not given or given[0] is None else given[0].dtype
    ctx.save_for_backward(weight, output[1])


def normed_sum_backward(ctx: Any, of_out: Tensor | None, of_new: Tensor | None) -> Any:
    """Compute the gradients of AllReduce with a norm: nothing travels."""
    weight, new = ctx.saved_tensors
    of_row, of_weight = _of_norm(new, weight, ctx.eps, of_out, of_new, ctx.promised)
    needs_x, needs_weight, needs_residual = (*ctx.needs_input_grad, False)[:3]
    return _given(
        ctx,
        of_row.to(ctx.dtype) if needs_x else None,
        of_weight if needs_weight else None,
        of_row.to(ctx.residual) if needs_residual else None,
    )
