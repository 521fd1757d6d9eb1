"""Derivatives of the MoE ops, each one call in which the other one's rows travel; or, on an accelerator
without that call, composed of several (:mod:`mkernel.ops.moe_composed`).

With y = outputs of the dispatch and p the place (token, slot) of a row r of expert e:

    y[r] = x[t] @ w[e]               dx[t] = sum of dy[r] @ w[e]^T   dw[e] = sum of x[t]^T dy[r]
    out[t] = sum of weight[p] y[r]   dy[r] = weight[p] dout[t]       dweight[p] = dout[t] . y[r]

With activation="silu_and_mul" outputs are silu(gate) * up of y = [gate, up]; y is not kept.

Rows of dx come home as in a combine; x, for dw, and dout go where the dispatch sends tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkernel.ops import flops, moe_composed, validate
from mkernel.ops.common import plan_for
from mkernel.ops.gemm import GROUP
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import ops, register
from mkernel.ops.steps import Steps
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World


def _named(world: World, name: str, tensor: Tensor) -> DtypeName:
    return validate.dtype_name(name, tensor.dtype, world.engine("moe_dispatch_gemm").claims.dtypes)


def weights_as(steps: Steps, topk_weights: Tensor, plan: LaunchPlan) -> Tensor:
    """Return the weights packed and in the dtype of the plan's sums."""
    made: Tensor = steps.do(Tensor.to, topk_weights, validate.DTYPES[plan.sums])
    return made if made.is_contiguous() else steps.do(Tensor.contiguous, made)


@untraced
def _dispatch(
    grad_outputs: Tensor,
    x: Tensor,
    w: Tensor,
    counts: Tensor,
    routing: Tensor,
    top_k: int,
    capacity: int | None,
    chunk: int | None,
    invariant: str | None,
    group: Group,
    steps: Steps,
) -> tuple[Tensor, Tensor]:
    world, op = current(group), "moe_dispatch_backward"
    names = ("grad_outputs", "x", "w", "routing")
    given = plain(op, names, (grad_outputs, x, w, routing))
    grad_outputs, x, w, routing = given
    if moe_composed.composes(world, op, counts, grad_outputs, x, w):
        return moe_composed.dispatch(
            world, grad_outputs, x, w, (counts, routing), top_k, chunk, invariant
        )
    plan = plan_for(
        world,
        op,
        {
            "tokens": x.shape[0],
            "hidden": x.shape[1],
            "features": w.shape[2],
            "experts": w.shape[0] * world.size,
            "top_k": top_k,
            **({} if capacity is None else {"capacity": capacity}),
        },
        _named(world, "x.dtype", x),
        _named(world, "grad_outputs.dtype", grad_outputs),
        b_layout=validate.expert_layout("w", w, world.engine(op).claims),
        chunk=chunk,
        invariant=invariant,
    )
    of_x, of_w = steps.do(torch.empty_like, x), steps.do(torch.empty_like, w)
    steps.launch(
        world, plan, {**dict(zip(names, given, strict=True)), "grad_x": of_x, "grad_w": of_w}
    )
    return of_x, of_w


