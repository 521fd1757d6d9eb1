"""AllReduce: the sum over ranks of rows that are there, on every rank.

Data flow of one call on rank r:
  rows of x ──▶ their owners, or every rank; who has all ranks' adds them up in a fixed order, float32
  sums, rounded once ──▶ every rank, where not each adds up all
  with a norm: + residual ──▶ the new residual ──▶ every row divided by its root mean square, * weight
Every rank holds the same bits.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import TypedDict, Unpack

from mkernel.errors import ArgumentError
from mkernel.ops import derivatives, validate
from mkernel.ops.around import EPS, Normed, as_rows, check_norm, normalised, of_norm, quantise
from mkernel.ops.common import Done, Execution, engine_for, plan_for
from mkernel.ops.gemm import GROUP, copied_to, traced_outputs
from mkernel.ops.plain import plain, untraced
from mkernel.ops.prefetch import check_prefetch, hinted
from mkernel.ops.quantised import (
    check_quantise,
    fake_quantised,
    normalised_results,
    results_of,
)
from mkernel.ops.registration import called, native_op, ops, register
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import Around
from mkernel.plan.invariance import Wanted, encoded
from mkernel.plan.model import LaunchPlan
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current
from mkernel.world.world import World

_OP = "all_reduce"
_ARGUMENTS = ("x", "out", "residual", "norm_weight", "prefetch")


class _Checked(NamedTuple):
    plan: LaunchPlan
    dtype: torch.dtype
    prefetches: bool


def _check(
    world: World,
    x: Tensor,
    norm: Normed | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    prefetch: Tensor | None,
    invariant: str | None,
) -> _Checked:
    """Check the arguments of a call, and plan it."""
    device = world.accelerator.device
    validate.activation("x", x)
    validate.on_device("x", x, device)
    sizes = {"m": x.numel() // x.shape[-1], "n": x.shape[-1]}
    claims = engine_for(world, _OP, sizes, str(x.dtype).removeprefix("torch.")).claims
    dtype = validate.dtype_name("x.dtype", x.dtype, claims.dtypes)
    wanted = out_dtype or (out.dtype if out is not None else x.dtype)
    out_name = validate.dtype_name("out_dtype", wanted, claims.out_dtypes)
    shape = tuple(x.shape)
    if norm is not None:
        check_norm(norm, shape, x.dtype, wanted, device, matrix="x", like="x")
    steps = Around(norm=None if norm is None else norm.planned)
    plan = plan_for(
        world, _OP, sizes, dtype, out_name, around=steps, invariant=invariant, chunk=chunk
    )
    if out is not None:
        validate.on_device("out", out, device)
        validate.output("out", out, shape, wanted)
    if prefetch is not None:
        check_prefetch(prefetch, device)
    return _Checked(plan, wanted, prefetch is not None and _OP in claims.prefetch_ops)


@untraced
def call(
    x: Tensor,
    norm: Normed | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    prefetch: Tensor | None = None,
    invariant: str | None = None,
    group: Group = None,
    steps: Steps | None = None,
    **execution: Unpack[Execution],
) -> Done:
    """Run :func:`all_reduce` with its plan and record. Outputs: ``out``, with a norm also
    ``residual_out``, and where that quantises ``quantised`` and ``quantised_scale``."""
    world, steps = current(group), steps or Steps()
    residual, weight = (None, None) if norm is None else (norm.residual, norm.weight)
    given = x, out, residual, weight, prefetch
    x, out, residual, weight, prefetch = plain(_OP, _ARGUMENTS, given)
    if norm is not None:
        norm = norm._replace(residual=residual, weight=weight)
    plan, dtype, prefetches = _check(world, x, norm, out, out_dtype, chunk, prefetch, invariant)
    given_out = out
    if out is None:
        rows = steps.output(world, plan, (x.numel() // x.shape[-1], x.shape[-1]), x, dtype)
        out = rows if x.dim() == 2 else steps.do(Tensor.view, rows, x.shape)
    else:
        in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
        in_place &= out.dtype == x.dtype
        read = {"x": None if in_place else x, "residual": residual, "norm_weight": weight}
        validate.apart({"out": out}, read)
        rows = as_rows(out, 0, steps)
    outputs = {"out": out}
    packed = x if x.is_contiguous() else steps.do(Tensor.contiguous, x)
    launched = {"x": as_rows(packed, 0, steps), "out": rows}
    if norm is not None:
        outputs |= norm.outputs(steps, out)
        if names := of_norm(plan):
            given_norm = {**norm.given, **{name: outputs[name] for name in names}}
            launched |= {
                name: each if name == "norm_weight" else as_rows(each, 0, steps)
                for name, each in given_norm.items()
            }
    if prefetches and prefetch is not None:
        launched["prefetch"] = prefetch
    record = steps.launch(world, plan, launched, **execution)
    if norm is not None and plan.norm is not None and plan.norm.step == "after":
        of_norm_after = (norm.residual, norm.weight, norm.eps, outputs["residual_out"])
        steps.do(normalised, out, *of_norm_after, plan.invariant is not None)
    quantise(steps, plan, outputs)
    if given_out is not None:  # autograd may have saved it for a backward, and must hear of it
        increment_version([given_out])
        steps.wrote([given_out])
    return Done(plan, record, outputs)


class _Options(TypedDict, total=False):
    """Options that all overloads take."""

    eps: float
    prefetch: Tensor | None
    chunk: int | None
    invariant: Wanted
    group: Group


@overload
def all_reduce(
    x: Tensor,
    *,
    residual: None = None,
    norm_weight: Tensor | None = None,
    quantise: None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def all_reduce(
    x: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    quantise: None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def all_reduce(
    x: Tensor,
    *,
    residual: None = None,
    norm_weight: Tensor,
    quantise: Literal["row"],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def all_reduce(
    x: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    quantise: Literal["row"],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


def all_reduce(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = EPS,
    quantise: Literal["row"] | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prefetch: Tensor | None = None,
    chunk: int | None = None,
    invariant: Wanted = None,
    group: Group = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute the sum over ranks of x, on every rank, the same bits everywhere.

    Collective: every rank of the world calls it with the same shapes, dtypes and options. What ranks
    have is added in float32 (of float64, float64), in rank order (on `hopper` in a fixed order that
    depends on the plan), and rounded once.

    With ``norm_weight`` the rows of the sum are normalised, as blocks of a transformer do next:
    r = sum + residual, out = r / sqrt(mean(r^2) + eps) * norm_weight, in float32 (of float64,
    float64); out and the new residual r are rounded once each, the sum perhaps before that. Whether
    the launch does it or the op behind it, ``LaunchPlan.norm`` says.

    Args:
        x: [M, N], or an activation such as [B, S, N], this rank's terms of the sum. What is not packed
            is copied first.
        residual: of the shape of x, contiguous, in the dtype of the result, the same on every rank; it
            is not written to. Only beside ``norm_weight``.
        norm_weight: [N] contiguous, in the dtype of x, the same on every rank.
        eps: added to the mean of squares; the same on every rank, above 0.
        quantise: ``row``: the normalised rows in e4m3 (``torch.float8_e4m3fn``) with a float32 scale
            each, max|row| / 448, as ``a`` and ``a_scale`` of the next product take them. They are
            rounded to the dtype of ``x`` before. Only beside ``norm_weight``, without ``out`` and
            ``out_dtype``; there are no gradients.
        out: of the shape of x, contiguous, to write to: x itself, or memory of its own; allocated
            where None.
        out_dtype: of the result; default: that of ``out``, else that of x.
        prefetch: the weight that the next product reads: a tensor of any shape and dtype, without gaps
            between its elements; of a DTensor this rank's part. `hopper` brings its first bytes to L2
            while ranks exchange few rows, as many as come in that time and 24 MiB at most; other
            accelerators ignore it (``prefetch_ops`` of :func:`mkernel.capabilities`). It is a hint:
            results have the same bits without, no gradient flows to it, and ranks may name different
            tensors.
        chunk: rows a communication chunk; default: the planner's choice.
        invariant: promise that a row's bits depend on the ranks' terms of that row alone; for every
            number of ranks only where these terms are roots of one tree's subtrees
            (docs/invariance.md). None: as the world says.
        group: names the world; None: the default one.

    Returns:
        The sum, of the shape of x; with ``residual`` the normalised rows and the new residual; with
        ``quantise`` e4m3 rows and their scales [M, 1], or [B, S, 1], in the place of the normalised
        ones.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor, one with a tangent, ...; with ``out`` one that requires grad); nothing
            was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    normed = norm_weight is not None or residual is not None or quantise is not None
    prefetch = prefetch if prefetch is None else hinted(prefetch)
    if not (normed or out is not None or torch.compiler.is_compiling()):  # most calls
        found: Tensor = ops.all_reduce(x, out_dtype, chunk, prefetch, encoded(invariant), group)
        return found
    check_quantise(_OP, quantise, norm_weight, x=x, residual=residual, out=out, out_dtype=out_dtype)
    norm = None
    if norm_weight is not None:
        norm = Normed(residual, norm_weight, float(eps), quantise is not None)
    elif residual is not None:
        raise ArgumentError("norm_weight", None, "a weight, beside residual")
    done = _through_torch(x, norm, out, out_dtype, chunk, prefetch, encoded(invariant), group)
    return done[0] if norm is None else results_of(done, residual)


def _through_torch(
    x: Tensor,
    norm: Normed | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    prefetch: Tensor | None,
    invariant: str | None,
    group: Group,
) -> tuple[Tensor, ...]:
    """Return the sum, or the normalised rows, quantised ones with their scales, and the new residual;
    through torch's dispatcher where torch has to see the call."""
    given = (x,) if norm is None else (x, norm.weight, norm.residual)
    options: dict[str, Any] = {} if norm is None else {"eps": norm.eps}
    registered, named = called(group)
    options |= {"out_dtype": out_dtype, "chunk": chunk, "prefetch": prefetch}
    options |= {"invariant": invariant, "group": named}
    if norm is not None and norm.quantises:
        del options["out_dtype"]
        quantised: tuple[Tensor, ...] = registered.all_reduce_norm_quantised(*given, **options)
        return quantised
    if out is None:
        return _results(registered, given, options)
    if traced_outputs(out, *given):
        options["out_dtype"] = out_dtype or out.dtype
        found = _results(registered, given, options)
        return (copied_to("out", out, found[0], 0), *found[1:])
    weight, residual = (None, None) if norm is None else (norm.weight, norm.residual)
    eps = EPS if norm is None else norm.eps
    results: tuple[Tensor, ...] = _INTO(
        x, weight, residual, out, eps, out_dtype, chunk, prefetch, invariant, group
    )
    return results


