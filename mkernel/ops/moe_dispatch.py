"""MoE dispatch without a product: the rows of this rank's experts, for a caller's own kernels.

Data flow and order of rows are those of a dispatch+GEMM (:mod:`mkernel.ops.moe`), whose handle this op
makes too, or takes: then its routing is used again, and no ids travel. The derivative is a combine with
weights of 1.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import validate
from mkernel.ops.around import check_scale, refuse_gradients
from mkernel.ops.common import Done, Execution, plan_for
from mkernel.ops.gemm import GROUP
from mkernel.ops.moe import (
    ID_DTYPES,
    MoeHandle,
    check_reused,
    expect_experts,
    expect_handle,
    mark,
    new_handle,
    new_routing,
    remember,
    routing_words,
)
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import called, ops, register
from mkernel.ops.scaled_experts import QUANTISED
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import NOTHING, Around
from mkernel.plan.invariance import Wanted, encoded
from mkernel.plan.model import BLOCK, E4M3, Scales
from mkernel.plan.shapes import MAX_DIMENSION, check_integer
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

OP = "moe_dispatch"


class MoeRows(NamedTuple):
    """The results of a dispatch without a product on one rank.

    ``rows`` [R, H]: of this rank's experts, expert by expert; ``scales`` [R, H / 128] in float32, of
    e4m3 rows, else None; ``counts`` [E/W] int64: rows of each expert, with sum R, so
    ``counts.cumsum(0)`` is where each ends; ``handle``: for :func:`moe_combine` and for further
    dispatches. With a capacity ``rows`` is [capacity, H], and rows from R on are zero, with
    scales of 1.
    """

    rows: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: MoeHandle


def _expect_shapes(x: Tensor, topk_ids: Tensor) -> None:
    validate.matrix("x", x)
    validate.matrix("topk_ids", topk_ids)
    if topk_ids.shape[0] != x.shape[0]:
        raise ShapeError("topk_ids", validate.describe(topk_ids), f"[T, k] with T = {x.shape[0]}")


def _scales(x: Tensor, x_scale: Tensor | None, quantise: str | None, device: str) -> Around:
    """Check the scales of e4m3 rows, and return what a plan is to know of them."""
    if quantise not in (None, "block"):
        raise ArgumentError("quantise", repr(quantise), "'block' or None")
    if quantise is not None and x.dtype not in QUANTISED:
        raise DtypeError("x.dtype", x.dtype, "torch.float16 or torch.bfloat16, beside quantise")
    if x_scale is None and x.dtype == torch.float8_e4m3fn:
        raise DtypeError("x.dtype", x.dtype, "e4m3 beside x_scale, or another dtype")
    if x_scale is not None:
        if x.dtype != torch.float8_e4m3fn:
            raise DtypeError("x.dtype", x.dtype, "torch.float8_e4m3fn, beside x_scale")
        check_scale("x_scale", x_scale, device)
        blocks = (x.shape[0], x.shape[1] // BLOCK)
        if tuple(x_scale.shape) != blocks:
            raise ShapeError("x_scale", validate.describe(x_scale), f"{[*blocks]}, by blocks")
    elif quantise is None:
        return NOTHING
    name = (
        None
        if quantise is None
        else validate.dtype_name("x.dtype", x.dtype, ("float16", "bfloat16"))
    )
    return Around(scales=Scales(mode="block", quantises=name))


@untraced
def dispatch_rows(
    x: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor | None = None,
    counts: Tensor | None = None,
    routing: Tensor | None = None,
    *,
    num_experts: int,
    quantise: str | None = None,
    capacity: int | None = None,
    chunk: int | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`moe_dispatch` with its plan and record. Outputs: ``rows``, ``counts``, ``handle``;
    ``scales``, where rows are e4m3. ``counts``, ``routing``: of the handle whose routing is used."""
    world, steps = current(group), steps or Steps()
    names = ("x", "topk_ids", "x_scale", "handle.counts", "handle.routing")
    given = plain(OP, names, (x, topk_ids, x_scale, counts, routing))
    x, topk_ids, x_scale, counts, routing = given
    claims, device = world.engine(OP).claims, world.accelerator.device
    _expect_shapes(x, topk_ids)
    for name, tensor in (("x", x), ("topk_ids", topk_ids)):
        validate.on_device(name, tensor, device)
        validate.row_major(name, tensor)
    if topk_ids.dtype not in ID_DTYPES:
        raise DtypeError("topk_ids.dtype", topk_ids.dtype, "torch.int32 or torch.int64")
    check_integer(ArgumentError, "num_experts", num_experts, MAX_DIMENSION)
    if capacity is not None:
        check_integer(ArgumentError, "capacity", capacity, MAX_DIMENSION)
    around = _scales(x, x_scale, quantise, device)
    dtype = E4M3
    if around.scales is None:
        dtype = validate.dtype_name("x.dtype", x.dtype, claims.dtypes)
    if routing is not None:
        assert counts is not None
        experts = check_reused(steps, world, topk_ids, counts, routing, capacity)
        if experts != num_experts:
            raise ArgumentError(
                "num_experts", num_experts, f"{experts}, as in the handle's dispatch"
            )
    elif topk_ids.device.type == "cpu":  # elsewhere looking would stall the stream
        steps.do(expect_experts, topk_ids, num_experts)
    plan = plan_for(
        world,
        OP,
        {
            "tokens": x.shape[0],
            "hidden": x.shape[1],
            "experts": num_experts,
            "top_k": topk_ids.shape[1],
            **({} if capacity is None else {"capacity": capacity}),
            **({} if routing is None else {"routed": True}),
        },
        dtype,
        dtype,
        around=around,
        chunk=chunk,
        invariant=invariant,
    )
    own = new_routing(steps, world, topk_ids, num_experts) if routing is None else routing
    tensors = {"x": x, "topk_ids": topk_ids, "routing": own}
    if x_scale is not None:
        whole = x_scale.is_contiguous()
        tensors["x_scale"] = x_scale if whole else steps.do(Tensor.contiguous, x_scale)
    record = steps.launch(world, plan, tensors, **execution)
    if routing is None:
        steps.do(remember, own, mark(world))
        counts = record.results["counts"]
    assert counts is not None
    return Done(
        plan, record, {**record.results, "counts": counts, "handle": MoeHandle(counts, own)}
    )


