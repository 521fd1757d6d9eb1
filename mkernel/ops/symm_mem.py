"""The functions of ``torch.ops.symm_mem`` that fuse a matrix product with communication, by our ops.

Same arguments, in the same order and by the same names, same results, same gradients as what they stand
for: a gather and products, or a product and a reduce scatter. The world of the group must exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops import validate
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

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
    """``all_gather(A, gather_dim) @ B`` for each B, as ``torch.ops.symm_mem.fused_all_gather_matmul``.

    Args:
        A: [..., K], two dimensions at least; this rank's part along ``gather_dim``, as large as any
            other's. Not copied where ``A.movedim(gather_dim, 0)`` is contiguous.
        Bs: [K, N] each; row-major or column-major ones are not copied. The widest product is computed
            while parts of A arrive, the others with what was gathered.
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
    moved = A.movedim(dim, 0)
    rows, matrices = moved.reshape(-1, A.shape[-1]), [_packed(each) for each in Bs]
    widest = max(range(len(Bs)), key=lambda place: Bs[place].shape[1])

    def shaped(product: Tensor) -> Tensor:
        return product.view(-1, *moved.shape[1:-1], product.shape[1]).movedim(0, dim)

    if len(Bs) == 1 and not return_A:
        return None, [shaped(all_gather_gemm(rows, matrices[0], group=group_name))]
    first, gathered = all_gather_gemm(
        rows, matrices[widest], return_gathered=True, group=group_name
    )
    products = [
        first if place == widest else gathered @ each for place, each in enumerate(matrices)
    ]
    return (shaped(gathered) if return_A else None), [shaped(each) for each in products]


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: Group
) -> Tensor:
    """``reduce_scatter(A @ B, reduce_op, scatter_dim)``, as
    ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    Sums are taken in float32 and in rank order, and rounded once to the dtype of A, means too.

    Args:
        A: [..., K], two dimensions at least. Not copied where ``A.movedim(scatter_dim, 0)`` is
            contiguous.
        B: [K, N]; row-major or column-major ones are not copied.
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
    ranks = current(group_name).size
    sizes = (*A.shape[:-1], B.shape[1])
    if sizes[dim] % ranks:
        raise ShapeError("A @ B", sizes, f"a multiple of {ranks} along dimension {dim}")
    if dim == A.dim() - 1:  # columns of the product are rows of its transpose
        left, right = B.t().contiguous(), A.reshape(-1, A.shape[-1]).contiguous().t()
    else:
        left, right = A.movedim(dim, 0).reshape(-1, A.shape[-1]).contiguous(), _packed(B)
    wide = torch.float32 if reduce_op == "avg" and A.dtype.itemsize < 4 else None
    c = gemm_reduce_scatter(left, right, out_dtype=wide, group=group_name)
    if reduce_op == "avg":
        c = (c / ranks).to(A.dtype)
    if dim == A.dim() - 1:
        return c.t().reshape(*A.shape[:-1], -1)
    rest = [size for place, size in enumerate(sizes) if place != dim]
    return c.view(-1, *rest).movedim(0, dim)


def _gathered_columns(A: Tensor, B: Tensor, group: Group) -> Tensor:
    """[..., K] of all ranks' [..., K / W]."""
    columns = A.shape[-1]
    some = B[:columns, :_FEWEST_COLUMNS].detach().contiguous()
    rows = A.reshape(-1, columns).contiguous()
    parts = all_gather_gemm(rows, some, return_gathered=True, group=group)[1]
    return parts.view(-1, *A.shape).movedim(0, -2).flatten(-2)


def _dimension(name: str, dim: int, tensor: str, value: Tensor) -> int:
    """``dim`` counted from the front. ShapeError, ArgumentError."""
    if value.dim() < 2:
        raise ShapeError(tensor, tuple(value.shape), "two dimensions or more")
    if not -value.dim() <= dim < value.dim():
        raise ArgumentError(name, dim, f"a dimension of {tensor}, which has {value.dim()}")
    return dim % value.dim()


def _packed(b: Tensor) -> Tensor:
    """``b`` in memory that ops take."""
    return b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
