"""The functions of ``torch.ops.symm_mem`` that fuse a matrix product with communication, by our ops.

Same arguments, in the same order and by the same names, same results, same gradients as what they stand
for: a gather and products, or a product and a reduce scatter. The world of the group must exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops import validate
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.plan.arguments import RESULTS
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

_FEWEST_COLUMNS = 8
"""Columns of a product that is thrown away: kernels take no fewer than 16 bytes of a row."""


def fused_all_gather_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: Group,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """Compute ``all_gather(A, gather_dim) @ B`` for each B, as
    ``torch.ops.symm_mem.fused_all_gather_matmul``.

    Args:
        A: [..., K], two dimensions at least; this rank's part along ``gather_dim``, as large as any
            other's. Not copied where ``A.movedim(gather_dim, 0)`` is contiguous.
        Bs: [K, N] each. The widest product is computed while parts of A arrive, the others with what
            was gathered.
        gather_dim: along the last dimension, where K counts all ranks' columns, every product needs all
            of A at once: nothing overlaps.
        group_name: torch's name of the group (or anything that names a world).
        return_A: return the gathered A, too.

    Returns:
        (gathered A or None, products), each [..., N] with all ranks' sizes along ``gather_dim``.

    Raises:
        ShapeError, ArgumentError, and the other errors of :func:`mkernel.all_gather_gemm`.
    """
    dim = _dimension("gather_dim", gather_dim, "A", A)
    if not Bs:
        raise ArgumentError("Bs", "an empty list", "one matrix or more")
    for place, each in enumerate(Bs):
        validate.matrix(f"Bs[{place}]", each)
    if dim == A.dim() - 1:
        whole = _gathered_columns(A, Bs[0], group_name)
        return (whole if return_A else None), [whole @ each for each in Bs]
    if return_A:
        products, gathered = all_gather_gemm(
            A, Bs, gather_dim=dim, return_gathered=True, group=group_name
        )
        return gathered, products
    if len(Bs) == 1:  # with a list the op has to keep what it gathers
        return None, [all_gather_gemm(A, Bs[0], gather_dim=dim, group=group_name)]
    return None, all_gather_gemm(A, Bs, gather_dim=dim, group=group_name)


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: Group
) -> Tensor:
    """Compute ``reduce_scatter(A @ B, reduce_op, scatter_dim)``, as
    ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    Sums are taken in float32, in the order of :func:`mkernel.gemm_reduce_scatter`, and rounded once to
    the dtype of A; means once too, where the accelerator gives float32.

    Args:
        A: [..., K], two dimensions at least. Not copied where ``A.movedim(scatter_dim, 0)`` is
            contiguous.
        B: [K, N].
        reduce_op: ``sum`` or ``avg``.
        scatter_dim: dimension of the product of which each rank keeps a part, which the ranks divide.
        group_name: torch's name of the group (or anything that names a world).

    Returns:
        This rank's part of the sum or mean, [..., N] but for ``scatter_dim``.

    Raises:
        ShapeError, ArgumentError, and the other errors of :func:`mkernel.gemm_reduce_scatter`.
    """
    dim = _dimension("scatter_dim", scatter_dim, "A", A)
    validate.matrix("B", B)
    if reduce_op not in ("sum", "avg"):
        raise ArgumentError("reduce_op", reduce_op, "sum or avg")
    world = current(group_name)
    ranks = world.size
    sizes = (*A.shape[:-1], B.shape[1])
    if sizes[dim] % ranks:
        raise ShapeError("A @ B", sizes, f"a multiple of {ranks} along dimension {dim}")
    wide = dtype_of_sum(world, A.dtype) if reduce_op == "avg" else None
    if dim == A.dim() - 1:  # columns of the product, which are rows of its transpose
        c = gemm_reduce_scatter(B.t(), A.flatten(0, -2).t(), out_dtype=wide, group=group_name)
        c = c.t().reshape(*A.shape[:-1], -1)
    else:
        c = gemm_reduce_scatter(A, B, scatter_dim=dim, out_dtype=wide, group=group_name)
    return c if reduce_op == "sum" else (c / ranks).to(A.dtype)


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: Group,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Compute ``_scaled_mm(all_gather(A, gather_dim), B, A_scale, B_scale)`` for each B, as
    ``torch.ops.symm_mem.fused_all_gather_scaled_matmul``.

    Args:
        A: e4m3 [..., K], as of :func:`fused_all_gather_matmul`. Bs: e4m3 [K, N] each, K-major.
        A_scale: float32, one element, this rank's for all that it gathers; or [..., 1] for each row of
            A; or of all ranks' rows, of which this rank's part is taken. B_scales: one element each, or
            [1, N]. Also both by blocks (:func:`mkernel.all_gather_gemm`).
        gather_dim: any dimension but the last.
        biases: [N] each, in its result's dtype, or None. result_scales: of None alone, since no result
            is e4m3. out_dtypes: all the same.
        use_fast_accum: of each; it is used where all have it.

    Returns:
        (the gathered A, products), each [..., N] with all ranks' sizes along ``gather_dim``.

    Raises:
        ShapeError, ArgumentError, and the other errors of :func:`mkernel.all_gather_gemm`.
    """
    dim = _dimension("gather_dim", gather_dim, "A", A)
    if dim == A.dim() - 1:
        raise ArgumentError("gather_dim", gather_dim, "a dimension of rows: K is not gathered")
    lists = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    if not Bs:
        raise ArgumentError("Bs", "an empty list", "one matrix or more")
    for name, given in lists.items():
        if len(given) != len(Bs):
            raise ArgumentError(name, f"{len(given)} of them", f"{len(Bs)}, one for each B")
    for place, each in enumerate(Bs):
        validate.matrix(f"Bs[{place}]", each)
    _no_result_scale("result_scales", *result_scales)
    dtype = _result_dtype("out_dtypes", *out_dtypes)
    added: list[Tensor] | None = None
    if any(one is not None for one in biases):
        added = [
            torch.zeros(b.shape[1], dtype=dtype, device=b.device) if one is None else one
            for one, b in zip(biases, Bs, strict=True)
        ]
    of_a, of_bs = _scales_of_gather(A, A_scale, B_scales, dim, group_name)
    products, gathered = all_gather_gemm(
        A,
        Bs,
        a_scale=of_a,
        b_scale=of_bs,
        bias=added,
        use_fast_accum=all(use_fast_accum),
        gather_dim=dim,
        out_dtype=dtype,
        return_gathered=True,
        group=group_name,
    )
    return gathered, products


