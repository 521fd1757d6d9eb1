"""The second half of an MoE layer: grouped GEMM, then the combine that brings results home.

Data flow of one call on rank r, of rows ``h`` in the order of a dispatch's outputs:
  rows of an expert ──▶ @ w2[expert] = y, in float32
Results come home in one of two ways, which the plan chooses (``returns``):
  slots: y ──rounded to partial_dtype──▶ its token's rank; out[t] = sum over slots, in order, of
    topk_weights[t, slot] · y[row of (t, slot)]
  ranks: p[r, t] = the same sum over the slots of t whose experts live on rank r, weighted there
    ──rounded to partial_dtype──▶ the token's rank; out[t] = sum over ranks, in order, of p[r, t]
In a hierarchical exchange these sums are of the slots, or ranks, of one node; each is rounded to
partial_dtype again, and out[t] is the sum over nodes, in order.
Invariant results are added by groups of experts and their tree instead, the same in both ways and
exchanges (:mod:`mkernel.plan.invariance`).
Sums are float32, and ``out`` is rounded from them once. So results are deterministic either way, of the
same plan; but of a narrow ``partial_dtype``, which is rounded to before, the ways round differently.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from mkernel.errors import ShapeError
from mkernel.ops import flops, moe_composed, validate
from mkernel.ops.around import refuse_gradients
from mkernel.ops.common import Done, Execution, plan_for
from mkernel.ops.gemm import GROUP
from mkernel.ops.moe import MoeHandle, check_routed, expect_handle
from mkernel.ops.moe_backward import weights_as
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import called, ops, register
from mkernel.ops.scaled_experts import check_experts, default_results, dtypes, packed
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import NOTHING, Around
from mkernel.plan.invariance import Wanted, encoded
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.plan.pipeline import Returns
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

OP = "moe_gemm_combine"
_OPERANDS = ("h", "w2")
_BACKWARD = "moe_gemm_combine_backward"


def _expect_shapes(h: Tensor, w2: Tensor) -> None:
    if not isinstance(w2, Tensor) or w2.dim() != 3 or 0 in w2.shape:
        raise ShapeError("w2", validate.describe(w2), "[E/W, I, H], all at least 1")
    if w2.shape[1] != h.shape[1]:
        legal = f"[E/W, I, H] with I = {h.shape[1]}, as in h"
        raise ShapeError("w2", validate.describe(w2), legal)


def _plan(
    world: World,
    op: str,
    h: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    out_dtype: torch.dtype,
    *,
    partial_dtype: torch.dtype | None = None,
    returns: Returns | None = None,
    around: Around = NOTHING,
    invariant: str | None,
) -> LaunchPlan:
    claims = world.engine(op).claims
    tokens, top_k = topk_weights.shape
    experts, features, hidden = w2.shape
    wishes: dict[str, Any] = {} if returns is None else {"returns": returns}
    if partial_dtype is not None:
        # Sums' dtype is legal beside those of results; the plan says which that is.
        wishes["partial_dtype"] = validate.dtype_name(
            "partial_dtype", partial_dtype, get_args(DtypeName)
        )
    dtype, out_name = dtypes(_OPERANDS, h, w2, out_dtype, around, claims)
    return plan_for(
        world,
        op,
        {
            "tokens": tokens,
            "hidden": hidden,
            "features": features,
            "experts": experts * world.size,
            "top_k": top_k,
            **wishes,
        },
        dtype,
        out_name,
        b_layout=validate.expert_layout("w2", w2, claims),
        around=around,
        invariant=invariant,
    )


@untraced
def gemm_combine(
    h: Tensor,
    w2: Tensor,
    handle: MoeHandle,
    topk_weights: Tensor,
    *,
    h_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    returns: Returns | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`moe_gemm_combine` with its plan and record. Output: ``out``."""
    world, steps = current(group), steps or Steps()
    world.engine(OP)  # else Unsupported
    expect_handle(handle)
    names = ("h", "w2", "handle.counts", "handle.routing", "topk_weights", "h_scale", "w2_scale")
    given = (h, w2, *handle, topk_weights, h_scale, w2_scale)
    h, w2, counts, routing, topk_weights, h_scale, w2_scale = plain(OP, names, given)
    experts = check_routed(steps, world, "h", h, counts, routing, topk_weights)
    _expect_shapes(h, w2)
    validate.on_device("w2", w2, world.accelerator.device)
    if len(w2) * world.size != experts:
        legal = f"[{len(counts)}, I, H]: of as many experts as the dispatch had"
        raise ShapeError("w2", validate.describe(w2), legal)
    device = world.accelerator.device
    around = check_experts(OP, _OPERANDS, (h, w2, h_scale, w2_scale), device)
    kind = out_dtype or default_results(h)
    plan = _plan(
        world, OP, h, w2, topk_weights, kind,
        partial_dtype=partial_dtype, returns=returns, around=around, invariant=invariant,
    )  # fmt: skip
    out = steps.empty((len(topk_weights), w2.shape[2]), h, kind)
    weights = weights_as(steps, topk_weights, plan)
    tensors = {"h": h, "w2": w2, "routing": routing, "topk_weights": weights, "out": out}
    tensors |= packed(steps, _OPERANDS, h_scale, w2_scale)
    record = steps.launch(world, plan, tensors, **execution)
    return Done(plan, record, {"out": out})


