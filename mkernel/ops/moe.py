"""MoE dispatch+grouped GEMM, and the combine that brings results home (the one that multiplies first:
``moe_gemm_combine``).

Data flow of one dispatch on rank r (experts [r·E/W, (r+1)·E/W) live here):
  topk_ids ──routing tables, built on the device inside the call──▶ which token goes where
  x ──once per destination rank──▶ rows of that rank's experts, grouped by expert
  rows of an expert ──▶ @ w[expert], as soon as they are there; with an activation, silu(gate) * up
Order of the rows of one expert: by source rank, then token, then slot of top-k: fixed by the routing
alone, so results are deterministic. A tensor, in the handle, remembers the routing.
Combine: y rows ──▶ back to their tokens' ranks; out[t] = sum over slots, in order, in float32, of
  topk_weights[t, slot] · y[row of (t, slot)], rounded once. In a hierarchical exchange the sum over
  the slots of one node is rounded (``node_sums`` of the schedule) and crosses once; those of nodes are
  added in their order.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, NamedTuple, TypedDict, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import Unpack

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import flops, validate
from mkernel.ops import moe_backward as gradients
from mkernel.ops.around import refuse_gradients
from mkernel.ops.common import Done, Execution, plan_for
from mkernel.ops.gemm import GROUP
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import called, register
from mkernel.ops.scaled_experts import check_experts, default_results, dtypes, packed
from mkernel.ops.steps import Steps
from mkernel.plan.invariance import Wanted, encoded
from mkernel.plan.model import BLOCK, Activation
from mkernel.plan.shapes import MAX_DIMENSION, check_integer
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

OP = "moe_dispatch_gemm"
_OPERANDS = ("x", "w")
ID_DTYPES = (torch.int32, torch.int64)


class MoeHandle(NamedTuple):
    """The handle of a dispatch, which combines and dispatches of its world take, any number of times.

    ``counts`` [E/W] int64: rows of each of this rank's experts. ``routing`` int32: whose rows these
    are, in words of the accelerator's own, whose number depends on T, k, E and W alone.
    """

    counts: Tensor
    routing: Tensor


class MoeDispatch(NamedTuple):
    """The results of a dispatch on one rank.

    ``outputs`` [R, I]: rows of this rank's experts, expert by expert; ``counts`` [E/W] int64: rows of
    each, with sum R; ``handle``: for :func:`moe_combine`. With a capacity ``outputs`` is [capacity, I],
    and rows from R on are zero.
    """

    outputs: Tensor
    counts: Tensor
    handle: MoeHandle


class MoeQuantisedDispatch(NamedTuple):
    """The results of a dispatch whose outputs are quantised: as :class:`MoeDispatch`, ``outputs`` in
    ``torch.float8_e4m3fn`` with ``scales`` [R, I / 128] in float32, as :func:`moe_gemm_combine` takes
    both."""

    outputs: Tensor
    scales: Tensor
    counts: Tensor
    handle: MoeHandle


def _expect_shapes(x: Tensor, topk_ids: Tensor, w: Tensor, activation: str | None = None) -> None:
    validate.matrix("x", x)
    validate.matrix("topk_ids", topk_ids)
    if not isinstance(w, Tensor) or w.dim() != 3 or 0 in w.shape:
        raise ShapeError("w", validate.describe(w), "[E/W, H, I], all at least 1")
    if w.shape[1] != x.shape[1]:
        raise ShapeError("w", validate.describe(w), f"[E/W, H, I] with H = {x.shape[1]}, as in x")
    if topk_ids.shape[0] != x.shape[0]:
        raise ShapeError("topk_ids", validate.describe(topk_ids), f"[T, k] with T = {x.shape[0]}")
    if activation is not None and w.shape[2] % 2:
        raise ShapeError("w", validate.describe(w), f"[E/W, H, 2I], of activation={activation!r}")


def expect_experts(topk_ids: Tensor, experts: int) -> None:
    """Raise ArgumentError for a number that is no expert's, nor -1."""
    low, high = int(topk_ids.min()), int(topk_ids.max())
    if low < -1 or high >= experts:
        wrong = low if low < -1 else high
        legal = f"expert numbers 0 to {experts - 1}, or -1 for none"
        raise ArgumentError("topk_ids", f"... {wrong} ...", legal)


