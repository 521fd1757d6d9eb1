"""GEMM+ReduceScatter: C = sum over ranks of a @ b, each rank keeping its M/W rows.

Data flow of one call on rank r:
  a @ b, rows of the next ranks first, own rows last ──▶ partial rows of each owner
  partial rows ──▶ one slot a source at the owner, as soon as they are computed
  owner: adds the slots in rank order, in float32, rounds once, writes its M/W rows
The scatter is world-wide, and the order of the sum is fixed: results are deterministic.
"""

from __future__ import annotations

import torch

from mkernel.ops import derivatives
from mkernel.ops.gemm import GemmOp
from mkernel.world.groups import Group

OP = GemmOp("gemm_reduce_scatter", scatters=True)


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Rows [r·M/W, (r+1)·M/W) of the sum over ranks of a @ b, on rank r.

    Collective: every rank of the world calls it with the same shapes, dtypes and options. Products
    accumulate in float32; partial results are added in rank order, in float32, and rounded once.

    Args:
        a: [M, K_r], this rank's columns of A; row-major contiguous. M is a multiple of W.
        b: [K_r, N], this rank's rows of B; row-major, or column-major (the transpose of a
            contiguous [N, K_r]).
        out: [M/W, N] row-major to write to; allocated where None.
        out_dtype: of the result; default: that of ``out``, else that of ``a``.
        chunk: rows (or tiles) a communication chunk; default: the planner's choice.
        group: names the world; None: the default one.

    Returns:
        C [M/W, N].

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...; with ``out`` one that requires grad);
            nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    return OP.result(a, b, out=out, out_dtype=out_dtype, chunk=chunk, group=group)


OP.register(derivatives.save_operands, derivatives.scatter_backward)
