"""The sizes that each op takes, and checks of which are legal in a world on a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.plan.model import (
    DTYPE_BYTES,
    AnyShape,
    AttentionShape,
    CombineShape,
    DispatchShape,
    DtypeName,
    GemmCombineShape,
    GemmShape,
    MoeShape,
    Scales,
    Shape,
    SumShape,
    sums_of,
)
from mkernel.plan.ops import forward
from mkernel.plan.paths import partials_of_experts

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities


MAX_DIMENSION = 2**31 - 1
"""The largest size: kernels index rows and columns with 32-bit signed integers."""

SHAPES: dict[str, type[AnyShape]] = {
    "all_gather_gemm": GemmShape,
    "gemm_reduce_scatter": GemmShape,
    "gemm_all_reduce": GemmShape,
    "all_reduce": SumShape,
    "moe_dispatch": DispatchShape,
    "moe_dispatch_gemm": MoeShape,
    "moe_combine": CombineShape,
    "moe_gemm_combine": GemmCombineShape,
    "ring_attention": AttentionShape,
}
GEMMS = frozenset(op for op, shape in SHAPES.items() if shape is GemmShape)


DEFAULT_SIZES: dict[str, dict[str, int]] = {
    "all_gather_gemm": {"m": 1024, "n": 12288, "k": 256},
    "gemm_reduce_scatter": {"m": 2048, "n": 1024, "k": 512},
    "gemm_all_reduce": {"m": 2048, "n": 1024, "k": 512},
    "all_reduce": {"m": 2048, "n": 1024},
    "moe_dispatch": {"tokens": 512, "hidden": 512, "experts": 24, "top_k": 4},
    "moe_dispatch_gemm": {
        "tokens": 512,
        "hidden": 512,
        "features": 256,
        "experts": 24,
        "top_k": 4,
    },
    "moe_combine": {"tokens": 512, "features": 256, "experts": 24, "top_k": 4},
    "moe_gemm_combine": {
        "tokens": 512,
        "hidden": 512,
        "features": 256,
        "experts": 24,
        "top_k": 4,
    },
    "ring_attention": {"batch": 1, "heads": 8, "kv_heads": 2, "sequence": 1536, "head_dim": 64},
}
"""The sizes that the command line runs by default, which take seconds on a laptop. An
AllGather+GEMM of this size computes as long as it communicates on 2 x 2 simulated A3."""


def sizes_or_defaults(op: str, given: dict[str, int | bool | None]) -> dict[str, int]:
    """Fill in the op's default sizes for those not given. Raises ArgumentError for a size of
    another op."""
    names = size_names(op)
    for name, value in given.items():
        if value is not None and value is not False and name not in names:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(option, value, f"none: {op} takes {', '.join(names)}")
    chosen = {n: v for n, v in given.items() if n in names and v is not None}
    return {**DEFAULT_SIZES[forward(op)], **chosen}


_NO_SIZES = (
    "kind", "activation", "capacity", "documents", "layout", "partial_dtype", "routed", "rows"
)  # fmt: skip
"""Fields of shapes that are options of a call, not sizes of its tensors."""


@cache
def size_names(op: str) -> tuple[str, ...]:
    """Return the names of the sizes that an op's plan takes."""
    return tuple(name for name in SHAPES[forward(op)].model_fields if name not in _NO_SIZES)


@cache
def _fields(op: str) -> dict[str, tuple[bool, bool]]:
    """Return whether each size or option must be given, and whether it is an integer."""
    names, fields = size_names(op), SHAPES[forward(op)].model_fields
    return {
        name: (name in names and field.is_required(), field.annotation is int)
        for name, field in fields.items()
        if name != "kind"
    }


