"""MoE dispatch+grouped GEMM, and the combine that brings results home.

Data flow of one dispatch on rank r (experts [r·E/W, (r+1)·E/W) live here):
  topk_ids ──routing tables, built on the device inside the call──▶ which token goes where
  x ──once per destination rank──▶ rows of that rank's experts, grouped by expert
  rows of an expert ──▶ @ w[expert], as soon as they are there
Order of the rows of one expert: by source rank, then token, then slot of top-k: fixed by the routing
alone, so results are deterministic. A handle remembers the routing.
Combine: y rows ──▶ back to their tokens' ranks; out[t] = sum over slots, in order, in float32, of
  topk_weights[t, slot] · y[row of (t, slot)], rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from typing_extensions import Unpack

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.ops import validate
from mkernel.ops.common import Done, Execution, plan_for
from mkernel.ops.plain import plain
from mkernel.ops.untraced import untraced
from mkernel.plan.model import LaunchPlan
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class MoeHandle:
    """What a combine needs of its dispatch. Valid in the world that made it, any number of times.

    ``rows``: how many rows this rank's experts got; ``state`` is the backend's.
    """

    plan: LaunchPlan
    rows: int
    state: Any
    world: object

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that the backend remembers the routing by, under the names of errors."""
        if isinstance(self.state, torch.Tensor):
            return {"handle.state": self.state}
        kept = getattr(self.state, "__dict__", {})
        return {
            f"handle.state.{name}": value
            for name, value in kept.items()
            if isinstance(value, torch.Tensor)
        }


class MoeDispatch(NamedTuple):
    """``outputs`` [R, I]: rows of this rank's experts, expert by expert; ``counts`` [E/W] int64: rows
    of each, with sum R; ``handle``: for :func:`moe_combine`."""

    outputs: torch.Tensor
    counts: torch.Tensor
    handle: MoeHandle


def dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: Group = None,
    **execution: Unpack[Execution],
) -> Done:
    """:func:`moe_dispatch_gemm` with its plan and record. Outputs: ``outputs``, ``counts``,
    ``handle``."""
    world = current(group)
    x, topk_ids, w = plain("moe_dispatch_gemm", ("x", "topk_ids", "w"), (x, topk_ids, w))
    capabilities = world.accelerator.capabilities()
    device = world.accelerator.device
    validate.matrix("x", x)
    validate.matrix("topk_ids", topk_ids)
    for name, tensor in (("x", x), ("topk_ids", topk_ids)):
        validate.on_device(name, tensor, device)
        validate.row_major(name, tensor)
    if not isinstance(w, torch.Tensor) or w.dim() != 3 or 0 in w.shape:
        raise ShapeError("w", validate.describe(w), "[E/W, H, I], all at least 1")
    validate.on_device("w", w, device)
    dtype = validate.dtype_name("x.dtype", x.dtype, capabilities.dtypes)
    validate.same_dtype("w.dtype", w, "x", x)
    out_name = validate.dtype_name("out_dtype", out_dtype or x.dtype, capabilities.out_dtypes)
    if w.shape[1] != x.shape[1]:
        raise ShapeError("w", validate.describe(w), f"[E/W, H, I] with H = {x.shape[1]}, as in x")
    if topk_ids.dtype not in _ID_DTYPES:
        raise DtypeError("topk_ids.dtype", topk_ids.dtype, "torch.int32 or torch.int64")
    if len(topk_ids) != len(x):
        raise ShapeError("topk_ids", validate.describe(topk_ids), f"[T, k] with T = {len(x)}")
    experts = w.shape[0] * world.size
    if topk_ids.device.type == "cpu":  # elsewhere looking would stall the stream
        low, high = int(topk_ids.min()), int(topk_ids.max())
        if low < 0 or high >= experts:
            wrong = low if low < 0 else high
            raise ArgumentError(
                "topk_ids", f"... {wrong} ...", f"expert numbers 0 to {experts - 1}"
            )
    b_layout: Literal["row", "column"] = "row" if w.is_contiguous() else "column"
    if b_layout == "column" and not w.transpose(1, 2).is_contiguous():
        raise LayoutError("w", validate.describe(w), "contiguous [E/W, H, I] or [E/W, I, H]")
    if b_layout not in capabilities.b_layouts:
        raise LayoutError("w", validate.describe(w), "contiguous", why="call .contiguous()")
    plan = plan_for(
        world,
        "moe_dispatch_gemm",
        {
            "tokens": x.shape[0],
            "hidden": x.shape[1],
            "features": w.shape[2],
            "experts": experts,
            "top_k": topk_ids.shape[1],
        },
        dtype,
        out_name,
        b_layout=b_layout,
        chunk=chunk,
    )
    tensors = {"x": x, "topk_ids": topk_ids, "w": w}
    record = world.run(plan, tensors, **execution)
    outputs, counts = record.results["outputs"], record.results["counts"]
    handle = MoeHandle(plan, len(outputs), record.results["state"], world)
    return Done(plan, record, {"outputs": outputs, "counts": counts, "handle": handle})


