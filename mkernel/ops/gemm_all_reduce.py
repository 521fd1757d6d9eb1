"""GEMM+AllReduce: C = sum over ranks of a @ b, on every rank.

Data flow of one call on rank r:
  a @ b, rows of the next ranks first, own rows last ──▶ partial rows of each owner
  partial rows ──▶ one slot a source at the owner of the row, as soon as they are computed
  owner: adds the slots in rank order, in float32, rounds once, and sends the rows to every rank
  with a norm: + residual ──▶ the new residual ──▶ every row divided by its root mean square, * weight
The order of the sum is fixed and it is rounded once, by its owner: every rank holds the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from mkernel.errors import ArgumentError
from mkernel.ops import derivatives
from mkernel.ops.around import EPS, Normed, refuse_gradients, scaled
from mkernel.ops.gemm import GROUP, GemmCall, GemmOp, copied_to, traced_outputs
from mkernel.ops.plain import local
from mkernel.ops.prefetch import hinted
from mkernel.ops.quantised import (
    check_quantise,
    fake_quantised,
    normalised_results,
    results_of,
)
from mkernel.ops.registration import called, native_op, ops, register
from mkernel.plan.invariance import Wanted, encoded
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

OP = GemmOp("gemm_all_reduce")


class _Options(TypedDict, total=False):
    """Options that all overloads take."""

    a_scale: Tensor | None
    b_scale: Tensor | None
    use_fast_accum: bool
    bias: Tensor | None
    eps: float
    prefetch: Tensor | None
    chunk: int | None
    invariant: Wanted
    group: Group


@overload
def gemm_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    residual: None = None,
    norm_weight: Tensor | None = None,
    quantise: None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def gemm_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    quantise: None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def gemm_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    residual: None = None,
    norm_weight: Tensor,
    quantise: Literal["row"],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def gemm_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    quantise: Literal["row"],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


def gemm_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    use_fast_accum: bool = False,
    bias: Tensor | None = None,
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
    """Compute the sum over ranks of a @ b (+ bias), on every rank, the same bits everywhere.

    Collective: every rank of the world calls it with the same shapes, dtypes and options; strides may
    differ, but for the major order of b. Products accumulate in float32; partial results are added in
    float32, in rank order (on `hopper` in a fixed order that depends on the plan), and rounded once. A
    bias is added to the rounded sum, which is then rounded again.

    With ``norm_weight`` the rows of the sum are normalised, as blocks of a transformer do next:
    r = sum + residual, out = r / sqrt(mean(r^2) + eps) * norm_weight, in float32 (of float64,
    float64); out and the new residual r are rounded once each, the sum perhaps before that. Whether
    the launch does it or the op behind it, ``LaunchPlan.norm`` says.

    Args:
        a: [M, K_r], this rank's columns of A, or an activation such as [B, S, K_r]. What is not packed
            the op copies first, where the accelerator does not take it as it is
            (``LaunchPlan.copies``).
        b: [K_r, N], this rank's rows of B, with any strides: row-major and column-major ones (the
            transpose of a contiguous [N, K_r]) are never copied, parts of such ones on most
            accelerators not either.
        a_scale, b_scale: float32, beside e4m3 ``a`` and ``b`` (``torch.float8_e4m3fn``), of which b is
            K-major: one element each; or [M, 1] and [1, N]; or [M, K / 128] and [K / 128, N / 128]
            (rounded up), by blocks of 128 of a row of A and 128 x 128 of B. M, N, K: of this rank's a
            and b; where a has more dimensions, so has a_scale. A product of elements counts times
            their scales. There are no gradients.
        use_fast_accum: products of e4m3 operands may be added with fewer bits than float32 has, where
            the device is faster so, as in ``torch._scaled_mm``; the same on every rank. Not with scales
            by blocks.
        bias: [N], in the dtype of ``a`` (beside scales, of the result), the same on every rank; added
            once.
        residual: [M, N], or [B, S, N], contiguous, in the dtype of the result, the same on every rank;
            it is not written to. Only beside ``norm_weight``.
        norm_weight: [N] contiguous, in the dtype of ``a`` (beside scales, of the result), the same on
            every rank.
        eps: added to the mean of squares; the same on every rank, above 0.
        quantise: ``row``: the normalised rows in e4m3 (``torch.float8_e4m3fn``) with a float32 scale
            each, max|row| / 448, as ``a`` and ``a_scale`` of the next product take them. They are
            rounded to the dtype of ``a`` (beside scales, to bfloat16) before. Only beside
            ``norm_weight``, without ``out`` and ``out_dtype``; there are no gradients.
        out: [M, N] contiguous to write to, in memory of its own; allocated where None. In memory of
            :func:`mkernel.empty` kernels write it on every rank without a copy.
        out_dtype: of the result; default: that of ``out``, else that of ``a``; of e4m3 operands
            bfloat16, else float16 or float32.
        prefetch: the weight that the next product reads, as :func:`mkernel.all_reduce` takes it.
        chunk: rows (or tiles) a communication chunk; default: the planner's choice.
        invariant: promise that a row's bits depend on that row, b and what is added behind the sum
            alone, for every number of ranks that divides the segments of K (docs/invariance.md).
            None: as the world says.
        group: names the world; None: the default one.

    Returns:
        C [M, N], or [B, S, N]; with ``residual`` the normalised rows and the new residual; with
        ``quantise`` e4m3 rows and their scales [M, 1], or [B, S, 1], in the place of the normalised
        ones. A DTensor placed as the op takes it (a sharded along its last dimension, b along 0, the
        others replicated) counts as its local part; the result is plain.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor placed otherwise, one with a tangent, ...; with ``out`` one that requires
            grad); nothing was started.
        NotInitialized, Unsupported, PlanMismatch, WorldError: as :func:`all_gather_gemm`.
    """
    more = a_scale is not None or b_scale is not None or use_fast_accum or out is not None
    normed = norm_weight is not None or residual is not None or quantise is not None
    prefetch = prefetch if prefetch is None else hinted(prefetch)
    if not (more or normed or torch.compiler.is_compiling()):  # which is what most calls are
        options = (out_dtype, chunk, prefetch, encoded(invariant))
        found: Tensor = ops.gemm_all_reduce(a, b, bias, *options, group)
        return found
    given = scaled(a_scale, b_scale, use_fast_accum)
    check_quantise(
        OP.name, quantise, norm_weight,
        a=a, b=b, bias=bias, residual=residual, out=out, out_dtype=out_dtype,
    )  # fmt: skip
    call = GemmCall(
        a, b, bias, 0, out, out_dtype, chunk=chunk, scaled=given, prefetch=prefetch,
        invariant=encoded(invariant), group=group,
    )  # fmt: skip
    if norm_weight is None:
        if residual is not None:
            raise ArgumentError("norm_weight", None, "a weight, beside residual")
        return OP.result(call)
    norm = Normed(residual, norm_weight, float(eps), quantise is not None)
    if given is not None:
        refuse_gradients(
            OP.name, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual,
            norm_weight=norm_weight, out=out,
        )  # fmt: skip
    return results_of(_normed(call._replace(norm=norm)), residual)


def _normed(call: GemmCall) -> tuple[Tensor, ...]:
    """Return the normalised rows, quantised ones with their scales, and the new residual; through
    torch's dispatcher where torch has to see the call."""
    registered, named = called(call.group)
    norm = call.norm
    assert norm is not None
    a, b, bias, residual, weight = call.a, call.b, call.bias, norm.residual, norm.weight
    if registered is not ops:
        found = _localised(
            {"a": a, "b": b, "bias": bias, "residual": residual, "norm_weight": weight}
            | {"group": call.group}
        )
        a, b, bias, residual, weight = found.values()
    tensors: tuple[Tensor | None, ...] = a, b, weight, residual, bias
    out, given, op = call.out, call.scaled, registered.gemm_all_reduce_norm
    options: dict[str, Any] = {"eps": norm.eps, "chunk": call.chunk, "prefetch": call.prefetch}
    options["invariant"] = call.invariant
    if given is not None:
        tensors += given.a, given.b
        options["use_fast_accum"] = given.use_fast_accum
        op = registered.gemm_all_reduce_norm_scaled
    results: tuple[Tensor, ...]
    if norm.quantises:
        results = registered.gemm_all_reduce_norm_quantised(*tensors, **options, group=named)
    elif out is None:
        results = op(*tensors, **options, out_dtype=call.out_dtype, group=named)
    elif traced_outputs(out, *tensors):
        options["out_dtype"] = call.out_dtype or out.dtype
        normed, new = op(*tensors, **options, group=named)
        results = copied_to("out", out, normed, 0), new
    else:
        options["out_dtype"] = call.out_dtype
        results = _INTO(*tensors, out=out, **options, group=call.group)
    return results