def moe_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    capacity: int | None = None,
    chunk: int | None = None,
    x_scale: Tensor | None = None,
    quantise: Literal["block"] | None = None,
    handle: MoeHandle | None = None,
    invariant: Wanted = None,
    group: Group = None,
) -> MoeRows:
    """Send each token to the ranks of its experts, and return the rows of this rank's experts.

    Collective, as :func:`moe_dispatch_gemm`, whose order of rows, counts and handle it has; nothing is
    multiplied. Multiply the rows as you like, with ``counts.cumsum(0, dtype=torch.int32)`` as the
    ``offs`` of ``torch._grouped_mm``, and bring the results home by :func:`moe_combine`.

    Args:
        x: [T, H], this rank's tokens; row-major contiguous. T is the same on every rank.
        topk_ids: [T, k] int32 or int64, the experts of each token, 0 to E - 1; k from 1 to E. -1:
            none. With a handle only their shape is read.
        num_experts: E, of all ranks, a multiple of their number; rank r has experts r · E/W and up.
        capacity: rows that each rank has for those of all its experts, so that shapes do not depend on
            the routing, as CUDA graphs want. With a handle: that of its dispatch.
        chunk: rows a communication chunk; default: the planner's choice.
        x_scale: float32 [T, H / 128], of x in ``torch.float8_e4m3fn``, by blocks of 128; H is a
            multiple of 128. They travel with their rows. There are no gradients.
        quantise: ``"block"``: a 16-bit x is quantised by blocks of 128, each token once, before it
            travels. There are no gradients.
        handle: of an earlier dispatch of the same routing, with or without a product: its routing is
            used again, and no ids travel.
        invariant: as :func:`mkernel.moe_gemm_combine` takes it, of the gradient of x; rows only travel.
        group: names the world; None: the default one.

    Returns:
        :class:`MoeRows`. Rows of one expert are ordered by source rank, token, slot.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...), or a handle on an accelerator that uses no
            routing again; nothing was started.
        CapacityExceeded: a rank got more rows than ``capacity``; every rank raises it that can know,
            and the world goes on.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    dispatches, named = called(group)
    if handle is not None:
        expect_handle(handle)
    if x_scale is not None or quantise is not None:
        refuse_gradients(OP, x=x, x_scale=x_scale)
    rows, counts, routing, scales = dispatches.moe_dispatch(
        x,
        topk_ids,
        x_scale,
        *(handle or (None, None)),
        num_experts=num_experts,
        quantise=quantise,
        capacity=capacity,
        chunk=chunk,
        invariant=encoded(invariant),
        group=named,
    )
    made = handle or MoeHandle(counts, routing)
    scaled = x_scale is not None or quantise is not None
    return MoeRows(rows, scales if scaled else None, made.counts, made)


# ---- what torch knows of it ----------------------------------------------------------------------


def _kernel(
    steps: Steps, x: Tensor, routing: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = dispatch_rows(x, routing=routing, **given, steps=steps).outputs
    counts, words = new_handle(steps, x, found["handle"], routed=routing is not None)
    scales = found.get("scales")
    if scales is None:
        scales = steps.empty((0,), x, torch.float32)
    return found["rows"], counts, words, scales


def _fake(
    x: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor | None,
    counts: Tensor | None,
    routing: Tensor | None,
    *,
    num_experts: int,
    quantise: str | None = None,
    capacity: int | None = None,
    group: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    world = current(group)
    _expect_shapes(x, topk_ids)
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    scaled, routed = x_scale is not None or quantise is not None, routing is not None
    kind = torch.float8_e4m3fn if scaled else x.dtype
    words = 0 if routed else routing_words(world, topk_ids, num_experts)
    return (
        x.new_empty((rows, x.shape[1]), dtype=kind),
        x.new_empty(0 if routed else num_experts // world.size, dtype=torch.int64),
        x.new_empty(words, dtype=torch.int32),
        x.new_empty((rows, x.shape[1] // BLOCK) if scaled else (0,), dtype=torch.float32),
    )


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    _, topk_ids, _, counts, routing = inputs
    ctx.options = {name: keyword_only_inputs[name] for name in ("invariant", "group")}
    ctx.places = topk_ids.shape
    ctx.save_for_backward(*(output[1:3] if routing is None else (counts, routing)))


def _backward(ctx: Any, of_rows: Tensor, *_: Any) -> Any:
    counts, routing = ctx.saved_tensors
    ones = of_rows.new_ones(ctx.places, dtype=torch.promote_types(of_rows.dtype, torch.float32))
    of_x = ops.moe_combine(of_rows.contiguous(), counts, routing, ones, **ctx.options)
    return of_x, None, None, None, None


register(
    "moe_dispatch(Tensor x, Tensor topk_ids, Tensor? x_scale, Tensor? counts, Tensor? routing, *, "
    f"int num_experts, str? quantise=None, int? capacity=None, int? chunk=None, {GROUP}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    _save,
    _backward,
)