def _scales_of_gather(
    A: Tensor, A_scale: Tensor, B_scales: Sequence[Tensor], dim: int, group: Group
) -> tuple[Tensor, list[Tensor]]:
    """Return the scales as :func:`mkernel.all_gather_gemm` takes them: those of A are of this rank's
    rows. A single one, which is this rank's for the rows of all, belongs to the products of this rank,
    with B's."""
    if A_scale.numel() == 1 and all(each.numel() == 1 for each in B_scales):
        return torch.ones_like(A_scale), [each * A_scale.view(each.shape) for each in B_scales]
    world = current(group)
    if A_scale.dim() == A.dim() and A_scale.shape[dim] == A.shape[dim] * world.size:
        A_scale = A_scale.narrow(dim, world.rank * A.shape[dim], A.shape[dim])
    return A_scale, list(B_scales)


def fused_scaled_matmul_reduce_scatter(  # noqa: PLR0917 - torch's own arguments
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: Group,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute ``reduce_scatter(_scaled_mm(A, B, A_scale, B_scale), reduce_op)``, as
    ``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``.

    Sums as in :func:`fused_matmul_reduce_scatter`.

    Args:
        A: e4m3 [..., K], two dimensions at least. B: e4m3 [K, N], K-major.
        A_scale, B_scale: float32, one element each; or [..., 1] and [1, N]; or by blocks
            (:func:`mkernel.gemm_reduce_scatter`).
        reduce_op: ``sum`` or ``avg``.
        orig_scatter_dim: dimension of the product, in the shape ``output_shape``, of which each rank
            keeps a part. scatter_dim_after_maybe_reshape: the same one of A, which follows from it.
        output_shape: of the product before it is scattered; None: that of A, with N.
        bias, result_scale: None alone: ranks would each add the bias, and no result is e4m3.
        out_dtype: of the result.

    Returns:
        This rank's part of the sum or mean.

    Raises:
        ShapeError, ArgumentError, and the other errors of :func:`mkernel.gemm_reduce_scatter`.
    """
    validate.matrix("B", B)
    _dimension("scatter_dim_after_maybe_reshape", scatter_dim_after_maybe_reshape, "A", A)
    sizes = (*A.shape[:-1], B.shape[1]) if output_shape is None else tuple(output_shape)
    if prod(sizes[:-1]) * A.shape[-1] != A.numel() or sizes[-1] != B.shape[1]:
        raise ShapeError("output_shape", sizes, f"that of A @ B, {(*A.shape[:-1], B.shape[1])}")
    if not 0 <= orig_scatter_dim < len(sizes):
        raise ArgumentError("orig_scatter_dim", orig_scatter_dim, f"0 to {len(sizes) - 1}")
    if reduce_op not in ("sum", "avg"):
        raise ArgumentError("reduce_op", reduce_op, "sum or avg")
    if bias is not None:
        raise ArgumentError("bias", "a tensor", "None: add it to the result")
    _no_result_scale("result_scale", result_scale)
    dtype = _result_dtype("out_dtype", out_dtype)
    world = current(group_name)
    if sizes[orig_scatter_dim] % world.size:
        legal = f"a multiple of {world.size} along dimension {orig_scatter_dim}"
        raise ShapeError("output_shape", sizes, legal)
    wide = dtype_of_sum(world, dtype) if reduce_op == "avg" else None
    options: dict[str, Any] = {
        "use_fast_accum": use_fast_accum,
        "out_dtype": wide or dtype,
        "group": group_name,
    }
    if (
        orig_scatter_dim == len(sizes) - 1
    ):  # columns of the product, which are rows of its transpose
        rows = A_scale if A_scale.numel() == 1 else A_scale.flatten(0, -2).t()
        columns = B_scale if B_scale.numel() == 1 else B_scale.t()
        left, right = B.t(), A.flatten(0, -2).t()
        c = gemm_reduce_scatter(left, right, a_scale=columns, b_scale=rows, **options)
        c = c.t().reshape(*sizes[:-1], -1)
    else:
        scale = A_scale if A_scale.numel() == 1 else A_scale.reshape(*sizes[:-1], -1)
        left = A.reshape(*sizes[:-1], A.shape[-1])
        c = gemm_reduce_scatter(
            left, B, a_scale=scale, b_scale=B_scale, scatter_dim=orig_scatter_dim, **options
        )
    return c if reduce_op == "sum" else (c / world.size).to(dtype)


def _no_result_scale(name: str, *given: Tensor | None) -> None:
    if any(each is not None for each in given):
        raise ArgumentError(
            name, "a tensor", "None: it is of e4m3 results, which there are none of"
        )


def _result_dtype(name: str, *given: torch.dtype | None) -> torch.dtype:
    """Check that all results have one dtype, and return it. ArgumentError."""
    first = given[0]
    if first is None or any(each != first for each in given):
        found = ", ".join(map(str, given))
        raise ArgumentError(name, found, f"one dtype for all: {', '.join(RESULTS)}")
    return first


def dtype_of_sum(world: World, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which a world should give a sum for a mean: float32 holds sums that ``dtype``
    cannot, and the mean is rounded once. None: ``dtype`` itself, where the world gives no other."""
    pairs = world.accelerator.capabilities().dtype_pairs()
    given = {validate.DTYPES[out] for name, out in pairs if validate.DTYPES[name] == dtype}
    return torch.float32 if dtype.itemsize < 4 and torch.float32 in given else None


def _gathered_columns(A: Tensor, B: Tensor, group: Group) -> Tensor:
    """Gather [..., K] of all ranks' [..., K / W]."""
    columns = A.shape[-1]
    some = B[:columns, :_FEWEST_COLUMNS].detach()
    parts = all_gather_gemm(A.flatten(0, -2), some, return_gathered=True, group=group)[1]
    return parts.view(-1, *A.shape).movedim(0, -2).flatten(-2)


def _dimension(name: str, dim: int, tensor: str, value: Tensor) -> int:
    """Return ``dim`` counted from the front. ShapeError, ArgumentError."""
    if value.dim() < 2:
        raise ShapeError(tensor, tuple(value.shape), "two dimensions or more")
    if not -value.dim() <= dim < value.dim():
        raise ArgumentError(name, dim, f"a dimension of {tensor}, which has {value.dim()}")
    return dim % value.dim()
