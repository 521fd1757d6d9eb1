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

from mkernel.backends.base import AcceleratorCapabilities, View
from mkernel.current import current
from mkernel.errors import ShapeError
from mkernel.ops import validate
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan as make_plan
from mkernel.world import CallRecord, World

NAME = "all_gather_gemm"


def prepare(
    world: World,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    chunk: int | None,
) -> tuple[LaunchPlan, dict[str, torch.Tensor]]:
    """Check the arguments, plan, and allocate the output where none was given."""
    capabilities: AcceleratorCapabilities = world.accelerator.capabilities()
    validate.matrix("a", a)
    validate.matrix("b", b)
    for name, tensor in (("a", a), ("b", b)):
        validate.on_cpu(name, tensor)
    dtype = validate.dtype_name("a.dtype", a.dtype, capabilities.dtypes)
    validate.same_dtype("b.dtype", b, "a", a)
    wanted = out_dtype or (out.dtype if out is not None else a.dtype)
    out_name = validate.dtype_name("out_dtype", wanted, capabilities.out_dtypes)
    if a.shape[1] != b.shape[0]:
        raise ShapeError(
            "b",
            validate.describe(b),
            f"[K, N] with K = {a.shape[1]}, the number of columns of a",
            why=f"K differs: a has {a.shape[1]}, b has {b.shape[0]}",
        )
    validate.row_major("a", a)
    b_layout = validate.layout("b", b, capabilities)
    plan = make_plan(
        NAME,
        m=a.shape[0] * world.size,
        n=b.shape[1],
        k=a.shape[1],
        dtype=dtype,
        out_dtype=out_name,
        b_layout=b_layout,
        nodes=world.identity.nodes,
        ranks_per_node=world.identity.ranks_per_node,
        accelerator=world.backends.accelerator,
        capabilities=capabilities,
        nic=world.backends.nic,
        verbs=world.backends.verbs,
        topology=world.topology,
        chunk=chunk,
    )
    shape = (plan.shape.m, plan.shape.n)
    if out is None:
        out = torch.empty(shape, dtype=wanted)
    else:
        validate.on_cpu("out", out)
        validate.output("out", out, shape, wanted)
    return plan, {"a": a, "b": b, "out": out}


def execute(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    view: View = "pipelined",
    trace: bool = False,
    chunk: int | None = None,
) -> tuple[LaunchPlan, CallRecord]:
    """One call with its plan and record: what ``mkernel run`` and the benchmarks measure."""
    world = current()
    plan, tensors = prepare(world, a, b, out, None, chunk)
    return plan, world.run(plan, tensors, view, trace)


@overload
def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    return_gathered: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    return_gathered: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    return_gathered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """C [M, N_r] = concat(a over ranks, in rank order) @ b, with float32 accumulation.

    Collective: every rank of the world calls it with the same shapes, dtypes and options.
    Floating point: one fixed order of K per output element, so the result is bit-identical from
    call to call, for every chunk size and world split. NaN and infinities pass as in ``a @ b``.

    Args:
        a: [M/W, K], this rank's rows; row-major contiguous. M/W is the same on every rank.
        b: [K, N_r], this rank's columns (N_r the same on every rank); row-major, or column-major
            (the transpose of a contiguous [N_r, K], such as an ``nn.Linear`` weight).
        out: [M, N_r] row-major to write to; allocated where None.
        out_dtype: of C; default: that of ``out``, else that of ``a``.
        chunk: tiles of A a communication chunk; default: the planner's choice.
        return_gathered: return (C, A) with the gathered A [M, K] in the dtype of ``a``.

    Returns:
        C [M, N_r], or (C, A).

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument; nothing was started.
        NotInitialized: no world. Unsupported: the accelerator does not provide this op.
        PlanMismatch: another rank called with other shapes, dtypes or options.
        PeerFailure, Timeout, NicError, Cancelled: the world broke; every rank raises the same kind.

    Source of the decomposition: the dual-kernel AllGather+GEMM described in docs/architecture.md.
    """
    world = current()
    plan, tensors = prepare(world, a, b, out, out_dtype, chunk)
    if return_gathered:
        tensors["gathered"] = torch.empty((plan.shape.m, plan.shape.k), dtype=a.dtype)
    world.run(plan, tensors)
    return (tensors["out"], tensors["gathered"]) if return_gathered else tensors["out"]
