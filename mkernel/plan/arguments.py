"""The arguments of a plan other than sizes, and their checks against what the backend claims: dtypes,
layouts, paths, exchanges, scales, and what an op does on its own rank around the launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError, Unsupported
from mkernel.plan.invariance import STEP, Invariant
from mkernel.plan.model import (
    BLOCK,
    E4M3,
    Copied,
    DtypeName,
    OpName,
    PathChoice,
    ScaleMode,
    Scales,
    scales_of_rows,
)
from mkernel.plan.ops import canonical, forward
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.plan.shapes import MAX_DIMENSION, check_integer
from mkernel.topology.model import MAX_ACCELERATORS, MAX_NODES

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities


_COPIED: tuple[Copied, ...] = get_args(Copied)

Layout = Literal["row", "column"]
Strides = Literal["packed", "pitched", "scattered"]
"""The gaps of a matrix, seen in its major order. ``packed``: none. ``pitched``: one behind every
row, after which the next row is aligned again. ``scattered``: neither."""
_STRIDES: tuple[Strides, ...] = get_args(Strides)


class Stored(NamedTuple):
    """The major order of a matrix, and its strides in that order."""

    layout: Layout
    strides: Strides


def rows_of(sizes: Sequence[int], strides: Sequence[int], step: int) -> Strides:
    """Classify how [..., width] lies in memory as a matrix of rows, whose last dimension is the
    width.

    Args:
        sizes, strides: those of a tensor with at least one element, as torch counts them.
        step: elements by which aligned rows begin.
    """
    width = sizes[-1]
    if width > 1 and strides[-1] != 1:
        return "scattered"
    outer = [
        (size, stride)
        for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True)
        if size > 1
    ]
    if not outer:
        return "packed"
    pitch = expected = outer[0][1]
    for size, stride in outer:
        if stride != expected:
            return "scattered"
        expected = size * stride
    if pitch == width:
        return "packed"
    return "pitched" if pitch > width and pitch % step == 0 else "scattered"


def stored(sizes: Sequence[int], strides: Sequence[int], step: int) -> Stored:
    """Classify how a matrix lies in memory: by rows, or by columns if it does not lie so by
    rows."""
    by_rows = rows_of(sizes, strides, step)
    by_columns = rows_of(sizes[::-1], strides[::-1], step)
    if by_rows == "packed" or (by_rows == "pitched" and by_columns != "packed"):
        return Stored("row", by_rows)
    if by_columns != "scattered" or strides[0] < strides[1]:  # a copy reads it as it lies
        return Stored("column", by_columns)
    return Stored("row", by_rows)


def copied(strides: Mapping[str, Strides], pitched: Collection[str]) -> tuple[Copied, ...]:
    """Return the tensors of a call that the op copies before or after the launch. Raises
    ArgumentError.

    Args:
        strides: strides by name; a missing tensor is packed.
        pitched: operands that the backend takes with a pitch.
    """
    for name, found in strides.items():
        if name not in _COPIED or found not in _STRIDES:
            legal = f"{' or '.join(_STRIDES)}, of {', '.join(_COPIED)}"
            raise ArgumentError("strides", f"{name}: {found}", legal)
    taken = {"packed": _COPIED, "pitched": pitched, "scattered": ()}
    return tuple(name for name in _COPIED if name not in taken[strides.get(name, "packed")])


MAX_RANKS = 131072
"""The largest world that is planned."""

_DIRECT: tuple[str, ...] = tuple(
    f"moe_{op}_backward" for op in ("dispatch", "combine", "gemm_combine")
)
"""Ops whose ranks exchange directly, whatever is asked: nobody relays gradients of experts."""


_GEMMS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
WITHOUT_B: tuple[str, ...] = ("all_reduce", "moe_dispatch", "moe_combine", "ring_attention")
"""Ops whose operands have only one layout."""
_EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
_PATHS: tuple[PathChoice, ...] = get_args(PathChoice)
_DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
_LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def check_world(
    nodes: int, ranks_per_node: int, names: tuple[str, str] = ("nodes", "ranks_per_node")
) -> None:
    """Raise ArgumentError unless the world has at most 16,384 nodes of 256 ranks, 131,072 ranks in
    all.

    Args:
        names: what messages call the two arguments.
    """
    check_integer(ArgumentError, names[0], nodes, MAX_NODES)
    check_integer(
        ArgumentError, names[1], ranks_per_node, min(MAX_ACCELERATORS, MAX_RANKS // nodes)
    )


def exchanges(wanted: str, op: OpName, nodes: int, ranks_per_node: int) -> tuple[Exchange, ...]:
    """Check the wish and return the exchanges to choose from, the default first. With one node
    or one rank a node all exchanges are the same, and the result is ``direct``, as it is for gradients
    of experts. Raises ArgumentError."""
    if wanted not in ("auto", *_EXCHANGES):
        raise ArgumentError("exchange", repr(wanted), f"one of: auto, {', '.join(_EXCHANGES)}")
    if 1 in (nodes, ranks_per_node) or op in _DIRECT:
        return ("direct",)
    return tuple(one for one in _EXCHANGES if wanted in ("auto", one))


def way_home(op: str, sizes: Mapping[str, Any]) -> tuple[Mapping[str, Any], Returns | None]:
    """Split the wish ``returns`` off the sizes and options of GEMM+combine: how results come home.
    Returns the other sizes and options, and the wish or None. Raises ArgumentError."""
    if "returns" not in sizes or canonical(op) != "moe_gemm_combine":
        return sizes, None
    wanted = sizes["returns"]
    if wanted not in get_args(Returns):
        raise ArgumentError("returns", repr(wanted), f"one of: {', '.join(get_args(Returns))}")
    return {name: size for name, size in sizes.items() if name != "returns"}, wanted


def path_of(op: str, setting: PathChoice) -> PathChoice:
    """Return the path that calls of an op request, given the setting. The setting concerns GEMM ops
    only, since the other ops have one path; they get ``auto``."""
    return setting if forward(op) in _GEMMS else "auto"


def has_library_path(
    path: str,
    op: OpName,
    nodes: int,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    invariant: Invariant | None = None,
) -> bool:
    """Return whether the op has a library path in that world, which ``invariant`` results never have
    beside a fused one. Raises ArgumentError for an unknown path, and Unsupported if ``path`` asks for
    one that does not exist."""
    if path not in _PATHS:
        raise ArgumentError("path", repr(path), f"one of: {', '.join(_PATHS)}")
    alone = op in capabilities.only_library_ops
    found = op in capabilities.library_ops and (nodes == 1 or alone) and invariant is None
    if path == "fused" and alone:
        raise Unsupported(
            f"accelerator {accelerator!r} has no kernel that does all of {op!r}; "
            "set MKERNEL_PATH to auto or library"
        )
    if path == "library" and not found:
        where = f" in a world of {nodes} nodes" if op in capabilities.library_ops else ""
        where = where if invariant is None else " with invariant results"
        raise Unsupported(
            f"accelerator {accelerator!r} has no library path for {op!r}{where}; "
            "set MKERNEL_PATH to auto or fused"
        )
    return found


def check_dtype(
    argument: str, value: str, claimed: tuple[DtypeName, ...], accelerator: str
) -> DtypeName:
    """Check a dtype, given by name or as a dtype of torch, and return its name. Raises DtypeError
    unless the backend claims it."""
    value = str(value).removeprefix("torch.")
    value = E4M3 if value == "float8_e4m3" else value
    if value not in _DTYPES:
        raise DtypeError(argument, repr(value), f"one of: {', '.join(_DTYPES)}")
    if value not in claimed:
        raise DtypeError(
            argument,
            repr(value),
            f"one of: {', '.join(claimed)}",
            why=f"accelerator {accelerator!r} does not take it",
        )
    return value


def check_layout(
    value: str, op: OpName, capabilities: AcceleratorCapabilities, accelerator: str
) -> Layout:
    """Check the layout of B and return it. Raises LayoutError if the backend does not claim it,
    ArgumentError if it is unknown or the op has no B."""
    if value not in _LAYOUTS:
        raise ArgumentError("b_layout", repr(value), f"one of: {', '.join(_LAYOUTS)}")
    if value != "row" and forward(op) in WITHOUT_B:
        raise ArgumentError("b_layout", repr(value), f"'row': {op} has no such tensor")
    if value not in capabilities.b_layouts:
        raise LayoutError(
            "b_layout",
            repr(value),
            f"one of: {', '.join(capabilities.b_layouts)}",
            why=f"accelerator {accelerator!r} does not read it",
        )
    return value


# ---- scales of e4m3 operands ---------------------------------------------------------------------
#
# With a of [M, K] and b of [K, N] in float8_e4m3fn, and float32 scales,
#
#     C[m, n] = sum over k of (a[m, k] * a_scale[m, k]) * (b[k, n] * b_scale[k, n])
#
# where the scales of a mode are spread over the elements that they are of:
#
#     tensor  a_scale [1, 1]          b_scale [1, 1]
#     row     a_scale [M, 1]          b_scale [1, N]
#     block   a_scale [M, K / 128]    b_scale [K / 128, N / 128], N / 128 rounded up
#
# as ``torch._scaled_mm`` has them. The scales of A are a rank's own and go where its rows go. MoE ops
# have scales by blocks alone, those of B for each expert.

RESULTS: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")
"""Dtypes of results of e4m3 operands, the default first."""
SCALED_EXPERTS: tuple[OpName, ...] = ("moe_dispatch", "moe_dispatch_gemm", "moe_gemm_combine")
"""MoE ops that take e4m3 operands. Results of a dispatch are e4m3 too, and those of dispatch+GEMM may
be: the launch quantises them by rows and blocks, from float32."""


def scale_sizes(
    mode: ScaleMode, rows: int, n: int, k: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the scales of an A of so many rows, and of B."""
    of_b = {"tensor": (1, 1), "row": (1, n), "block": (k // BLOCK, -(-n // BLOCK))}
    return scales_of_rows(mode, rows, k), of_b[mode]


def check_scales(
    op: OpName,
    dtype: str,
    out_dtype: str | None,
    layout: str,
    scales: Scales | None,
    claims: AcceleratorCapabilities,
    accelerator: str,
) -> None:
    """Check the scales of an op against its dtypes, its layout and the backend's claims.

    Raises:
        DtypeError: operands without scales that need some, or the other way round; scales that the
            backend does not claim; a result that e4m3 operands do not have. ArgumentError: fewer
            bits for sums of blocks. LayoutError: B.
    """
    if (scales is not None) != (dtype == E4M3):
        legal = "operands of float8_e4m3fn beside scales, and no others"
        raise DtypeError(
            "dtype", repr(dtype), legal, why="a_scale and b_scale are of such operands"
        )
    if scales is None:
        return
    experts = op in SCALED_EXPERTS
    if experts and scales.quantises not in (None, "float16", "bfloat16"):
        raise ArgumentError("quantises", scales.quantises, "float16 or bfloat16")
    if not experts and scales.quantises is not None:
        raise ArgumentError("quantises", scales.quantises, f"None: {op} takes e4m3 rows")
    modes: tuple[ScaleMode, ...] = claims.scale_modes
    if experts:
        modes = ("block",) if claims.scaled_experts else ()
    if scales.mode not in modes:
        claimed = f"{' or '.join(modes)} scales" if modes else "none"
        reason = claims.why_no_scaled_experts if experts and not modes else ""
        raise DtypeError(
            "dtype",
            f"{dtype!r} with {scales.mode} scales",
            f"what accelerator {accelerator!r} takes: of e4m3 operands {claimed}"
            + f"{f' in {op}' if experts else ''}; else "
            + ", ".join(claims.dtypes),
            why=reason,
        )
    if scales.mode == "block" and scales.use_fast_accum:
        raise ArgumentError(
            "use_fast_accum", True, "False: sums of products with scales by blocks are float32"
        )
    quantised = op in ("moe_dispatch", "moe_dispatch_gemm") and out_dtype == E4M3
    if out_dtype is not None and out_dtype not in RESULTS and not quantised:
        raise DtypeError(
            "out_dtype", repr(out_dtype), f"one of: {', '.join(RESULTS)}", why="operands are e4m3"
        )
    if layout != "column" and op not in WITHOUT_B:
        raise LayoutError(
            "w" if experts else "b",
            "row-major",
            "K-major, as matrix units read e4m3: the transpose of a contiguous [N, K], such as "
            "weight.t(); else b.t().contiguous().t()",
        )


def check_blocks(scales: Scales | None, name: str, k: int) -> None:
    """Raise ShapeError if blocks of scales do not cover K, the size of that name."""
    if scales is not None and scales.mode == "block" and k % BLOCK:
        raise ShapeError(name, k, f"a multiple of {BLOCK}, with scales by blocks")


# ---- invariant results ---------------------------------------------------------------------------

_SUMS_OF_PRODUCTS = tuple(op for op in _GEMMS if op != "all_gather_gemm")
UNDIVIDED: tuple[OpName, ...] = (
    "all_gather_gemm",
    "moe_dispatch",
    "moe_dispatch_gemm",
    "ring_attention",
)
"""Ops whose invariant results know no segments: they add nothing over ranks, nor over experts."""


def promised(
    op: OpName,
    wanted: Invariant | None,
    dtype: str,
    out_dtype: DtypeName,
    ranks: int,
    claims: AcceleratorCapabilities,
    accelerator: str,
) -> Invariant | None:
    """Check that the backend promises invariant results of an op in a world of so many ranks, and
    return the sum that a plan has: only what decides its bits, with the partial dtype.

    Raises:
        Unsupported: the backend does not claim it. DtypeError: float64. ArgumentError: segments that
            the ranks do not share evenly.
    """
    if wanted is None:
        return None
    if op not in claims.invariant_ops:
        raise Unsupported(
            f"accelerator {accelerator!r} does not promise invariant results of {op!r}; it does of: "
            f"{', '.join(claims.invariant_ops) or 'nothing'}; pass invariant=False where an op takes "
            "it, or make the world without MKERNEL_INVARIANT"
        )
    for name, given in (("dtype", dtype), ("out_dtype", out_dtype)):
        if given == "float64":
            raise DtypeError(name, given, "at most float32, with invariant results")
    if op in UNDIVIDED:
        return Invariant(1, "float32")
    if wanted.segments % ranks:
        legal = f"a power of two that the world's {ranks} ranks divide"
        if ranks & (ranks - 1):
            legal = f"a world of 1, 2, 4, ... ranks, not of {ranks}: segments are a power of two"
        raise ArgumentError("segments", wanted.segments, legal, why=f"{op} with invariant results")
    segments = ranks if op == "all_reduce" else wanted.segments
    return Invariant(segments, wanted.partial_of(out_dtype))


def check_segments(
    op: OpName, invariant: Invariant | None, k: int, ranks: int, scales: Scales | None
) -> None:
    """Raise ShapeError unless segments cut K, ``k`` of each rank, into whole steps."""
    if invariant is None or op not in _SUMS_OF_PRODUCTS:
        return
    step = BLOCK if scales is not None and scales.mode == "block" else STEP
    each = step * invariant.segments // ranks
    if k % each:
        legal = (
            f"a multiple of {each}: {invariant.segments} segments of K on {ranks} ranks, each a "
        )
        raise ShapeError("k", k, f"{legal}multiple of {step}; or fewer segments")


# ---- steps around a launch -----------------------------------------------------------------------

NORMALISES: tuple[OpName, ...] = ("gemm_all_reduce", "all_reduce")
"""Ops that give every rank whole rows of a sum over ranks, which can be normalised."""


class Norm(NamedTuple):
    """The normalisation of the rows of a sum over ranks: ``residual`` says whether a residual is
    added before it, ``eps`` is added to the mean of squares, and ``quantises`` says whether the rows
    are wanted in e4m3."""

    residual: bool
    eps: float
    quantises: bool = False


class Around(NamedTuple):
    """The steps around a launch, from which :class:`mkernel.plan.model.CommonPart` is made.

    Attributes:
        copies: tensors that the op copies: operands before, results after the launch.
        bias: whether a bias is added.
        norm: the normalisation, for ops that give every rank whole rows; None: there is none.
        products: columns of each B where AllGather+GEMM is given several; the most of these are N.
        scales: scales of e4m3 operands; None: the operands have another dtype.
        invariant: the sum whose bits are promised; None: there is no such promise.
    """

    copies: tuple[Copied, ...] = ()
    bias: bool = False
    products: tuple[int, ...] = ()
    norm: Norm | None = None
    scales: Scales | None = None
    invariant: Invariant | None = None


NOTHING = Around()


def check_around(op: OpName, around: Around, columns: int | None) -> None:
    """Raise ArgumentError for steps that an op does not do.

    Args:
        columns: columns of the product that is launched.
    """
    if around == NOTHING:
        return
    _check_norm(op, around.norm)
    if op not in _GEMMS:
        scales = None if op in SCALED_EXPERTS else around.scales  # these have been checked
        others = around._replace(norm=None, scales=scales, invariant=None)
        for argument, value in others._asdict().items():
            if value:
                raise ArgumentError(argument, repr(value), f"nothing: {op} has no such step")
        return
    legal = [one for one in get_args(Copied) if one != "gathered" or op == "all_gather_gemm"]
    if not around.bias:
        legal.remove("bias")
    if around.scales is None:
        legal = [one for one in legal if not one.endswith("_scale")]
    for name in around.copies:
        if name not in legal:
            raise ArgumentError("copies", repr(name), f"of {', '.join(legal)}")
    products = around.products
    if products and op != "all_gather_gemm":
        raise ArgumentError("products", products, f"(): {op} has one product")
    for each in products:
        check_integer(ArgumentError, "products", each, MAX_DIMENSION)
    if products and max(products) != columns:
        raise ArgumentError(
            "products", products, f"at most {columns} columns, those of the launched one"
        )


def _check_norm(op: OpName, norm: Norm | None) -> None:
    if norm is None:
        return
    if op not in NORMALISES:
        raise ArgumentError("norm", repr(norm), f"nothing: {op} has no such step")
    if not 0 < norm.eps < math.inf:
        raise ArgumentError("eps", norm.eps, "a finite number above 0")
