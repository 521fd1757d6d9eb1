"""A product with the bits of an invariant sum over ranks, for code without a group: what one rank of
:func:`mkernel.gemm_all_reduce` computes alone. Nothing travels, and no world is needed.

It adds in torch the tree that `streams` adds (:mod:`mkernel.backends.contracts.invariant_product`), and
has the bits of that accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkernel.backends.contracts.invariant_product import invariant_product
from mkernel.backends.contracts.scaled import dequantised
from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import autocast, flops, validate
from mkernel.ops.around import as_rows, check_scaled, refuse_gradients, scaled
from mkernel.ops.derivatives import of_matrix
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import register
from mkernel.plan.arguments import check_segments
from mkernel.plan.invariance import Invariant, resolved
from mkernel.settings import load as load_settings
from mkernel.world.lifecycle import current, is_initialized

_OP = "invariant_mm"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def invariant_mm(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    invariant: bool | Invariant = True,
) -> Tensor:
    """Compute a @ b so that the bits of a row depend on that row and b alone (docs/invariance.md).

    On `streams` :func:`mkernel.gemm_all_reduce` and :func:`mkernel.gemm_reduce_scatter` with
    invariant results have the same bits, on any number of ranks. K is cut into segments, each summed
    in float32, which are added in a binary tree, rounded at each level.

    Args:
        a: [M, K], or an activation such as [B, S, K], in float16, bfloat16 or float32; or in e4m3
            beside scales.
        b: [K, N], with any strides, in the same dtype.
        a_scale, b_scale: of e4m3 operands, as :func:`mkernel.gemm_all_reduce` takes them. There are
            no gradients.
        out_dtype: float16, bfloat16 or float32; default: that of a, of e4m3 operands bfloat16.
        invariant: the sum; True: with the segments of the default world's settings, or of the
            environment's where there is no world. K is a multiple of 16 x segments, with scales by
            blocks of 128 x segments.

    Returns:
        [M, N], or [B, S, N]. The gradient of a is such a product too; that of b is none.

    Raises:
        ShapeError, DtypeError, ArgumentError: a wrong argument. Unsupported: torch's product was
            measured on this device, and a row's bits depend on more than that.
    """
    how = _sum_of(invariant)
    given = scaled(a_scale, b_scale, use_fast_accum=False)
    scales = None
    if given is not None:
        refuse_gradients(_OP, a=a, b=b, a_scale=a_scale, b_scale=b_scale)
        scales = check_scaled(a, b, given, str(a.device))
        of_a = given.a if given.a.numel() == 1 else as_rows(given.a, 0)
        rows = dequantised(as_rows(a, 0), of_a.reshape(-1, of_a.shape[-1] if of_a.dim() else 1))
        b = dequantised(b, given.b.reshape(1, 1) if given.b.numel() == 1 else given.b)
        a, out_dtype = rows.view(a.shape), out_dtype or torch.bfloat16
    if autocast.enabled():
        a, b = autocast.cast([a, b])
    wanted = out_dtype or a.dtype
    check_segments("gemm_all_reduce", how, a.shape[-1], 1, scales)
    partial = how.partial_of(str(wanted).removeprefix("torch."))
    made: Tensor = torch.ops.mkernel.invariant_mm(a, b, how.segments, partial, wanted)
    return made


def _sum_of(invariant: bool | Invariant) -> Invariant:
    if isinstance(invariant, Invariant):
        return invariant
    if invariant is not True:
        raise ArgumentError("invariant", invariant, "True or a mkernel.Invariant")
    found = resolved("on", current().settings if is_initialized() else load_settings())
    assert found is not None
    return found


_sum_of.__dict__["_dynamo_marked_constant"] = True  # a compiled function has the settings it saw


def _checked(a: Tensor, b: Tensor, segments: int, out_dtype: torch.dtype | None) -> torch.dtype:
    validate.activation("a", a)
    validate.matrix("b", b)
    validate.same_dtype("b.dtype", b, "a", a)
    wanted = out_dtype or a.dtype
    for name, dtype in (("a.dtype", a.dtype), ("out_dtype", wanted)):
        if dtype not in _DTYPES:
            raise DtypeError(name, dtype, "float16, bfloat16 or float32, with invariant results")
    if a.shape[-1] != b.shape[0] or b.shape[0] % segments:
        legal = f"[K, N] with K = {a.shape[-1]}, the last dimension of a, a multiple of {segments}"
        raise ShapeError("b", validate.describe(b), legal)
    return wanted


@untraced
def _kernel(
    a: Tensor,
    b: Tensor,
    segments: int = 1,
    partial_dtype: str = "float32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    a, b = plain(_OP, ("a", "b"), (a, b))
    wanted = _checked(a, b, segments, out_dtype)
    out = a.new_empty((*a.shape[:-1], b.shape[1]), dtype=wanted)
    rows = out.view(-1, b.shape[1])
    invariant_product(as_rows(a, 0), b, None, rows, segments, partial_dtype)
    return out


def _fake(
    a: Tensor,
    b: Tensor,
    segments: int = 1,
    partial_dtype: str = "float32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wanted = _checked(a, b, segments, out_dtype)
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.given = len(inputs)


def _backward(ctx: Any, of_c: Tensor) -> Any:
    a, b = ctx.saved_tensors
    of_c, (needs_a, needs_b) = of_c.to(a.dtype), ctx.needs_input_grad[:2]
    of_a = torch.ops.mkernel.invariant_mm(of_c, b.t()) if needs_a else None
    of_b = of_matrix(as_rows(a, 0), as_rows(of_c, 0), b) if needs_b else None
    return of_a, of_b, *(None,) * (ctx.given - 2)


register(
    f"{_OP}(Tensor a, Tensor b, int segments=1, str partial_dtype='float32', "
    "ScalarType? out_dtype=None) -> Tensor",
    _kernel,
    _fake,
    _save,
    _backward,
    flops=flops.own_rows,
    communicates=False,
)
