"""AllGather+GEMM: C = concat(a over ranks) @ b, computed while the rows of a still travel.

Data flow of one call on rank r:
  a (own rows) ──compute kernel──▶ rows of C that need no communication, first
  a (own rows) ──comm kernel──▶ chunk by chunk into every peer's workspace: same node by put over
                                the scale-up fabric; other nodes by a command to the NIC's proxy
  each chunk's signal ──▶ the peer's compute kernel goes on with the rows that the chunk holds
Synchronisation: one signal a (source, chunk), awaited as `>= epoch`; none is ever reset.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from mkernel.ops import derivatives
from mkernel.ops.gemm import ARGUMENTS, GemmOp
from mkernel.ops.plain import seen_by_torch
from mkernel.ops.registration import group_name, register
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

OP = GemmOp("all_gather_gemm", gathers=True)


@overload
def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    gathered: torch.Tensor | None = None,
    return_gathered: Literal[False] = False,
    save_gathered: bool = False,
    group: Group = None,
) -> torch.Tensor: ...


@overload
def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    gathered: torch.Tensor | None = None,
    return_gathered: Literal[True],
    save_gathered: bool = False,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    gathered: torch.Tensor | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    group: Group = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """C [M, N_r] = concat(a over ranks, in rank order) @ b, with float32 accumulation.

    Collective: every rank of the world calls it with the same shapes, dtypes and options.
    Floating point: one fixed order of K per output element, so the result is bit-identical from
    call to call, for every chunk size and, on one path (``LaunchPlan.path``), world split. NaN and
    infinities pass as in ``a @ b``.

    Args:
        a: [M/W, K], this rank's rows; row-major contiguous. M/W is the same on every rank.
        b: [K, N_r], this rank's columns (N_r the same on every rank); row-major, or column-major
            (the transpose of a contiguous [N_r, K], such as an ``nn.Linear`` weight).
        out: [M, N_r] row-major to write to; allocated where None.
        out_dtype: of C; default: that of ``out``, else that of ``a``.
        chunk: tiles of A a communication chunk; default: the planner's choice.
        gathered: [M, K] row-major, in the dtype of ``a``, to write the gathered A to. In memory of
            :func:`mkernel.empty` it costs nothing where kernels gather there.
        return_gathered: return (C, A) with the gathered A; allocated where ``gathered`` is None.
        save_gathered: keep the gathered A for the backward of b, which takes W times the memory of
            a; else it is gathered again there.
        group: names the world; None: the default one.

    Returns:
        C [M, N_r], or (C, A).

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...; with ``out`` one that requires grad);
            nothing was started.
        NotInitialized: no world. Unsupported: the accelerator does not provide this op, or the call is
            inside a transform or mode of torch that has to see what it computes.
        PlanMismatch: another rank called with other shapes, dtypes or options.
        PeerFailure, Timeout, NicError, Cancelled: the world broke; every rank raises the same kind.
            A stream-ordered accelerator raises it at the next call, :func:`mkernel.synchronize` or
            :func:`mkernel.finalize`.

    Source of the decomposition: the dual-kernel AllGather+GEMM described in docs/architecture.md.
    """
    if gathered is None and not (return_gathered or save_gathered):
        return OP.result(a, b, out=out, out_dtype=out_dtype, chunk=chunk, group=group)
    if out is None and gathered is None and seen_by_torch(a, b):
        c: torch.Tensor
        c, whole = torch.ops.mkernel.all_gather_gemm_gathered(
            a, b, out_dtype=out_dtype, chunk=chunk, group=group_name(group)
        )
        return (c, whole) if return_gathered else c
    wanted = return_gathered if gathered is None else gathered
    done = OP.call(
        a, b, out=out, out_dtype=out_dtype, chunk=chunk, gathered=wanted, group=group
    ).outputs
    return (done["out"], done["gathered"]) if return_gathered else done["out"]


def _gathered(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    done = OP.call(a, b, out_dtype=out_dtype, chunk=chunk, gathered=True, group=group).outputs
    return done["out"], done["gathered"]


def _gathered_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = current(group).size
    return OP.fake(a, b, out_dtype, ranks), a.new_empty((a.shape[0] * ranks, a.shape[1]))


OP.register(derivatives.save_gather, derivatives.gather_backward)
register(
    f"all_gather_gemm_gathered({ARGUMENTS}) -> (Tensor, Tensor)",
    _gathered,
    _gathered_fake,
    derivatives.save_gather,
    derivatives.gather_backward,
)
