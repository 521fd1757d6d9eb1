"""Ring attention: softmax(q kᵀ · scale) v over a sequence that is split over the ranks.

Data flow of one call on rank r:
  k, v (own) ──▶ attention of the own q on them, first
  k, v of the other ranks ──ring, one block a step──▶ attention of q on each block as it arrives
  partial results ──online softmax, in float32, in a fixed order of blocks──▶ out, log-sum-exp
Causal calls split the sequence in 2·W pieces; rank r holds pieces r and 2·W - 1 - r (zigzag), so that
every rank has the same work; whole blocks above the diagonal are skipped.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from typing_extensions import TypedDict, Unpack

from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops import flops, validate
from mkernel.ops import ring_attention_backward as gradients
from mkernel.ops.attention_inputs import checked_documents, common_layout, require_documents
from mkernel.ops.common import Done, Execution, engine_for, plan_for
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import called, register
from mkernel.ops.steps import Steps
from mkernel.plan.invariance import Wanted, encoded
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

_OP = "ring_attention"


def _check_dimensions(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(name, type(tensor).__name__, "a torch.Tensor [B, H, S/W, D]")
    if tensor.dim() != 4 or 0 in tensor.shape:
        raise ShapeError(name, validate.describe(tensor), "[B, H, S/W, D], all at least 1")


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[int, int, int, int, int]:
    """Check the shapes, and return B, Hq, Hkv, S/W, D. ShapeError."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_dimensions(name, tensor)
    batch, heads, rows, width = q.shape
    kv_heads = k.shape[1]
    legal = (batch, kv_heads, rows, width)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != legal:
            raise ShapeError(name, validate.describe(tensor), f"{legal}, as q and k say")
    if heads % kv_heads:
        raise ShapeError("k", validate.describe(k), f"a number of heads that divides q's {heads}")
    return batch, heads, kv_heads, rows, width


@untraced
def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`ring_attention` with its plan and record. Outputs: ``out``, ``lse``."""
    world = current(group)
    if steps is None or cu_seqlens is not None:  # boundaries are looked at in each call
        steps = Steps()
    q, k, v, cu_seqlens = plain(_OP, ("q", "k", "v", "cu_seqlens"), (q, k, v, cu_seqlens))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_dimensions(name, tensor)
        validate.on_device(name, tensor, world.accelerator.device)
    batch, heads, kv_heads, rows, width = _check_shapes(q, k, v)
    layout = common_layout({"q": q, "k": k, "v": v})
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "sequence": rows * world.size,
        "head_dim": width,
        "causal": causal,
    }
    if layout != "heads":
        sizes["layout"] = layout
    if cu_seqlens is not None:
        cu_seqlens = checked_documents(cu_seqlens, rows * world.size, world.accelerator.device)
        sizes["documents"] = True
    engine = engine_for(world, _OP, sizes, str(q.dtype).removeprefix("torch."))
    if cu_seqlens is not None:
        require_documents(engine, _OP)
    capabilities = engine.claims
    if layout not in capabilities.attention_layouts:
        validate.contiguous("q", q)
    dtype = validate.dtype_name("q.dtype", q.dtype, capabilities.dtypes)
    for name, tensor in (("k", k), ("v", v)):
        validate.same_dtype(f"{name}.dtype", tensor, "q", q)
    if scale is not None and not math.isfinite(scale):
        raise ArgumentError("scale", scale, "a finite number")
    plan = plan_for(world, _OP, sizes, dtype, dtype, invariant=invariant, chunk=chunk)
    out = steps.do(torch.empty_like, q)
    lse = steps.empty(q.shape[:3], q, validate.DTYPES[plan.sums])
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens
    options = {"scale": width**-0.5 if scale is None else float(scale)}
    record = steps.launch(world, plan, tensors, options=options, **execution)
    return Done(plan, record, {"out": out, "lse": lse})


class _Options(TypedDict, total=False):
    """Options that both overloads take."""

    causal: bool
    scale: float | None
    chunk: int | None
    cu_seqlens: torch.Tensor | None
    invariant: Wanted
    group: Group


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    invariant: Wanted = None,
    group: Group = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of this rank's queries over the keys and values of all ranks.

    Collective: every rank of the world calls it with the same shapes, dtypes and options. Scores,
    softmax and sums are float32. At most three things are rounded to the dtype: the weights of values,
    what the keys of one rank give, and the result; its relative error is within half an eps.

    Args:
        q: [B, Hq, S/W, D]. k, v: [B, Hkv, S/W, D]; Hkv divides Hq (grouped queries: query head h
            uses head h · Hkv // Hq). All contiguous; or, where the accelerator takes it
            (``attention_layouts`` of its capabilities), all views ``x.transpose(1, 2)`` of contiguous
            x [B, S/W, H, D], as ``out`` then is.
        causal: position i sees positions up to i. Ranks then hold the positions that
            :func:`zigzag_positions` gives, S a multiple of 2·W; else rank r holds
            [r·S/W, (r+1)·S/W).
        scale: of the scores; default D^-0.5.
        chunk: positions a communication chunk; default: the planner's choice.
        cu_seqlens: [N + 1] int32, for N documents that are packed into the sequence: where each begins,
            from 0 to S, and none before the one before it. A position then sees positions of its own
            document alone. The values count positions of the whole sequence, hold for every one of the
            batch, and are the same on every rank; they lie on the CPU, where they are checked, or
            on q's device. How the sequence is split does not depend on them. Accelerators whose
            capabilities have ``documents`` take it.
        return_lse: also return the log-sum-exp of the scaled scores.
        invariant: promise that a row's bits depend on that row and the keys that it sees alone, counted
            from the first of its document, for every number of ranks (docs/invariance.md); True and
            any ``Invariant`` are the same. Gradients are not promised. None: as the world says.
        group: names the world; None: the default one.

    Returns:
        out [B, Hq, S/W, D] in q's dtype; with ``return_lse`` (out, lse [B, Hq, S/W] float32;
        of float64 q everything is float64).

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.

    Source of the online softmax: Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018; of the ring: Liu, Zaharia and Abbeel, "Ring Attention", 2023.
    """
    attends, named = called(group)
    out: torch.Tensor
    out, lse = attends.ring_attention(
        q, k, v, cu_seqlens, causal=causal, scale=scale, chunk=chunk, invariant=encoded(invariant),
        group=named,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _kernel(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    done = call(**given).outputs
    return done["out"], done["lse"]


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_shapes(q, k, v)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=sums)


register(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens=None, *, bool causal=False, "
    "float? scale=None, int? chunk=None, str? invariant=None, str group) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    gradients.save,
    gradients.backward,
    flops=flops.attention,
)
