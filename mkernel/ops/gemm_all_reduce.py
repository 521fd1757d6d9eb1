"""GEMM+AllReduce: C = sum over ranks of a @ b, on every rank.

Data flow of one call on rank r:
  a @ b, rows of the next ranks first, own rows last ──▶ partial rows of each owner
  partial rows ──▶ one slot a source at the owner of the row, as soon as they are computed
  owner: adds the slots in rank order, in float32, rounds once, and sends the rows to every rank
The order of the sum is fixed and it is rounded once, by its owner: every rank holds the same bits.
"""

from __future__ import annotations

import torch

from mkernel.ops import derivatives
from mkernel.ops.gemm import GemmOp
from mkernel.world.groups import Group

OP = GemmOp("gemm_all_reduce")


def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """The sum over ranks of a @ b (+ bias), on every rank, the same bits everywhere.

    Collective: every rank of the world calls it with the same shapes, dtypes and options; strides may
    differ, but for the major order of b. Products accumulate in float32; partial results are added in
    rank order, in float32, and rounded once. A bias is added to the rounded sum, which is then rounded
    again.

    Args:
        a: [M, K_r], this rank's columns of A, or an activation such as [B, S, K_r]. What is not packed
            the op copies first, where the accelerator does not take it as it is
            (``LaunchPlan.copies``).
        b: [K_r, N], this rank's rows of B, with any strides: row-major and column-major ones (the
            transpose of a contiguous [N, K_r]) are never copied, parts of such ones on most
            accelerators not either.
        bias: [N], in the dtype of ``a``, the same on every rank; added once.
        out: [M, N] contiguous to write to; allocated where None. In memory of :func:`mkernel.empty`
            kernels write it on every rank without a copy.
        out_dtype: of the result; default: that of ``out``, else that of ``a``.
        chunk: rows (or tiles) a communication chunk; default: the planner's choice.
        group: names the world; None: the default one.

    Returns:
        C [M, N], or [B, S, N]. A DTensor placed as the op takes it (a sharded along its last
        dimension, b along 0, bias replicated) counts as its local part; the result is plain.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor placed otherwise, one with a tangent, ...; with ``out`` one that requires
            grad); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    return OP.result(a, b, bias, 0, out=out, out_dtype=out_dtype, chunk=chunk, group=group)


OP.register(derivatives.save_reduce, derivatives.reduce_backward)
