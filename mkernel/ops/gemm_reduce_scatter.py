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
from mkernel.ops.around import scaled
from mkernel.ops.gemm import GemmCall, GemmOp
from mkernel.ops.registration import ops
from mkernel.plan import mixed
from mkernel.plan.invariance import Wanted, encoded
from mkernel.world.groups import Group

OP = GemmOp("gemm_reduce_scatter", scatters=True)


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    bias: torch.Tensor | None = None,
    scatter_dim: int = 0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    invariant: Wanted = None,
    shards: mixed.Shards = "even",
    group: Group = None,
) -> torch.Tensor:
    """Compute rows [r·M/W, (r+1)·M/W) of the sum over ranks of a @ b (+ bias), on rank r.

    Collective: every rank of the world calls it with the same shapes, dtypes and options; strides may
    differ, but for the major order of b. Products accumulate in float32; partial results are added in
    float32, in rank order (on `hopper` in a fixed order that depends on the plan), and rounded once. A
    bias is added to the rounded sum, which is then rounded again.

    Args:
        a: [M, K_r], this rank's columns of A, M a multiple of W; or an activation such as [B, S, K_r],
            whose part along ``scatter_dim`` each rank gets. What is not packed with that dimension
            outermost in memory (``a.movedim(scatter_dim, 0).is_contiguous()``) the op copies first,
            where the accelerator does not take it as it is (``LaunchPlan.copies``).
        b: [K_r, N], this rank's rows of B, with any strides: row-major and column-major ones (the
            transpose of a contiguous [N, K_r]) are never copied, parts of such ones on most
            accelerators not either.
        a_scale, b_scale: float32, beside e4m3 ``a`` and ``b`` (``torch.float8_e4m3fn``), of which b is
            K-major: one element each; or [M, 1] and [1, N]; or [M, K / 128] and [K / 128, N / 128]
            (rounded up), by blocks of 128 of a row of A and 128 x 128 of B. M, N, K: of this rank's a
            and b; where a has more dimensions, so has a_scale. A product of elements counts times
            their scales. There are no gradients.
        use_fast_accum: products of e4m3 operands may be added with fewer bits than float32 has, where
            the device is faster so, as in ``torch._scaled_mm``; the same on every rank. Not with scales
            by blocks.
        bias: [N], in the dtype of ``a`` (beside scales, of the result), the same on every rank; added
            once. Its gradient is already summed over all ranks' rows, and the same on every rank: it
            must not be added up over ranks again.
        scatter_dim: dimension of ``a`` along which ranks get parts of the result; any but the last. W
            divides it.
        out: [M/W, N] to write to, contiguous, in memory of its own; allocated where None.
        out_dtype: of the result; default: that of ``out``, else that of ``a``; of e4m3 operands
            bfloat16, else float16 or float32.
        chunk: rows (or tiles) a communication chunk; default: the planner's choice.
        invariant: as :func:`mkernel.gemm_all_reduce` takes it.
        shards: how unlike nodes share M, as :func:`mkernel.shard` takes it: by predicted ``"speed"``,
            or the rows of a rank, by node. Such calls are not compiled.
        group: names the world; None: the default one.

    Returns:
        C [M/W, N], or [B, S/W, N]; allocated packed with ``scatter_dim`` outermost, as
        ``torch.ops.symm_mem.fused_matmul_reduce_scatter`` returns it. A DTensor placed as the op takes
        it (a sharded along its last dimension, b along 0, bias replicated) counts as its local part;
        the result is plain.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor placed otherwise, one with a tangent, ...; with ``out`` one that requires
            grad); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    more = a_scale is not None or b_scale is not None or use_fast_accum or out is not None
    more = more or shards != "even"
    if not (more or torch.compiler.is_compiling()):  # which is what most calls are
        found: torch.Tensor = ops.gemm_reduce_scatter(
            a, b, bias, scatter_dim, out_dtype, chunk, encoded(invariant), group
        )
        return found
    given = scaled(a_scale, b_scale, use_fast_accum)
    call = GemmCall(
        a, b, bias, scatter_dim, out, out_dtype, chunk=chunk, scaled=given,
        invariant=encoded(invariant), shards=mixed.encoded(shards), group=group,
    )  # fmt: skip
    return OP.result(call)


OP.register(derivatives.save_scatter, derivatives.scatter_backward)