def moe_gemm_combine(
    h: Tensor,
    w2: Tensor,
    handle: MoeHandle,
    topk_weights: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    partial_dtype: torch.dtype | None = None,
    returns: Returns | None = None,
    h_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    invariant: Wanted = None,
    group: Group = None,
) -> Tensor:
    """Multiply by each expert's second weight and bring the results home:
    out[t] = sum over slots of topk_weights[t, slot] · (h[its row] @ w2[its expert]).

    Collective: every rank of the world calls it with the same shapes, dtypes and options. It does what
    :func:`moe_combine` does with rows that were multiplied before. Slots without an expert add nothing,
    whatever their weight. Sums are float32, in a fixed order, so the same call gives the same bits;
    what travels is rounded to ``partial_dtype``, and the sum of that to ``out_dtype``. Where ranks
    relay between nodes, each node's sum is rounded to ``partial_dtype`` too.

    Args:
        h: [R, I], one row for each row of the dispatch's outputs, in its order. After a dispatch with
            a capacity R is the capacity, and rows that are nobody's are not read.
        w2: [E/W, I, H], weights of this rank's experts; contiguous, or the transpose of a contiguous
            [E/W, H, I].
        handle: of the dispatch; any number of times.
        topk_weights: [T, k], floating point; used as float32, of float64 as float64.
        out_dtype: of the result; default: that of ``h``.
        partial_dtype: in which results travel home; default: ``out_dtype``, of results of fewer than
            4096 elements float32. torch.float32: what travels is not rounded, and twice the bytes of
            16-bit results travel. ``cuda`` rounds products to the dtype of ``h`` before. Beside
            invariant results it is theirs.
        returns: how they travel: ``"slots"``, each by itself, weighted and added at home in the order
            of slots; ``"ranks"``, the weighted sum of a token's results on one rank, added at home in
            the order of ranks; None: what is predicted to be faster. Both are right within the
            roundings of ``partial_dtype``, but not equal in bits, unless these are invariant.
        h_scale, w2_scale: float32, of e4m3 ``w2`` (``torch.float8_e4m3fn``), as ``w_scale`` is in
            :func:`moe_dispatch_gemm`: w2_scale [E/W, I / 128, H / 128]. h is e4m3 too, beside h_scale
            [R, I / 128]; or it has 16 bits, and rows are quantised by blocks of 128. What travels is
            rounded to ``partial_dtype``; the result is bfloat16, or as a 16-bit h. There are no
            gradients.
        invariant: promise that a row's bits depend on that row and the weights alone, for every number
            of ranks that divides the segments, by which experts are grouped (docs/invariance.md).
            None: as the world says.
        group: names the world, which is that of the dispatch; None: the default one.

    Returns:
        [T, H] for this rank's tokens.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...); nothing was started.
        Unsupported: the accelerator of the dispatch does not provide the op; call :func:`moe_combine`
            on products of your own.
        NotInitialized, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    options: dict[str, Any] = {
        "out_dtype": out_dtype,
        "partial_dtype": partial_dtype,
        "returns": returns,
        "invariant": encoded(invariant),
    }
    combines, named = called(group)
    expect_handle(handle)
    if h_scale is not None or w2_scale is not None:
        refuse_gradients(
            OP, h=h, w2=w2, topk_weights=topk_weights, h_scale=h_scale, w2_scale=w2_scale
        )
        home: Tensor = combines.moe_gemm_combine_scaled(
            h, w2, *handle, topk_weights, h_scale, w2_scale, **options, group=named
        )
        return home
    result: Tensor = combines.moe_gemm_combine(h, w2, *handle, topk_weights, **options, group=named)
    return result


# ---- what torch knows of it ----------------------------------------------------------------------


def _kernel(
    h: Tensor, w2: Tensor, counts: Tensor, routing: Tensor, topk_weights: Tensor, **options: Any
) -> Tensor:
    handle = MoeHandle(counts, routing)
    result: Tensor = gemm_combine(h, w2, handle, topk_weights, **options).outputs["out"]
    return result


def _fake(
    h: Tensor,
    w2: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> Tensor:
    _expect_shapes(h, w2)
    return h.new_empty((topk_weights.shape[0], w2.shape[2]), dtype=out_dtype or h.dtype)


def _scaled_fake(
    h: Tensor,
    w2: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    h_scale: Tensor | None,
    w2_scale: Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    kind = out_dtype or default_results(h)
    return _fake(h, w2, counts, routing, topk_weights, out_dtype=kind, **options)


@untraced
def _backward(
    grad_out: Tensor,
    h: Tensor,
    w2: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    invariant: str | None,
    group: Group,
    steps: Steps,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dh[r] = weight[p] (dout[t] @ w2[e]^T), dweight[p] = (dout[t] @ w2[e]^T) · h[r] and
    dw2[e] = sum of h[r]^T (weight[p] dout[t]), of row r of place p = (t, slot) with expert e."""
    world = current(group)
    names = ("grad_out", "h", "w2", "routing", "topk_weights")
    given = plain(_BACKWARD, names, (grad_out, h, w2, routing, topk_weights))
    grad_out, h, w2, routing, topk_weights = given
    if moe_composed.composes(world, _BACKWARD, counts, grad_out, h, w2):
        return moe_composed.gemm_combine(world, grad_out, h, w2, (counts, routing), topk_weights)
    plan = _plan(world, _BACKWARD, h, w2, topk_weights, grad_out.dtype, invariant=invariant)
    weights = weights_as(steps, topk_weights, plan)
    found = [steps.do(torch.empty_like, each) for each in (h, w2, weights)]
    tensors = dict(zip(names, given, strict=True)) | {"topk_weights": weights}
    tensors |= dict(zip(("grad_h", "grad_w2", "grad_weights"), found, strict=True))
    steps.launch(world, plan, tensors)
    of_h, of_w2, of_weights = found
    return of_h, of_w2, steps.do(Tensor.to, of_weights, topk_weights.dtype)