@untraced
def moe_dispatch_gemm(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    group: Group = None,
) -> MoeDispatch:
    """Send each token to its experts and multiply: outputs = rows of expert e @ w[e].

    Collective: every rank of the world calls it with the same shapes, dtypes and options. Any
    routing is legal: experts without tokens, all tokens on one expert, an expert twice in one
    token's list (then it gets two rows).

    Args:
        x: [T, H], this rank's tokens; row-major contiguous. T is the same on every rank.
        topk_ids: [T, k] int32 or int64, the experts of each token, 0 to E - 1; k from 1 to E.
        w: [E/W, H, I], weights of this rank's experts; contiguous, or the transpose of a contiguous
            [E/W, I, H].
        out_dtype: of the outputs; default: that of ``x``. Accumulation is in float32.
        chunk: rows a communication chunk; default: the planner's choice.
        group: names the world; None: the default one.

    Returns:
        :class:`MoeDispatch`. Rows of one expert are ordered by source rank, token, slot.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (it requires grad, it is a DTensor, fake, ...); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    done = dispatch(x, topk_ids, w, out_dtype=out_dtype, chunk=chunk, group=group).outputs
    return MoeDispatch(done["outputs"], done["counts"], done["handle"])


def combine(
    y: torch.Tensor,
    handle: MoeHandle,
    topk_weights: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    group: Group = None,
    **execution: Unpack[Execution],
) -> Done:
    """:func:`moe_combine` with its plan and record. Output: ``out``."""
    world = current(group)
    capabilities = world.accelerator.capabilities()
    if not isinstance(handle, MoeHandle):
        raise ArgumentError("handle", type(handle).__name__, "what moe_dispatch_gemm returned")
    if handle.world is not world:
        raise ArgumentError(
            "handle",
            "of another world",
            f"one of this world's moe_dispatch_gemm ({world.name!r}); pass the dispatch's group",
        )
    y, topk_weights = plain("moe_combine", ("y", "topk_weights"), (y, topk_weights))
    kept = handle.tensors()
    plain("moe_combine", tuple(kept), tuple(kept.values()))
    shape = handle.plan.shape.model_dump()
    tokens, top_k = shape["tokens"], shape["top_k"]
    if not isinstance(y, torch.Tensor) or y.dim() != 2 or y.shape[1] == 0:
        raise ShapeError("y", validate.describe(y), "[R, D] with D of at least 1")
    if len(y) != handle.rows:
        raise ShapeError(
            "y", validate.describe(y), f"[{handle.rows}, D], a row for each that the dispatch gave"
        )
    validate.on_device("y", y, world.accelerator.device)
    validate.row_major("y", y)
    dtype = validate.dtype_name("y.dtype", y.dtype, capabilities.dtypes)
    out_name = validate.dtype_name("out_dtype", out_dtype or y.dtype, capabilities.out_dtypes)
    validate.matrix("topk_weights", topk_weights)
    validate.on_device("topk_weights", topk_weights, world.accelerator.device)
    if tuple(topk_weights.shape) != (tokens, top_k):
        raise ShapeError("topk_weights", validate.describe(topk_weights), f"[{tokens}, {top_k}]")
    if not topk_weights.dtype.is_floating_point:
        raise DtypeError("topk_weights.dtype", topk_weights.dtype, "a floating-point dtype")
    plan = plan_for(
        world,
        "moe_combine",
        {
            "tokens": tokens,
            "features": y.shape[1],
            "experts": shape["experts"],
            "top_k": top_k,
        },
        dtype,
        out_name,
    )
    out = torch.empty((tokens, y.shape[1]), dtype=validate.DTYPES[out_name], device=y.device)
    tensors = {"y": y, "topk_weights": topk_weights.to(torch.float32).contiguous(), "out": out}
    record = world.run(plan, tensors, options={"state": handle.state}, **execution)
    return Done(plan, record, {"out": out})


@untraced
def moe_combine(
    y: torch.Tensor,
    handle: MoeHandle,
    topk_weights: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Bring experts' results home: out[t] = sum over slots of topk_weights[t, slot] · y[its row].

    Collective. The sum runs in slot order, in float32, and is rounded once.

    Args:
        y: [R, D], one row for each row of the dispatch's outputs, in its order; D is free.
        handle: of the dispatch.
        topk_weights: [T, k], floating point; used as float32.
        out_dtype: of the result; default: that of ``y``.
        group: names the world, which is that of the dispatch; None: the default one.

    Returns:
        [T, D] for this rank's tokens.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (it requires grad, it is a DTensor, fake, ...); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    done = combine(y, handle, topk_weights, out_dtype=out_dtype, group=group).outputs
    result: torch.Tensor = done["out"]
    return result