def _features(w: Tensor, activation: str | None) -> int:
    """Return the number of columns of the outputs."""
    return w.shape[2] if activation is None else w.shape[2] // 2


def routing_words(world: World, places: Tensor, experts: int) -> int:
    """Count the words of a routing: the accelerator's, and one that names the world. ``places``: any
    tensor [T, k]."""
    tokens, top_k = places.shape
    accelerator = world.engine("moe_dispatch_gemm").accelerator
    return accelerator.routing_words(world.size, tokens, top_k, experts) + 1


def new_routing(steps: Steps, world: World, topk_ids: Tensor, experts: int) -> Tensor:
    """Return memory for a routing, which has the world's mark."""
    words = routing_words(world, topk_ids, experts)
    routing = steps.empty((words,), topk_ids, torch.int32)
    last = steps.do(Tensor.narrow, routing, 0, words - 1, 1)
    steps.do(Tensor.fill_, last, mark(world))  # by a kernel, which graphs capture
    return routing


@untraced
def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    counts: Tensor | None = None,
    routing: Tensor | None = None,
    *,
    capacity: int | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`moe_dispatch_gemm` with its plan and record. Outputs: ``outputs``, ``counts``,
    ``handle``; ``scales``, where ``out_dtype`` is e4m3. ``counts``, ``routing``: of the handle whose
    routing is used."""
    world, steps = current(group), steps or Steps()
    names = ("x", "topk_ids", "w", "x_scale", "w_scale", "handle.counts", "handle.routing")
    given = plain(OP, names, (x, topk_ids, w, x_scale, w_scale, counts, routing))
    x, topk_ids, w, x_scale, w_scale, counts, routing = given
    capabilities = world.engine("moe_dispatch_gemm").claims
    device = world.accelerator.device
    _expect_shapes(x, topk_ids, w, activation)
    for name, tensor in (("x", x), ("topk_ids", topk_ids)):
        validate.on_device(name, tensor, device)
        validate.row_major(name, tensor)
    validate.on_device("w", w, device)
    around = check_experts(OP, _OPERANDS, (x, w, x_scale, w_scale), device)
    kind = out_dtype or default_results(x)
    dtype, out_name = dtypes(_OPERANDS, x, w, kind, around, capabilities)
    if topk_ids.dtype not in ID_DTYPES:
        raise DtypeError("topk_ids.dtype", topk_ids.dtype, "torch.int32 or torch.int64")
    if capacity is not None:
        check_integer(ArgumentError, "capacity", capacity, MAX_DIMENSION)
    experts = w.shape[0] * world.size
    if routing is not None:
        assert counts is not None
        routed = check_reused(steps, world, topk_ids, counts, routing, capacity)
        if routed != experts:
            legal = f"[{len(counts)}, H, I]: of as many experts as the handle's dispatch had"
            raise ShapeError("w", validate.describe(w), legal)
    elif topk_ids.device.type == "cpu":  # elsewhere looking would stall the stream
        steps.do(expect_experts, topk_ids, experts)
    plan = plan_for(
        world,
        "moe_dispatch_gemm",
        {
            "tokens": x.shape[0],
            "hidden": x.shape[1],
            "features": _features(w, activation),
            "experts": experts,
            "top_k": topk_ids.shape[1],
            **({} if capacity is None else {"capacity": capacity}),
            **({} if activation is None else {"activation": activation}),
            **({} if routing is None else {"routed": True}),
        },
        dtype,
        out_name,
        b_layout=validate.expert_layout("w", w, capabilities),
        around=around,
        chunk=chunk,
        invariant=invariant,
    )
    own = new_routing(steps, world, topk_ids, experts) if routing is None else routing
    tensors = {"x": x, "topk_ids": topk_ids, "w": w, "routing": own}
    tensors |= packed(steps, _OPERANDS, x_scale, w_scale)
    record = steps.launch(world, plan, tensors, **execution)
    if routing is None:
        steps.do(remember, own, mark(world))
        counts = record.results["counts"]
    assert counts is not None
    handle = MoeHandle(counts, own)
    found = {"outputs": record.results["outputs"], "counts": counts, "handle": handle}
    if "scales" in record.results:
        found["scales"] = record.results["scales"]
    return Done(plan, record, found)


class _Options(TypedDict, total=False):
    """Options that both overloads take."""

    capacity: int | None
    activation: Activation | None
    out_dtype: torch.dtype | None
    chunk: int | None
    x_scale: Tensor | None
    w_scale: Tensor | None
    handle: MoeHandle | None
    invariant: Wanted
    group: Group


@overload
def moe_dispatch_gemm(
    x: Tensor, topk_ids: Tensor, w: Tensor, *, quantise: None = None, **options: Unpack[_Options]
) -> MoeDispatch: ...
@overload
def moe_dispatch_gemm(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    *,
    quantise: Literal["block"],
    **options: Unpack[_Options],
) -> MoeQuantisedDispatch: ...
def moe_dispatch_gemm(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    *,
    capacity: int | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    quantise: Literal["block"] | None = None,
    handle: MoeHandle | None = None,
    invariant: Wanted = None,
    group: Group = None,
) -> MoeDispatch | MoeQuantisedDispatch:
    """Send each token to its experts and multiply: outputs = rows of expert e @ w[e].

    Collective: every rank of the world calls it with the same shapes, dtypes and options. Any
    routing is legal: experts without tokens, all tokens on one expert, an expert twice in one
    token's list (then it gets two rows).

    Args:
        x: [T, H], this rank's tokens; row-major contiguous. T is the same on every rank.
        topk_ids: [T, k] int32 or int64, the experts of each token, 0 to E - 1; k from 1 to E. -1: none,
            for tokens that only pad x and slots that are dropped. With a handle only their shape is
            read.
        w: [E/W, H, I], weights of this rank's experts; contiguous, or the transpose of a contiguous
            [E/W, I, H]. With an activation [E/W, H, 2I], the gate's columns first.
        capacity: rows that each rank has for those of all its experts, so that shapes do not depend on
            the routing. None: as many as there are, of which a compiled function needs
            ``torch._dynamo.config.capture_dynamic_output_shape_ops``. With a handle: that of its
            dispatch.
        activation: ``"silu_and_mul"``: outputs [R, I] are silu(gate) * up of [gate, up] = the product,
            computed from its float32 sums and rounded once. Gradients make the product again, which
            rounds gate and up to ``out_dtype``. None: outputs are the product.
        out_dtype: of the outputs; default: that of ``x``. Accumulation is in float32.
        chunk: rows a communication chunk; default: the planner's choice.
        x_scale, w_scale: float32, of e4m3 ``w`` (``torch.float8_e4m3fn``), the transpose of a
            contiguous [E/W, I, H], by blocks of 128 x 128: w_scale [E/W, H / 128, I / 128], I / 128
            rounded up, H a multiple of 128. x is e4m3 too, beside x_scale [T, H / 128]; or it has 16
            bits and no scales: then each token is quantised once, by blocks of 128, before it
            travels. Sums of blocks are added in float32; outputs are bfloat16, or as a 16-bit x.
            There are no gradients.
        quantise: ``"block"``, beside scales: outputs are e4m3, quantised from float32 by rows and
            blocks of 128, in one step with the activation; I is a multiple of 128.
        handle: of an earlier dispatch of the same routing, with or without a product: its routing is
            used again, and no ids travel.
        invariant: promise that a row's bits depend on that row and the weights alone, for every number
            of ranks (docs/invariance.md). None: as the world says.
        group: names the world; None: the default one.

    Returns:
        :class:`MoeDispatch`; with ``quantise`` :class:`MoeQuantisedDispatch`. Rows of one expert are
        ordered by source rank, token, slot.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...), or a handle on an accelerator that uses no
            routing again; nothing was started.
        CapacityExceeded: a rank got more rows than ``capacity``; every rank raises it that can know,
            and the world goes on.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    if out_dtype == torch.float8_e4m3fn:
        raise DtypeError(
            "out_dtype", out_dtype, "another dtype; or quantise='block', beside scales"
        )
    if quantise is not None:
        if quantise != "block" or w_scale is None:
            legal = "'block', beside w_scale; or None"
            raise ArgumentError("quantise", repr(quantise), legal)
        if out_dtype is not None:
            raise ArgumentError("out_dtype", out_dtype, "None, beside quantise")
        out_dtype = torch.float8_e4m3fn
    options: dict[str, Any] = {
        "capacity": capacity,
        "activation": activation,
        "out_dtype": out_dtype,
        "chunk": chunk,
        "invariant": encoded(invariant),
    }
    dispatches, named = called(group)
    if handle is not None:
        expect_handle(handle)
    again = handle or (None, None)
    if x_scale is not None or w_scale is not None:
        refuse_gradients(OP, x=x, w=w, x_scale=x_scale, w_scale=w_scale)
        outputs, *made, scales = dispatches.moe_dispatch_gemm_scaled(
            x, topk_ids, w, x_scale, w_scale, *again, **options, group=named
        )
        handle = handle or MoeHandle(*made)
        if quantise is not None:
            return MoeQuantisedDispatch(outputs, scales, handle.counts, handle)
        return MoeDispatch(outputs, handle.counts, handle)
    outputs, *made = dispatches.moe_dispatch_gemm(x, topk_ids, w, *again, **options, group=named)
    handle = handle or MoeHandle(*made)
    return MoeDispatch(outputs, handle.counts, handle)