def shape_of(
    op: str,
    sizes: Mapping[str, Any],
    world: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
    promised: DtypeName | None = None,
) -> Shape:
    """Check an op's sizes and return its shape. ArgumentError and ShapeError give the name, the
    value and what is legal. ``promised``: the partial dtype of invariant sums, in which experts'
    results then travel."""
    fields = _fields(op)
    for name, value in sizes.items():
        if name not in fields:
            raise ArgumentError(name, value, f"none: {op} takes {', '.join(size_names(op))}")
    for name, (required, integer) in fields.items():
        if name not in sizes:
            if required:
                legal = f"a number: {op} takes {', '.join(size_names(op))}"
                raise ArgumentError(name, "missing", legal)
        elif integer:
            check_integer(ShapeError, name, sizes[name], MAX_DIMENSION)
    if "partial_dtype" in fields:
        travels = promised or sums_of(dtype, out_dtype)
        kinds = {travels}  # of gradients too: nothing of theirs is rounded before
        if forward(op) == op and promised is None:
            kinds.add(out_dtype)
            travels = partials_of_experts(sizes["tokens"] * sizes["hidden"], out_dtype, travels)
        sizes = {"partial_dtype": travels, **sizes}
        if sizes["partial_dtype"] not in kinds:
            given = repr(sizes["partial_dtype"])
            raise DtypeError("partial_dtype", given, " or ".join(sorted(kinds)))
    try:
        shape = SHAPES[forward(op)](**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or op
        raise ShapeError(name, first.get("input"), first["msg"]) from None
    _check_sizes(op, shape, world, dtype, out_dtype, capabilities)
    return shape


def _check_sizes(
    op: str,
    shape: Shape,
    world: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
) -> None:
    if isinstance(shape, GemmShape):
        _check_gemm(op, shape, world, dtype, out_dtype, capabilities)
    elif isinstance(shape, SumShape):
        _check_aligned("n", shape.n, _narrow(dtype, out_dtype), capabilities)
    elif isinstance(shape, AttentionShape):
        _check_attention(op, shape, world, dtype, capabilities)
    else:
        _check_experts(op, shape, world, dtype, out_dtype, capabilities)


def takes(
    capabilities: AcceleratorCapabilities,
    op: str,
    sizes: Mapping[str, Any],
    world: int,
    dtype: str | None,
    scales: Scales | None = None,
) -> bool:
    """Return whether a backend that has the op takes calls of these sizes, as far as backends
    differ in it: in attention, in scales, and in the dtype of products and sums. Calls of experts
    all go to one backend, since they read each other's handles. True for sizes that no backend
    takes: planning them raises the reason.

    ``dtype`` is None if it is not known yet."""
    kind = SHAPES[forward(op)]
    if scales is not None and kind is GemmShape:
        return scales.mode in capabilities.scale_modes
    if kind in (GemmShape, SumShape):
        return dtype is None or dtype in capabilities.dtypes
    if kind is not AttentionShape:
        return True
    try:
        shape = AttentionShape(**sizes)
    except ValidationError:
        return True
    return dtype in capabilities.dtypes and capabilities.takes_attention(op, shape, world)


def nearest_multiples(value: int, step: int) -> str:
    """Name the legal neighbours of a value that must be a positive multiple of ``step``, in
    words."""
    below = value // step * step
    above = below + step
    return f"{below} or {above}" if below else f"{above}"


def check_integer(error: type[ArgumentError], argument: str, value: object, most: int) -> None:
    """Raise ``error`` unless a value is an integer from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise error(argument, repr(value), f"an integer from 1 to {most}")


def _check_multiple(argument: str, value: int, step: int, of: str) -> None:
    if value % step:
        raise ShapeError(
            argument,
            value,
            f"a multiple of {step}, {of}; nearest: {nearest_multiples(value, step)}",
        )


def _check_aligned(
    argument: str, value: int, dtype: DtypeName, capabilities: AcceleratorCapabilities
) -> None:
    alignment = capabilities.alignment_bytes
    step = alignment // gcd(alignment, DTYPE_BYTES[dtype])
    if value % step:
        raise ShapeError(
            argument,
            value,
            f"a multiple of {step} ({alignment}-byte alignment of {dtype} rows); "
            f"nearest: {nearest_multiples(value, step)}",
        )


def _narrow(dtype: DtypeName, out_dtype: DtypeName) -> DtypeName:
    return min(dtype, out_dtype, key=DTYPE_BYTES.__getitem__)


def _check_gemm(
    op: str,
    shape: GemmShape,
    world: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
) -> None:
    if op != "gemm_all_reduce" and not shape.rows:  # the others cut M over the ranks
        _check_multiple("m", shape.m, world, "the number of ranks")
    # K is a row's length in A, N in C and in row-major B: every row must start aligned. The
    # narrowest of the dtypes decides for N; an e4m3 B is never row-major, but libraries ask as much.
    _check_aligned("k", shape.k, dtype, capabilities)
    _check_aligned("n", shape.n, _narrow(dtype, out_dtype), capabilities)


def _check_experts(
    op: str,
    shape: MoeShape | DispatchShape | CombineShape | GemmCombineShape,
    world: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
) -> None:
    _check_multiple("experts", shape.experts, world, "the number of ranks")
    if shape.top_k > shape.experts:
        raise ShapeError("top_k", shape.top_k, f"at most {shape.experts}, the number of experts")
    routed = isinstance(shape, MoeShape | DispatchShape) and shape.routed
    if routed and forward(op) != op:
        raise ArgumentError("shape.routed", True, f"False: {op} always reads an earlier routing")
    if routed and capabilities.reuses_routing == "never":
        why = "this accelerator exchanges ids in each dispatch"
        raise ArgumentError("handle", "of an earlier dispatch", f"None: {why}")
    if isinstance(shape, DispatchShape):
        _check_aligned("hidden", shape.hidden, dtype, capabilities)
        if out_dtype != dtype:
            raise DtypeError("out_dtype", repr(out_dtype), f"{dtype!r}: rows come as they are sent")
        return
    _check_aligned("features", shape.features, _narrow(dtype, out_dtype), capabilities)
    if isinstance(shape, MoeShape):
        _check_aligned("hidden", shape.hidden, dtype, capabilities)
        if shape.activation not in (None, *capabilities.activations):
            known = " or ".join(map(repr, (*capabilities.activations, None)))
            raise ArgumentError("activation", repr(shape.activation), f"{known}, here")
    if isinstance(shape, GemmCombineShape):
        _check_aligned("hidden", shape.hidden, _narrow(dtype, out_dtype), capabilities)


def _check_attention(
    op: str,
    shape: AttentionShape,
    world: int,
    dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
) -> None:
    of = "the number of ranks"
    if shape.causal:
        of = "twice the number of ranks (each holds two zigzag pieces)"
    if capabilities.positions > 1:
        of += f", times {capabilities.positions}"
    _check_multiple("sequence", shape.sequence, capabilities.sequence_step(shape, world), of)
    _check_multiple("heads", shape.heads, shape.kv_heads, "kv_heads")
    _check_aligned("head_dim", shape.head_dim, dtype, capabilities)
    widths = capabilities.head_dims
    if widths and shape.head_dim not in widths:
        raise ShapeError("head_dim", shape.head_dim, f"one of {', '.join(map(str, widths))}")
    if shape.layout not in capabilities.attention_layouts:
        raise LayoutError(
            "layout", repr(shape.layout), f"one of: {', '.join(capabilities.attention_layouts)}"
        )
    if shape.documents and op not in capabilities.documents:
        why = f"this accelerator takes none that are packed, in {op}"
        raise ArgumentError("documents", True, f"False: {why}")


def checked_boundaries(values: Sequence[int], sequence: int) -> Sequence[int]:
    """Check and return the boundaries [N + 1] of N documents in a sequence: document i is positions
    values[i] to values[i + 1] - 1; it may be empty.

    Raises ArgumentError if they do not begin with 0, or end with the sequence's length, or one is
    smaller than the one before.
    """
    ordered = all(first <= second for first, second in pairwise(values))
    if len(values) < 2 or values[0] != 0 or values[-1] != sequence or not ordered:
        shown = [*values] if len(values) <= 8 else [*values[:4], "...", *values[-3:]]
        raise ArgumentError(
            "cu_seqlens",
            shown,
            f"where each document begins: from 0 to {sequence}, the length of the whole sequence, "
            "none smaller than the one before",
        )
    return values
