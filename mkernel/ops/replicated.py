"""Products of what every rank holds alike: the first half of a tensor-parallel layer without sequence
parallelism, and a bias that ranks share.

    C = a @ b, a the same on every rank, b this rank's columns   da = AR(dC @ b^T)   db = a^T @ dC
    C = c + bias, c this rank's rows, bias the same everywhere   dc = dC             dbias = AR(1 @ dC)

Only the backward communicates: GEMM+AllReduce, of dC @ b^T and of a row of ones with dC.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkernel.ops.registration import register


def _product(a: Tensor, b: Tensor, *, group: str) -> Tensor:
    return a @ b


def _save_product(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.group = keyword_only_inputs["group"]
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, of_c: Tensor) -> Any:
    a, b = ctx.saved_tensors
    of_a = of_b = None
    of_c = of_c.contiguous()
    if ctx.needs_input_grad[0]:
        of_a = torch.ops.mkernel.gemm_all_reduce(of_c, b.t(), group=ctx.group)
    if ctx.needs_input_grad[1]:
        of_b = a.t() @ of_c
    return of_a, of_b


def _biased(c: Tensor, bias: Tensor, *, group: str) -> Tensor:
    return c + bias


def _save_group(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.group = keyword_only_inputs["group"]


def _biased_backward(ctx: Any, of_c: Tensor) -> Any:
    of_bias = None
    if ctx.needs_input_grad[1]:
        rows = of_c.flatten(0, -2).contiguous()
        ones = rows.new_ones((1, len(rows)))
        of_bias = torch.ops.mkernel.gemm_all_reduce(ones, rows, group=ctx.group).flatten()
    return of_c, of_bias


register(
    "replicated_gemm(Tensor a, Tensor b, *, str group) -> Tensor",
    _product,
    _product,
    _save_product,
    _product_backward,
    communicates=False,
)
register(
    "shared_bias(Tensor c, Tensor bias, *, str group) -> Tensor",
    _biased,
    _biased,
    _save_group,
    _biased_backward,
    communicates=False,
)