def _backward_fake(
    grad_out: Tensor,
    h: Tensor,
    w2: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = topk_weights.new_empty(topk_weights.shape)
    return torch.empty_like(h), torch.empty_like(w2), weights


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.options = {name: keyword_only_inputs[name] for name in ("invariant", "group")}
    ctx.save_for_backward(*inputs)


def _derivatives(ctx: Any, of_out: Tensor) -> Any:
    of_h, of_w2, of_weights = ops.moe_gemm_combine_backward(
        of_out.contiguous(), *ctx.saved_tensors, **ctx.options
    )
    return of_h, of_w2, None, None, of_weights


register(
    "moe_gemm_combine(Tensor h, Tensor w2, Tensor counts, Tensor routing, Tensor topk_weights, *, "
    f"ScalarType? out_dtype=None, ScalarType? partial_dtype=None, str? returns=None, {GROUP}) "
    "-> Tensor",
    _kernel,
    _fake,
    _save,
    _derivatives,
    flops=flops.combine,
    any_rows=("h",),
)
register(
    "moe_gemm_combine_scaled(Tensor h, Tensor w2, Tensor counts, Tensor routing, Tensor topk_weights, "
    "Tensor? h_scale, Tensor? w2_scale, *, ScalarType? out_dtype=None, ScalarType? partial_dtype=None, "
    f"str? returns=None, {GROUP}) -> Tensor",
    _kernel,
    _scaled_fake,
    flops=flops.combine,
    range_name=OP,
)
register(
    "moe_gemm_combine_backward(Tensor grad_out, Tensor h, Tensor w2, Tensor counts, Tensor routing, "
    f"Tensor topk_weights, *, {GROUP}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    flops=flops.combine_backward,
    any_rows=("h",),
)
