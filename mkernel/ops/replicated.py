"""The product of what every rank holds alike: the first half of a tensor-parallel layer without
sequence parallelism.

    C = a @ b, a the same on every rank, b this rank's columns   da = AR(dC @ b^T)   db = a^T @ dC

Only the backward communicates, by GEMM+AllReduce.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mkernel.ops import flops, validate
from mkernel.ops.derivatives import of_matrix, own_product
from mkernel.ops.gemm import GROUP
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import ops, register
from mkernel.plan.invariance import resolved
from mkernel.world.lifecycle import current

_OP = "replicated_gemm"


@untraced
def _product(a: Tensor, b: Tensor, *, invariant: str | None = None, group: str) -> Tensor:
    a, b = plain(_OP, ("a", "b"), (a, b))
    validate.same_dtype("b.dtype", b, "a", a)
    return own_product(a, b, resolved(invariant, current(group).settings) is not None)


def _fake(a: Tensor, b: Tensor, *, invariant: str | None = None, group: str) -> Tensor:
    return a @ b


def _save_product(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.options = dict(keyword_only_inputs)
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, of_c: Tensor) -> Any:
    a, b = ctx.saved_tensors
    of_a = of_b = None
    if ctx.needs_input_grad[0]:
        of_a = ops.gemm_all_reduce(of_c, b.t(), **ctx.options)
    if ctx.needs_input_grad[1]:
        of_b = of_matrix(a, of_c, b)
    return of_a, of_b


register(
    f"{_OP}(Tensor a, Tensor b, *, {GROUP}) -> Tensor",
    _product,
    _fake,
    _save_product,
    _product_backward,
    flops=flops.own_rows,
    communicates=False,
)
