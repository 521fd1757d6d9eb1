"""Derivatives of the GEMM ops, by which torch differentiates ``torch.ops.mkernel``.

With W ranks, a^T the transpose of a, AG the gathering of rows and RS the sum over ranks whose rows are
scattered:

    C = AG(a) @ b       da = RS(dC @ b^T)      db = AG(a)^T @ dC
    C = RS(a @ b)       da = AG(dC) @ b^T      db = a^T @ AG(dC)
    C = AR(a @ b)       da = dC @ b^T          db = a^T @ dC

AllGather+GEMM and GEMM+ReduceScatter are each other's backward. With the first two every rank's loss is
its own, and the gradients are those of the sum of all losses. C of GEMM+AllReduce is one tensor that
every rank holds: so is its gradient, the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FEWEST_COLUMNS = 8
"""Columns of a product that is thrown away: kernels take no fewer than 16 bytes of a row."""


def _gathered(a: Tensor, b: Tensor, options: dict[str, Any]) -> Tensor:
    """AG(a) alone: what AllGather+GEMM gathers, with as few columns of b as it takes."""
    some = b[:, :_FEWEST_COLUMNS].contiguous()
    gathered: Tensor = torch.ops.mkernel.all_gather_gemm_gathered(a, some, **options)[1]
    return gathered


def save_gather(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keeps a and b, and the gathered A where the call returned it."""
    a, b = inputs[:2]
    _keep(ctx, keyword_only_inputs)
    if isinstance(output, Tensor):
        ctx.save_for_backward(a, b)
    else:
        ctx.save_for_backward(a, b, output[1])


def _keep(ctx: Any, keywords: Any) -> None:
    ctx.options = {"chunk": keywords["chunk"], "group": keywords["group"]}


def gather_backward(ctx: Any, of_c: Tensor | None, of_gathered: Tensor | None = None) -> Any:
    """Of AllGather+GEMM."""
    a, b, *kept = ctx.saved_tensors
    parts = [(of_c, b.t()), (of_gathered, None)]  # sums over ranks: dC @ b^T, and A's own gradient
    given = [(each.to(a.dtype), right) for each, right in parts if each is not None]
    of_a = of_b = None
    if ctx.needs_input_grad[0] and given:
        if len(given) > 1 or given[0][1] is None:
            one = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
            left = torch.cat([each for each, _ in given], dim=1)
            right = torch.cat([one if each is None else each for _, each in given])
        else:
            left, right = given[0]
        of_a = torch.ops.mkernel.gemm_reduce_scatter(left.contiguous(), right, **ctx.options)
    if ctx.needs_input_grad[1] and of_c is not None:
        whole = kept[0] if kept else _gathered(a, b, ctx.options)
        of_b = whole.t() @ of_c.to(a.dtype)
    return of_a, of_b


def save_operands(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keeps a and b."""
    _keep(ctx, keyword_only_inputs)
    ctx.save_for_backward(*inputs[:2])


def scatter_backward(ctx: Any, of_c: Tensor) -> Any:
    """Of GEMM+ReduceScatter: dC is gathered once for both gradients."""
    a, b = ctx.saved_tensors
    of_c = of_c.to(a.dtype).contiguous()
    if not ctx.needs_input_grad[1]:
        return torch.ops.mkernel.all_gather_gemm(of_c, b.t(), **ctx.options), None
    if not ctx.needs_input_grad[0]:
        return None, a.t() @ _gathered(of_c, b.t(), ctx.options)
    of_a, whole = torch.ops.mkernel.all_gather_gemm_gathered(of_c, b.t(), **ctx.options)
    return of_a, a.t() @ whole


def reduce_backward(ctx: Any, of_c: Tensor) -> Any:
    """Of GEMM+AllReduce: nothing travels."""
    a, b = ctx.saved_tensors
    of_c = of_c.to(a.dtype)
    return (
        of_c @ b.t() if ctx.needs_input_grad[0] else None,
        a.t() @ of_c if ctx.needs_input_grad[1] else None,
    )