def _dispatch_fake(
    grad_outputs: Tensor, x: Tensor, w: Tensor, counts: Tensor, routing: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


@untraced
def _combine(
    grad_out: Tensor,
    y: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    invariant: str | None,
    group: Group,
    steps: Steps,
) -> tuple[Tensor, Tensor]:
    world, op = current(group), "moe_combine_backward"
    names = ("grad_out", "y", "routing", "topk_weights")
    given = plain(op, names, (grad_out, y, routing, topk_weights))
    grad_out, y, routing, topk_weights = given
    if moe_composed.composes(world, op, counts, grad_out, y):
        return moe_composed.combine(world, grad_out, y, (counts, routing), topk_weights)
    tensors = dict(zip(names, given, strict=True))
    plan = plan_for(
        world,
        op,
        {
            "tokens": topk_weights.shape[0],
            "features": y.shape[1],
            "experts": counts.numel() * world.size,
            "top_k": topk_weights.shape[1],
        },
        _named(world, "y.dtype", y),
        _named(world, "grad_out.dtype", grad_out),
        invariant=invariant,
    )
    weights = weights_as(steps, topk_weights, plan)
    of_y, of_weights = steps.do(torch.empty_like, y), steps.do(torch.empty_like, weights)
    tensors |= {"topk_weights": weights, "grad_y": of_y, "grad_weights": of_weights}
    steps.launch(world, plan, tensors)
    return of_y, steps.do(Tensor.to, of_weights, topk_weights.dtype)


def _combine_fake(
    grad_out: Tensor, y: Tensor, counts: Tensor, routing: Tensor, topk_weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    weights = topk_weights.new_empty(topk_weights.shape)
    return torch.empty_like(y), weights


register(
    "moe_dispatch_backward(Tensor grad_outputs, Tensor x, Tensor w, Tensor counts, Tensor routing, *, "
    f"int top_k, int? capacity=None, int? chunk=None, {GROUP}) -> (Tensor, Tensor)",
    _dispatch,
    _dispatch_fake,
    flops=flops.dispatch_backward,
    any_rows=("grad_outputs",),
)
register(
    "moe_combine_backward(Tensor grad_out, Tensor y, Tensor counts, Tensor routing, "
    f"Tensor topk_weights, *, {GROUP}) -> (Tensor, Tensor)",
    _combine,
    _combine_fake,
    any_rows=("y",),
)


def save_dispatch(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Keep x, w and the handle."""
    x, topk_ids, w, *given = inputs
    names = ("capacity", "chunk", "invariant", "group")
    ctx.options = {name: keyword_only_inputs[name] for name in names}
    ctx.activation = keyword_only_inputs["activation"]
    ctx.out_dtype = keyword_only_inputs["out_dtype"]
    ctx.again = given[1] is not None
    counts, routing = given if ctx.again else output[1:]
    ctx.save_for_backward(x, topk_ids, w, counts, routing)


def dispatch_backward(ctx: Any, of_outputs: Tensor, *_: Any) -> Any:
    """Compute dx and dw in one call. With an activation the product is made again first."""
    x, topk_ids, w, counts, routing = ctx.saved_tensors
    if ctx.activation is not None:
        again = (counts, routing) if ctx.again else ()
        product, *_ = ops.moe_dispatch_gemm(
            x, topk_ids, w, *again, out_dtype=ctx.out_dtype, **ctx.options
        )
        of_outputs = _silu_and_mul_backward(of_outputs, product)
    of_x, of_w = ops.moe_dispatch_backward(
        of_outputs.contiguous(), x, w, counts, routing, top_k=topk_ids.shape[1], **ctx.options
    )
    return of_x, None, of_w, None, None


def _silu_and_mul_backward(of_outputs: Tensor, product: Tensor) -> Tensor:
    """Compute the gradients of [gate, up], with s = sigmoid(gate): dout up s (1 + gate (1 - s)), and
    dout gate s."""
    sums = torch.promote_types(product.dtype, torch.float32)
    of_outputs = of_outputs.to(sums)
    # Torch 2.6, tracing, cannot tell whether the second of two chunks has columns.
    half = product.shape[1] // 2
    gate, up = (product.to(sums).narrow(1, start, half) for start in (0, half))
    s = torch.sigmoid(gate)
    of_gate = of_outputs * up * s * (1 + gate * (1 - s))
    return torch.cat([of_gate, of_outputs * gate * s], dim=1).to(product.dtype)


def save_combine(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Keep y, the handle and the weights."""
    ctx.options = {name: keyword_only_inputs[name] for name in ("invariant", "group")}
    ctx.save_for_backward(*inputs)


def combine_backward(ctx: Any, of_out: Tensor) -> Any:
    """Compute dy and dweights in one call."""
    of_y, of_weights = ops.moe_combine_backward(
        of_out.contiguous(), *ctx.saved_tensors, **ctx.options
    )
    return of_y, None, None, of_weights