def _results(
    registered: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Call one of the two registered ops."""
    if len(given) == 1:
        return (registered.all_reduce(*given, **options),)
    found: tuple[Tensor, ...] = registered.all_reduce_norm(*given, **options)
    return found


def _sum_kernel(x: Tensor, **options: Any) -> Tensor:
    found: Tensor = call(x, None, **options).outputs["out"]
    return found


def _norm_kernel(
    x: Tensor, norm_weight: Tensor | None, residual: Tensor | None, eps: float, **options: Any
) -> tuple[Tensor, ...]:
    norm = None if norm_weight is None else Normed(residual, norm_weight, eps)
    return tuple(call(x, norm, **options).outputs.values())


def _quantised_kernel(
    x: Tensor, norm_weight: Tensor, residual: Tensor | None, eps: float, **options: Any
) -> tuple[Tensor, ...]:
    norm = Normed(residual, norm_weight, eps, quantises=True)
    return normalised_results(call(x, norm, **options).outputs)


_INTO = native_op(
    "all_reduce_into",
    (
        "x",
        "norm_weight",
        "residual",
        "out",
        "eps",
        "out_dtype",
        "chunk",
        "prefetch",
        "invariant",
        "group",
    ),
    (),
    _norm_kernel,
    range_name=_OP,
)


def _fake_sum(x: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    validate.activation("x", x)
    return torch.empty_like(x, dtype=out_dtype or x.dtype, memory_format=torch.contiguous_format)


def _fake_norm(
    x: Tensor,
    norm_weight: Tensor,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    made = _fake_sum(x, out_dtype=out_dtype)
    return made, torch.empty_like(made)


def _fake_quantised(*given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_quantised(*_fake_norm(*given, **options))


register(
    "all_reduce(Tensor x, *, ScalarType? out_dtype=None, int? chunk=None, Tensor? prefetch=None, "
    f"{GROUP}) -> Tensor",
    _sum_kernel,
    _fake_sum,
    derivatives.save_sum,
    derivatives.sum_backward,
)
register(
    "all_reduce_norm(Tensor x, Tensor norm_weight, Tensor? residual=None, *, float eps=1e-06, "
    f"ScalarType? out_dtype=None, int? chunk=None, Tensor? prefetch=None, {GROUP}) "
    "-> (Tensor, Tensor)",
    _norm_kernel,
    _fake_norm,
    derivatives.save_normed_sum,
    derivatives.normed_sum_backward,
    range_name=_OP,
)
register(
    "all_reduce_norm_quantised(Tensor x, Tensor norm_weight, Tensor? residual=None, *, "
    f"float eps=1e-06, int? chunk=None, Tensor? prefetch=None, {GROUP}) "
    "-> (Tensor, Tensor, Tensor)",
    _quantised_kernel,
    _fake_quantised,
    range_name=_OP,
)
