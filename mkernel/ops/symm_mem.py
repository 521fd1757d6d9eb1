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
    """``all_gather(A, gather_dim) @ B`` for each B, as ``torch.ops.symm_mem.fused_all_gather_matmul``.

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
    """``reduce_scatter(A @ B, reduce_op, scatter_dim)``, as
    ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    Sums are taken in float32 and in rank order, and rounded once to the dtype of A; means once too,
    where the accelerator gives float32.

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


def dtype_of_sum(world: World, dtype: torch.dtype) -> torch.dtype | None:
    """In which dtype a world should give a sum for a mean: float32 holds sums that ``dtype`` cannot,
    and the mean is rounded once. None: in ``dtype`` itself, where the world gives no other."""
    pairs = world.accelerator.capabilities().dtype_pairs()
    given = {validate.DTYPES[out] for name, out in pairs if validate.DTYPES[name] == dtype}
    return torch.float32 if dtype.itemsize < 4 and torch.float32 in given else None


def _gathered_columns(A: Tensor, B: Tensor, group: Group) -> Tensor:
    """[..., K] of all ranks' [..., K / W]."""
    columns = A.shape[-1]
    some = B[:columns, :_FEWEST_COLUMNS].detach()
    parts = all_gather_gemm(A.flatten(0, -2), some, return_gathered=True, group=group)[1]
    return parts.view(-1, *A.shape).movedim(0, -2).flatten(-2)


def _dimension(name: str, dim: int, tensor: str, value: Tensor) -> int:
    """``dim`` counted from the front. ShapeError, ArgumentError."""
    if value.dim() < 2:
        raise ShapeError(tensor, tuple(value.shape), "two dimensions or more")
    if not -value.dim() <= dim < value.dim():
        raise ArgumentError(name, dim, f"a dimension of {tensor}, which has {value.dim()}")
    return dim % value.dim()
