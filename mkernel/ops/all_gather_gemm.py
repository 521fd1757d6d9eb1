"""AllGather+GEMM: C = concat(a over ranks) @ b, computed while the rows of a still travel.

Data flow of one call on rank r:
  a (own rows) ──compute kernel──▶ rows of C that need no communication, first
  a (own rows) ──comm kernel──▶ chunk by chunk into every peer's workspace: same node by put over
                                the scale-up fabric; other nodes by a command to the NIC's proxy
  each chunk's signal ──▶ the peer's compute kernel goes on with the rows that the chunk holds
Several b share one gather: the call computes the widest product and gives the gathered rows, with which
a library computes the others after it.
Synchronisation: one signal a (source, chunk), awaited as `>= epoch`; none is ever reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from mkernel.backends.contracts.scaled import dequantised
from mkernel.errors import ArgumentError
from mkernel.ops import around, derivatives, flops, validate
from mkernel.ops.around import (
    Scaled,
    as_matrix,
    check_alike,
    refuse_gradients,
    scale_of_rows,
    scaled,
)
from mkernel.ops.gemm import GROUP, GemmCall, GemmOp, copied_to, result_dtype, traced_outputs
from mkernel.ops.plain import plain, untraced
from mkernel.ops.registration import called, native_op, ops, register
from mkernel.ops.steps import Steps
from mkernel.plan import mixed
from mkernel.plan.invariance import Wanted, encoded
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

OP = GemmOp("all_gather_gemm", gathers=True)


Each = TypeVar("Each")


class _Options(TypedDict, Generic[Each], total=False):
    """Options that all overloads take; ``Each`` is a tensor, or a list with one for each b."""

    a_scale: Tensor | None
    b_scale: Each | None
    use_fast_accum: bool
    bias: Each | None
    gather_dim: int
    out: Each | None
    out_dtype: torch.dtype | None
    chunk: int | None
    gathered: Tensor | None
    save_gathered: bool
    invariant: Wanted
    shards: mixed.Shards
    group: Group


@overload
def all_gather_gemm(
    a: Tensor,
    b: Tensor,
    *,
    return_gathered: Literal[False] = False,
    **options: Unpack[_Options[Tensor]],
) -> Tensor: ...


@overload
def all_gather_gemm(
    a: Tensor, b: Tensor, *, return_gathered: Literal[True], **options: Unpack[_Options[Tensor]]
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_gemm(
    a: Tensor,
    b: Sequence[Tensor],
    *,
    return_gathered: Literal[False] = False,
    **options: Unpack[_Options[Sequence[Tensor]]],
) -> list[Tensor]: ...


@overload
def all_gather_gemm(
    a: Tensor,
    b: Sequence[Tensor],
    *,
    return_gathered: Literal[True],
    **options: Unpack[_Options[Sequence[Tensor]]],
) -> tuple[list[Tensor], Tensor]: ...


def all_gather_gemm(
    a: Tensor,
    b: Tensor | Sequence[Tensor],
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | Sequence[Tensor] | None = None,
    use_fast_accum: bool = False,
    bias: Tensor | Sequence[Tensor] | None = None,
    gather_dim: int = 0,
    out: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    gathered: Tensor | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
    invariant: Wanted = None,
    shards: mixed.Shards = "even",
    group: Group = None,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """Compute C [M, N_r] = concat(a over ranks, in rank order) @ b (+ bias), with float32 accumulation.

    Collective: every rank of the world calls it with the same shapes, dtypes and options; strides may
    differ, but for the major order of b.
    Floating point: one fixed order of K per output element, so the result is bit-identical from
    call to call, for every chunk size and, on one path (``LaunchPlan.path``), world split; but where a
    library multiplies ranks' rows by themselves (``LaunchPlan.schedule``), their number decides, and a
    chunk size that is asked for with the path ``library``. NaN and infinities pass as in ``a @ b``.
    A bias is added to the rounded C, which is then rounded again.

    Args:
        a: [M/W, K], this rank's rows; or an activation such as [B, S, K], of which this rank has a
            part along ``gather_dim``, as large as any other's. What is not packed with that dimension
            outermost in memory (``a.movedim(gather_dim, 0).is_contiguous()``) the op copies first,
            where the accelerator does not take it as it is (``LaunchPlan.copies``).
        b: [K, N_r], this rank's columns (N_r the same on every rank), with any strides: row-major and
            column-major ones (the transpose of a contiguous [N_r, K], such as an ``nn.Linear`` weight)
            are never copied, parts of such ones (``W[:, 256:512]``) on most accelerators. Or several,
            which share one gather: the widest product is computed while rows arrive, the others by
            torch when they are there.
        a_scale, b_scale: float32, beside e4m3 ``a`` and ``b`` (``torch.float8_e4m3fn``), of which b is
            K-major: one element each; or [M, 1] and [1, N]; or [M, K / 128] and [K / 128, N / 128]
            (rounded up), by blocks of 128 of a row of A and 128 x 128 of B. M, N, K: of this rank's a
            and b; where a has more dimensions, so has a_scale. A product of elements counts times
            their scales. Scales of a are this rank's own and go where its rows go; what is returned or
            given as ``gathered`` are the elements alone. Of several b, one b_scale each. There are no
            gradients.
        use_fast_accum: products of e4m3 operands may be added with fewer bits than float32 has, where
            the device is faster so, as in ``torch._scaled_mm``; the same on every rank. Not with scales
            by blocks.
        bias: [N_r], in the dtype of ``a`` (of e4m3 ones, of C); of several b, one each.
        gather_dim: dimension of ``a`` along which ranks have parts; any but the last.
        out: [M, N_r] to write to, contiguous, in memory of its own; allocated where None. Of several b,
            one each.
        out_dtype: of C; default: that of ``out``, else that of ``a``; of e4m3 operands bfloat16, else
            float16 or float32.
        chunk: tiles of A a communication chunk; default: the planner's choice.
        gathered: [M, K], contiguous, in the dtype of ``a``, to write the gathered A to; ``a`` may be
            this rank's rows of it, no other argument shares its memory. In memory of
            :func:`mkernel.empty` it costs nothing where kernels gather there.
        return_gathered: return (C, A) with the gathered A; allocated where ``gathered`` is None.
        save_gathered: keep the gathered A in place of a for the backward of b, which takes W times the
            memory of a; else it is gathered again there. Where b needs no gradient nothing is kept.
        invariant: promise that a row's bits depend on that row and b alone, for every world
            (docs/invariance.md). None: as the world says.
        shards: the rows of a rank, by node, along ``gather_dim`` where unlike nodes share M unevenly,
            of one b; ``mkernel.world().shares(M, "speed")`` returns them. Such calls are not compiled.
        group: names the world; None: the default one.

    Returns:
        C [M, N_r], or (C, A); where a has more dimensions they have the same ones, [B, S, N_r]. Of
        several b, a list in place of C. What is allocated is packed with ``gather_dim`` outermost, as
        ``torch.ops.symm_mem.fused_all_gather_matmul`` returns it. A DTensor sharded as the op takes
        it (a along ``gather_dim``, b along 1, bias along 0) counts as its local part; results are
        plain.

    Raises:
        ShapeError, DtypeError, LayoutError, ArgumentError: a wrong argument, or one that is no plain
            tensor (a DTensor placed otherwise, one with a tangent, ...; with ``out`` one that requires
            grad); nothing was started.
        NotInitialized: no world. Unsupported: the accelerator does not provide this op, or the call is
            inside a transform or mode of torch that has to see what it computes.
        PlanMismatch: another rank called with other shapes, dtypes or options.
        PeerFailure, Timeout, NicError, Cancelled: the world broke; every rank raises the same kind.
            A stream-ordered accelerator raises it at the next call, :func:`mkernel.synchronize` or
            :func:`mkernel.finalize`.

    Source of the decomposition: the dual-kernel AllGather+GEMM described in docs/architecture.md.
    """
    more = return_gathered or use_fast_accum or isinstance(b, (list, tuple))
    given = a_scale is not None or b_scale is not None or out is not None or gathered is not None
    given = given or shards != "even"
    keeps = save_gathered and torch.is_grad_enabled() and getattr(b, "requires_grad", False)
    if not (more or given or torch.compiler.is_compiling()):  # which is what most calls are
        arguments = (a, b, bias, gather_dim, out_dtype, chunk, encoded(invariant), group)
        found: Tensor
        if keeps:
            found, _ = ops.all_gather_gemm_gathered(*arguments)
        else:
            found = ops.all_gather_gemm(*arguments)
        return found
    if isinstance(b, (list, tuple)):
        if shards != "even":
            raise ArgumentError("b", f"a list of {len(b)}", "one matrix, beside unequal shards")
        results, whole = _several(
            a, b, _scaled_many(a_scale, b_scale, use_fast_accum, b), bias, gather_dim,
            out, out_dtype, chunk, gathered, save_gathered, encoded(invariant), group,
        )  # fmt: skip
        return (results, whole) if return_gathered else results
    of_one: tuple[Any, Any, Any, Any] = (b, b_scale, bias, out)
    matrix, scale, added, into = of_one
    scales = scaled(a_scale, scale, use_fast_accum)
    call = GemmCall(
        a, matrix, added, gather_dim, into, out_dtype,
        return_gathered if gathered is None else gathered, chunk, scaled=scales,
        invariant=encoded(invariant), shards=mixed.encoded(shards), group=group,
    )  # fmt: skip
    if not (return_gathered or gathered is not None or (keeps and scales is None)):
        return OP.result(call)
    if scales is None:
        c, whole = _and_gathered(call)
        return (c, whole) if return_gathered else c
    lists = [None if each is None else [each] for each in (added, into)]
    (c,), whole = _several(
        a, [matrix], [scales], lists[0], gather_dim,
        lists[1], out_dtype, chunk, gathered, False, call.invariant, group,
    )  # fmt: skip
    return (c, whole) if return_gathered else c


def _and_gathered(call: GemmCall) -> tuple[Tensor, Tensor]:
    """Compute the product with one b and keep the gathered A, through torch's dispatcher where torch
    has to see the call."""
    registered, named = called(call.group)
    a, b, bias, dim, out, out_dtype, gathered, chunk, *_ = call
    if registered is not ops:
        a, b, bias = OP.local(a, b, bias, dim, call.group)
    options = {"gather_dim": dim, "chunk": chunk, "invariant": call.invariant, "group": named}
    into = gathered if isinstance(gathered, Tensor) else None
    given = out if into is None else into
    found: tuple[Tensor, Tensor]
    if given is None and call.shards is None:
        found = registered.all_gather_gemm_gathered(a, b, bias, out_dtype=out_dtype, **options)
        return found
    if traced_outputs(given, a, b, bias):
        wanted = out_dtype or (None if out is None else out.dtype)
        c, whole = registered.all_gather_gemm_gathered(a, b, bias, out_dtype=wanted, **options)
        if out is not None:
            c = copied_to("out", out, c, dim)
        return c, whole if into is None else copied_to("gathered", into, whole, dim)
    found = OP.into(
        a,
        b,
        bias,
        out,
        gathered,
        None,
        None,
        False,
        dim,
        out_dtype,
        chunk,
        None,
        call.group,
        invariant=call.invariant,
        shards=call.shards,
    )
    return found


def _gathered(**given: Any) -> tuple[Tensor, Tensor]:
    outputs = OP.outputs(gathered=True, **given)
    return outputs["out"], outputs["gathered"]


def _gathered_fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    gather_dim: int = 0,
    out_dtype: torch.dtype | None = None,
    group: str,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    ranks = current(group).size
    return OP.fake(a, b, gather_dim, out_dtype, ranks), OP.fake_gathered(a, gather_dim, ranks)


def _rows_kernel(**given: Any) -> Tensor:
    """Gather A alone, by a call whose product, with as few columns of b as it takes, is thrown away."""
    return _gathered(**given)[1]


def _rows_fake(a: Tensor, b: Tensor, *, gather_dim: int = 0, group: str, **options: Any) -> Tensor:
    return OP.fake_gathered(a, gather_dim, current(group).size)


# ---- several b -----------------------------------------------------------------------------------


def _several(
    a: Tensor,
    b: Sequence[Tensor],
    scales: Sequence[Scaled] | None,
    bias: Any,
    gather_dim: int,
    out: Any,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    gathered: Tensor | None,
    save_gathered: bool,
    invariant: str | None,
    group: Group,
) -> tuple[list[Tensor], Tensor]:
    """Compute every product, and return them with the gathered A."""
    biases = _one_each("bias", bias, b)
    outs = _one_each("out", out, b)
    parts = [OP.local(a, *each, gather_dim, group) for each in zip(b, biases, strict=True)]
    a, b, biases = parts[0][0], [each[1] for each in parts], [each[2] for each in parts]
    if scales is not None:
        of_b = {f"b_scale[{at}]": each.b for at, each in enumerate(scales)}
        refuse_gradients(OP.name, a=a, a_scale=scales[0].a, gathered=gathered, **of_b)
        for at, each in enumerate(zip(b, biases, outs, strict=True)):
            named = zip(("b", "bias", "out"), each, strict=True)
            refuse_gradients(OP.name, **{f"{name}[{at}]": one for name, one in named})
    of_a, of_bs = (None, []) if scales is None else (scales[0].a, [each.b for each in scales])
    fast = scales is not None and scales[0].use_fast_accum
    found: tuple[list[Tensor], Tensor]
    if out is not None or gathered is not None:
        found = _INTO(
            a, b, of_a, of_bs, biases, outs, gathered, gather_dim, out_dtype, fast, chunk, invariant,
            group,
        )  # fmt: skip
        return found
    gathers, world = called(group)
    options: dict[str, Any] = {
        "gather_dim": gather_dim,
        "out_dtype": out_dtype,
        "chunk": chunk,
        "invariant": invariant,
        "group": world,
    }
    given = [] if bias is None else biases
    if scales is None:
        keeps = save_gathered and any(each.requires_grad for each in b)
        found = gathers.all_gather_gemms(a, b, given, save_gathered=keeps, **options)
    else:
        found = gathers.all_gather_gemms_scaled(
            a, b, of_a, of_bs, given, use_fast_accum=fast, **options
        )
    return list(found[0]), found[1]


def _scaled_many(
    a_scale: Tensor | None, b_scale: Any, use_fast_accum: bool, b: Sequence[Tensor]
) -> list[Scaled] | None:
    """Return the scales of each product; None: the operands have none."""
    if a_scale is None and b_scale is None:
        scaled(None, None, use_fast_accum)
        return None
    found = (scaled(a_scale, one, use_fast_accum) for one in _one_each("b_scale", b_scale, b))
    return [one for one in found if one is not None]


def _one_each(name: str, given: Any, b: Sequence[Tensor]) -> list[Tensor | None]:
    if not b:
        raise ArgumentError("b", "an empty list", "a matrix, or a list of one or more")
    if given is None:
        return [None] * len(b)
    if not isinstance(given, (list, tuple)) or len(given) != len(b):
        found = (
            f"{len(given)} of them" if isinstance(given, (list, tuple)) else type(given).__name__
        )
        raise ArgumentError(name, found, f"a list of {len(b)}, one for each b")
    return list(given)


@untraced
def _call_several(
    a: Tensor,
    b: Sequence[Tensor],
    scales: Sequence[Scaled] | None,
    biases: Sequence[Tensor | None],
    dim: int,
    outs: Sequence[Tensor | None],
    out_dtype: torch.dtype | None,
    chunk: int | None,
    gathered: Tensor | None,
    invariant: str | None,
    group: Group,
    steps: Steps,
) -> tuple[list[Tensor], Tensor]:
    """Launch the widest product, then compute the products that are left."""
    world = current(group)
    names = [(f"b[{at}]", f"bias[{at}]", f"out[{at}]") for at in range(len(b))]
    for number, label in enumerate(names):
        plain(OP.name, label, (b[number], biases[number], outs[number]))
        matrix = validate.matrix(label[0], b[number])
        validate.on_device(label[0], matrix, world.accelerator.device)
    columns = tuple(each.shape[1] for each in b)
    widest = columns.index(max(columns))
    unless = result_dtype(a)
    dtype = out_dtype or next((each.dtype for each in outs if each is not None), unless)
    for number, (b_name, bias_name, _) in enumerate(names):  # of the widest the call checks it
        other, bias = b[number], biases[number]
        if number != widest:
            validate.same_dtype(f"{b_name}.dtype", other, "a", a)
            validate.same_columns(b_name, other, b[widest])
        if number != widest and bias is not None:
            validate.vector(bias_name, bias, columns[number], a.dtype if scales is None else dtype)
            validate.on_device(bias_name, bias, world.accelerator.device)
    if scales is not None:
        check_alike(a, b, scales, world.accelerator.device)
    read, written = {"a": a, "gathered": gathered}, {}
    for number, (b_name, bias_name, out_name) in enumerate(names):
        read |= {b_name: b[number], bias_name: biases[number]}
        written[out_name] = outs[number]
    validate.apart(written, read)
    call = GemmCall(
        a, b[widest], biases[widest], dim, outs[widest], dtype,
        True if gathered is None else gathered, chunk, products=columns,
        scaled=None if scales is None else scales[widest], invariant=invariant, group=group,
    )  # fmt: skip
    done = OP.call(call, steps)
    whole: Tensor = done.outputs["gathered"]
    dim = validate.dimension("gather_dim", dim, whole)
    lead = OP.lead(whole, dim, 1)
    rows, results = around.as_rows(whole, dim, steps), []
    if scales is not None and len(b) > 1:
        of_rows = steps.do(scale_of_rows, done.outputs["gathered_scale"], len(rows))
        rows = steps.do(dequantised, rows, of_rows)
    for number, width in enumerate(done.plan.products):
        out = outs[number]
        if number == done.plan.launched:
            results.append(done.outputs["out"])
            continue
        made = steps.empty((len(rows), width), rows, dtype)
        shaped = around.from_rows(steps, made, lead, dim)
        other = b[number]
        if scales is not None:
            other = steps.do(dequantised, other, as_matrix(steps, scales[number].b))
        promised = done.plan.invariant is not None
        around.product(steps, rows, other, biases[number], made, promised)
        if out is not None:
            validate.output(names[number][2], out, tuple(shaped.shape), dtype, dim)
            shaped = steps.do(Tensor.copy_, out, shaped)
        results.append(shaped)
    steps.wrote([each for each in (*outs, gathered) if each is not None])
    return results, whole


def _several_kernel(
    *,
    a: Tensor,
    b: list[Tensor],
    bias: list[Tensor],
    gather_dim: int,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    invariant: str | None,
    group: Group,
    steps: Steps,
    a_scale: Tensor | None = None,
    b_scale: Sequence[Tensor] = (),
    use_fast_accum: bool = False,
    save_gathered: bool = False,
    out: Sequence[Tensor | None] = (),
    gathered: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    nothing: list[Tensor | None] = [None] * len(b)
    scales = None
    if a_scale is not None:
        scales = [Scaled(a_scale, one, use_fast_accum) for one in b_scale]
    return _call_several(
        a, b, scales, bias or nothing, gather_dim, out or nothing, out_dtype, chunk, gathered,
        invariant, group, steps,
    )  # fmt: skip


_INTO = native_op(
    "all_gather_gemms_into",
    (
        "a", "b", "a_scale", "b_scale", "bias", "out", "gathered", "gather_dim", "out_dtype",
        "use_fast_accum", "chunk", "invariant", "group",
    ),
    (),
    _several_kernel,
    range_name=OP.name,
)  # fmt: skip


def _several_fake(
    a: Tensor,
    b: list[Tensor],
    bias: list[Tensor],
    *,
    gather_dim: int = 0,
    out_dtype: torch.dtype | None = None,
    group: str,
    **_: Any,
) -> tuple[list[Tensor], Tensor]:
    ranks = current(group).size
    results = [OP.fake(a, each, gather_dim, out_dtype, ranks) for each in b]
    return results, OP.fake_gathered(a, gather_dim, ranks)


def _several_scaled_fake(
    a: Tensor,
    b: list[Tensor],
    a_scale: Tensor,
    b_scale: list[Tensor],
    bias: list[Tensor],
    **options: Any,
) -> tuple[list[Tensor], Tensor]:
    return _several_fake(a, b, bias, **options)


OP.register(derivatives.save_gather, derivatives.gather_backward)
register(
    "all_gather_gemms_scaled(Tensor a, Tensor[] b, Tensor a_scale, Tensor[] b_scale, Tensor[] bias, "
    "*, int gather_dim=0, ScalarType? out_dtype=None, bool use_fast_accum=False, int? chunk=None, "
    f"{GROUP}) -> (Tensor[], Tensor)",
    _several_kernel,
    _several_scaled_fake,
    flops=flops.gather_many,
    range_name=OP.name,
)
register(
    f"all_gather_gemm_gathered({OP.arguments}) -> (Tensor, Tensor)",
    _gathered,
    _gathered_fake,
    derivatives.save_gather,
    derivatives.gather_backward,
    flops=flops.gather_and_keep,
    range_name=OP.name,
    local=OP.localised,
    family=("a",),
)
register(
    f"all_gather_rows(Tensor a, Tensor b, *, int gather_dim=0, int? chunk=None, {GROUP}) -> Tensor",
    _rows_kernel,
    _rows_fake,
    derivatives.save_rows,
    derivatives.rows_backward,
    range_name=OP.name,
)
register(
    "all_gather_gemms(Tensor a, Tensor[] b, Tensor[] bias, *, int gather_dim=0, ScalarType? "
    f"out_dtype=None, int? chunk=None, bool save_gathered=False, {GROUP}) -> (Tensor[], Tensor)",
    _several_kernel,
    _several_fake,
    derivatives.save_gather_many,
    derivatives.gather_many_backward,
    flops=flops.gather_many,
    range_name=OP.name,
)