@untraced
def combine(
    y: Tensor,
    handle: MoeHandle,
    topk_weights: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`moe_combine` with its plan and record. Output: ``out``."""
    world, steps = current(group), steps or Steps()
    capabilities = world.engine("moe_combine").claims
    expect_handle(handle)
    names = ("y", "handle.counts", "handle.routing", "topk_weights")
    y, counts, routing, topk_weights = plain("moe_combine", names, (y, *handle, topk_weights))
    experts = check_routed(steps, world, "y", y, counts, routing, topk_weights)
    dtype = validate.dtype_name("y.dtype", y.dtype, capabilities.dtypes)
    out_name = validate.dtype_name("out_dtype", out_dtype or y.dtype, capabilities.out_dtypes)
    tokens, top_k = topk_weights.shape
    sizes = {"tokens": tokens, "features": y.shape[1], "experts": experts, "top_k": top_k}
    plan = plan_for(world, "moe_combine", sizes, dtype, out_name, invariant=invariant)
    out = steps.empty((tokens, y.shape[1]), y, validate.DTYPES[out_name])
    weights = gradients.weights_as(steps, topk_weights, plan)
    tensors = {"y": y, "routing": routing, "topk_weights": weights, "out": out}
    record = steps.launch(world, plan, tensors, **execution)
    return Done(plan, record, {"out": out})


def expect_handle(handle: object) -> None:
    """Raise ArgumentError if it is not what a dispatch returned."""
    if not isinstance(handle, MoeHandle):
        raise ArgumentError("handle", type(handle).__name__, "the handle of a dispatch")


def check_routed(
    steps: Steps,
    world: World,
    name: str,
    rows: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
) -> int:
    """Check that ``rows``, the argument of that name, has a row for each of a dispatch's outputs, that
    ``counts`` and ``routing`` are that dispatch's handle and of this world, and that ``topk_weights``
    has a weight for each of its places; return the number of experts of all ranks. Raises as
    :func:`moe_combine`."""
    device = world.accelerator.device
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] == 0:
        raise ShapeError(name, validate.describe(rows), "[R, D] with D of at least 1")
    validate.matrix("topk_weights", topk_weights)
    for each, tensor in ((name, rows), ("topk_weights", topk_weights)):
        validate.on_device(each, tensor, device)
    validate.row_major(name, rows)
    if not topk_weights.dtype.is_floating_point:
        raise DtypeError("topk_weights.dtype", topk_weights.dtype, "a floating-point dtype")
    experts = check_handle(steps, world, "topk_weights", topk_weights, counts, routing)
    steps.do(_expect_as_many, name, rows, routing, world.name)
    return experts


def check_handle(
    steps: Steps, world: World, name: str, places: Tensor, counts: Tensor, routing: Tensor
) -> int:
    """Check that ``counts`` and ``routing`` are the handle of a dispatch of this world, of as many
    tokens and slots as ``places`` [T, k] has, the argument of that name; return the number of experts
    of all ranks. Raises as :func:`moe_combine`."""
    for each, tensor in (("handle.counts", counts), ("handle.routing", routing)):
        validate.on_device(each, tensor, world.accelerator.device)
    experts = counts.numel() * world.size
    words = routing_words(world, places, experts)
    if tuple(routing.shape) != (words,) or routing.dtype != torch.int32:
        raise ShapeError(
            name,
            validate.describe(places),
            f"[T, k] of the dispatch, whose handle has {validate.describe(routing)}",
            why=f"that would be {words} words on {world.size} ranks",
        )
    steps.do(_expect_own, routing, mark(world), world.name)
    return experts


def check_reused(
    steps: Steps,
    world: World,
    topk_ids: Tensor,
    counts: Tensor,
    routing: Tensor,
    capacity: int | None,
) -> int:
    """Check that a dispatch may use this handle's routing again, as :func:`check_handle` does, and that
    its capacity is that of the handle's dispatch; return the number of experts of all ranks."""
    experts = check_handle(steps, world, "topk_ids", topk_ids, counts, routing)
    if capacity is not None:
        steps.do(_expect_capacity, capacity, routing, world.name)
    return experts


def _expect_capacity(capacity: int, routing: Tensor, world: str) -> None:
    known = dispatched_rows(routing, world)
    if known not in (None, capacity):
        raise ArgumentError("capacity", capacity, f"{known} or None, as the handle's dispatch gave")


def _expect_own(routing: Tensor, own: int, world: str) -> None:
    if is_foreign(routing, own):
        raise ArgumentError(
            "handle",
            "of another world",
            f"one of this world's dispatches ({world!r}); pass the dispatch's group",
        )


def _expect_as_many(name: str, rows: Tensor, routing: Tensor, world: str) -> None:
    dispatched = dispatched_rows(routing, world)
    if dispatched is not None and len(rows) != dispatched:
        legal = f"[{dispatched}, D], a row for each that the dispatch gave"
        raise ShapeError(name, validate.describe(rows), legal)


def dispatched_rows(routing: Tensor, world: str) -> int | None:
    """Return the rows of the outputs of the dispatch that made these words; None: only the device
    knows."""
    return current(world).engine("moe_dispatch_gemm").accelerator.dispatched_rows(routing)


def moe_combine(
    y: Tensor,
    handle: MoeHandle,
    topk_weights: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    invariant: Wanted = None,
    group: Group = None,
) -> Tensor:
    """Bring experts' results home: out[t] = sum over slots of topk_weights[t, slot] · y[its row].

    Collective. The sum runs in slot order, in float32, and is rounded once. Slots without an expert
    add nothing, whatever their weight.

    Args:
        y: [R, D], one row for each row of the dispatch's outputs, in its order; D is free. After
            a dispatch with a capacity R is the capacity.
        handle: of the dispatch.
        topk_weights: [T, k], floating point; used as float32, of float64 y as float64.
        out_dtype: of the result; default: that of ``y``.
        invariant: as :func:`mkernel.moe_gemm_combine` takes it.
        group: names the world, which is that of the dispatch; None: the default one.

    Returns:
        [T, D] for this rank's tokens.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    combines, named = called(group)
    expect_handle(handle)
    result: Tensor = combines.moe_combine(
        y, *handle, topk_weights, out_dtype=out_dtype, invariant=encoded(invariant), group=named
    )
    return result


# ---- marks ---------------------------------------------------------------------------------------
# The last word of a routing is the mark of its world. On a device reading it would wait for everything
# that is queued, so what a dispatch of this process marked is also remembered beside the memory, for as
# long as that lives.

_marked: WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = WeakKeyDictionary()


def mark(world: World) -> int:
    """Return the world's mark."""
    return zlib.crc32(world.name.encode()) & 0x7FFFFFFF


def remember(routing: Tensor, own: int) -> None:
    """Remember that a dispatch of the world with that mark has just made these words."""
    _marked[routing.untyped_storage()] = _version(routing), own


def is_foreign(routing: Tensor, own: int) -> bool:
    """Return whether another world than that with this mark made these words; False also where only
    the device knows."""
    if routing.device.type == "cpu":
        return int(routing[-1]) != own
    version, made_by = _marked.get(routing.untyped_storage(), (-1, 0))
    return version == _version(routing) and made_by != own


def _version(words: Tensor) -> int:
    return 0 if words.is_inference() else words._version


# ---- what torch knows of them --------------------------------------------------------------------


def new_handle(steps: Steps, x: Tensor, handle: MoeHandle, *, routed: bool) -> MoeHandle:
    """Return the handle that an op gives: empty tensors where it was given one, since an op's outputs
    are none of its inputs."""
    if not routed:
        return handle
    return MoeHandle(*(steps.empty((0,), x, each.dtype) for each in handle))


def _dispatch_kernel(
    steps: Steps, x: Tensor, routing: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    done = dispatch(x, routing=routing, **given, steps=steps).outputs
    return done["outputs"], *new_handle(steps, x, done["handle"], routed=routing is not None)


def _dispatch_fake(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    counts: Tensor | None = None,
    routing: Tensor | None = None,
    *,
    capacity: int | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    group: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    world = current(group)
    _expect_shapes(x, topk_ids, w, activation)
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    experts = len(w) if routing is None else 0
    words = routing_words(world, topk_ids, experts * world.size) if routing is None else 0
    return (
        x.new_empty((rows, _features(w, activation)), dtype=out_dtype or x.dtype),
        x.new_empty(experts, dtype=torch.int64),
        x.new_empty(words, dtype=torch.int32),
    )


def _scaled_dispatch_kernel(
    steps: Steps, x: Tensor, routing: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    done = dispatch(x, routing=routing, **given, steps=steps).outputs
    scales = done.get("scales")
    if scales is None:
        scales = steps.empty((0,), x, torch.float32)
    made = new_handle(steps, x, done["handle"], routed=routing is not None)
    return done["outputs"], *made, scales


def _scaled_dispatch_fake(
    x: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    counts: Tensor | None = None,
    routing: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind = out_dtype or default_results(x)
    found = _dispatch_fake(x, topk_ids, w, counts, routing, out_dtype=kind, **options)
    rows, width = found[0].shape
    shape = (rows, width // BLOCK) if kind == torch.float8_e4m3fn else (0,)
    return *found, x.new_empty(shape, dtype=torch.float32)


def _combine_kernel(
    y: Tensor, counts: Tensor, routing: Tensor, topk_weights: Tensor, **options: Any
) -> Tensor:
    handle = MoeHandle(counts, routing)
    result: Tensor = combine(y, handle, topk_weights, **options).outputs["out"]
    return result


def _combine_fake(
    y: Tensor,
    counts: Tensor,
    routing: Tensor,
    topk_weights: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> Tensor:
    return y.new_empty((topk_weights.shape[0], y.shape[1]), dtype=out_dtype or y.dtype)


register(
    "moe_dispatch_gemm(Tensor x, Tensor topk_ids, Tensor w, Tensor? counts=None, "
    "Tensor? routing=None, *, int? capacity=None, str? activation=None, "
    f"ScalarType? out_dtype=None, int? chunk=None, {GROUP}) "
    "-> (Tensor, Tensor, Tensor)",
    _dispatch_kernel,
    _dispatch_fake,
    gradients.save_dispatch,
    gradients.dispatch_backward,
    flops=flops.dispatch,
)
register(
    "moe_dispatch_gemm_scaled(Tensor x, Tensor topk_ids, Tensor w, Tensor? x_scale, Tensor? w_scale, "
    "Tensor? counts=None, Tensor? routing=None, *, int? capacity=None, str? activation=None, "
    f"ScalarType? out_dtype=None, int? chunk=None, {GROUP}) -> (Tensor, Tensor, Tensor, Tensor)",
    _scaled_dispatch_kernel,
    _scaled_dispatch_fake,
    flops=flops.dispatch,
    range_name=OP,
)
register(
    "moe_combine(Tensor y, Tensor counts, Tensor routing, Tensor topk_weights, *, "
    f"ScalarType? out_dtype=None, {GROUP}) -> Tensor",
    _combine_kernel,
    _combine_fake,
    gradients.save_combine,
    gradients.combine_backward,
    any_rows=("y",),
)