def _localised(given: dict[str, Any]) -> dict[str, Any]:
    group = given["group"]
    a, b, bias = OP.local(given["a"], given["b"], given["bias"], 0, group)
    return {"a": a, "b": b, "bias": bias} | {
        name: local(name, given[name], None, group) for name in ("residual", "norm_weight")
    }


def _kernel(
    *,
    norm_weight: Tensor,
    residual: Tensor | None,
    eps: float,
    quantises: bool = False,
    **given: Any,
) -> tuple[Tensor, ...]:
    norm = Normed(residual, norm_weight, eps, quantises)
    return normalised_results(OP.outputs(norm=norm, **given))


_INTO = native_op(
    "gemm_all_reduce_norm_into",
    (
        "a", "b", "norm_weight", "residual", "bias", "a_scale", "b_scale", "use_fast_accum", "out",
        "eps", "out_dtype", "chunk", "prefetch", "invariant", "group",
    ),
    (None, None, False, None, EPS, None, None, None, None, None),
    _kernel,
    range_name=OP.name,
    local=_localised,
)  # fmt: skip


def _fake(
    a: Tensor,
    b: Tensor,
    norm_weight: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *scales: Tensor | None,
    out_dtype: torch.dtype | None = None,
    group: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    made = OP.fake(a, b, 0, out_dtype, current(group).size)
    return made, torch.empty_like(made)


def _fake_quantised(*given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_quantised(*_fake(*given, **options))


OP.register(derivatives.save_reduce, derivatives.reduce_backward)
_register = partial(register, flops=OP.flops, range_name=OP.name, local=_localised)
_register(
    "gemm_all_reduce_norm(Tensor a, Tensor b, Tensor norm_weight, Tensor? residual=None, "
    "Tensor? bias=None, *, float eps=1e-06, ScalarType? out_dtype=None, int? chunk=None, "
    f"Tensor? prefetch=None, {GROUP}) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    derivatives.save_norm,
    derivatives.norm_backward,
)
_register(
    "gemm_all_reduce_norm_scaled(Tensor a, Tensor b, Tensor norm_weight, Tensor? residual, "
    "Tensor? bias, Tensor a_scale, Tensor b_scale, *, bool use_fast_accum=False, "
    "float eps=1e-06, ScalarType? out_dtype=None, int? chunk=None, Tensor? prefetch=None, "
    f"{GROUP}) -> (Tensor, Tensor)",
    _kernel,
    _fake,
)
_register(
    "gemm_all_reduce_norm_quantised(Tensor a, Tensor b, Tensor norm_weight, "
    "Tensor? residual=None, Tensor? bias=None, Tensor? a_scale=None, Tensor? b_scale=None, *, "
    "bool use_fast_accum=False, float eps=1e-06, int? chunk=None, Tensor? prefetch=None, "
    f"{GROUP}) -> (Tensor, Tensor, Tensor)",
    partial(_kernel, quantises=True),
    _fake_quantised,
)
