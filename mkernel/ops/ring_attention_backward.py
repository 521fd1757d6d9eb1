"""The derivative of ring attention: one call, in which keys and values go round the ring again.

Data flow of one call on rank r:
  q, dO (own) and the forward's log-sum-exp stay; k, v of every rank come by, one block a step
  scores are computed again ──▶ added to dq here, and to dk, dv of the block, which follow it
  after W steps dk, dv of the own block are home; sums are float32 and rounded once
(`streams`; on `hopper` keys and values go to every rank at once, and their gradients straight home)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from mkernel.ops import flops, validate
from mkernel.ops.attention_inputs import checked_documents, common_layout, lying, require_documents
from mkernel.ops.common import Done, Execution, engine_for, plan_for
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import ops, register
from mkernel.ops.steps import Steps
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

OP = "ring_attention_backward"


@untraced
def call(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    chunk: int | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Compute the gradients of :func:`mkernel.ring_attention`, with their plan and record. Outputs:
    ``grad_q``, ``grad_k``, ``grad_v``.

    Args:
        grad_out: of ``out``. grad_lse: of ``lse``; None: it has none. out, lse: as the call returned
            them. The others: as that call had them.
    """
    world = current(group)
    if steps is None or cu_seqlens is not None:  # boundaries are looked at in each call
        steps = Steps()
    given = {"grad_out": grad_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if grad_lse is not None:
        given["grad_lse"] = grad_lse
    if cu_seqlens is not None:
        given["cu_seqlens"] = cu_seqlens
    given = dict(zip(given, plain(OP, tuple(given), tuple(given.values())), strict=True))
    layout = common_layout({"q": q, "k": k, "v": v})
    batch, heads, rows, width = q.shape
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "kv_heads": k.shape[1],
        "sequence": rows * world.size,
        "head_dim": width,
        "causal": causal,
    }
    if cu_seqlens is not None:
        sizes["documents"] = True
    asked = {**sizes, "layout": layout}
    engine = engine_for(world, OP, asked, str(q.dtype).removeprefix("torch."))
    claims = engine.claims
    dtype = validate.dtype_name("q.dtype", q.dtype, claims.dtypes)
    found = {f"grad_{name}": steps.do(torch.empty_like, given[name]) for name in ("q", "k", "v")}
    if layout not in claims.attention_layouts:
        layout = "heads"
    given = {
        name: lying(steps, tensor, layout)
        if tensor.dim() == 4
        else steps.do(Tensor.contiguous, tensor)
        for name, tensor in given.items()
    }
    written = {name: lying(steps, tensor, layout) for name, tensor in found.items()}
    if layout != "heads":
        sizes["layout"] = layout
    if cu_seqlens is not None:
        require_documents(engine, OP)
        checked_documents(cu_seqlens, rows * world.size, world.accelerator.device)
    plan = plan_for(world, OP, sizes, dtype, dtype, invariant="off", chunk=chunk)
    options = {"scale": width**-0.5 if scale is None else float(scale)}
    record = steps.launch(world, plan, {**given, **written}, options=options, **execution)
    for name, tensor in found.items():
        if written[name] is not tensor:
            steps.do(Tensor.copy_, tensor, written[name])
    return Done(plan, record, found)


def _kernel(**given: Any) -> tuple[Tensor, Tensor, Tensor]:
    found = call(**given).outputs
    return found["grad_q"], found["grad_k"], found["grad_v"]


def _fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


register(
    f"{OP}(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    "Tensor? cu_seqlens, Tensor out, Tensor lse, *, bool causal, float? scale=None, "
    "int? chunk=None, str group) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    flops=flops.attention_backward,
)


def save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    """Keep all tensors of the call."""
    ctx.set_materialize_grads(False)
    ctx.options = {name: each for name, each in keyword_only_inputs.items() if name != "invariant"}
    ctx.save_for_backward(*inputs, *output)


def backward(ctx: Any, of_out: Tensor | None, of_lse: Tensor | None) -> Any:
    """Compute dq, dk, dv in one call; boundaries of documents have no gradient."""
    *inputs, out, lse = ctx.saved_tensors
    if of_out is None:
        of_out = torch.zeros_like(out)
    found = ops.ring_attention_backward(of_out, of_lse, *inputs, out, lse, **ctx.options)
    return *found, None
