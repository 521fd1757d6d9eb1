"""Checks of a plan's arguments other than sizes against what the backend claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from mkernel.errors import ArgumentError, DtypeError, LayoutError, Unsupported
from mkernel.plan.model import E4M3, DtypeName, OpName, PathChoice
from mkernel.plan.ops import COMPANIONS, canonical, forward
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.plan.shapes import check_integer
from mkernel.plan.strides import Layout
from mkernel.topology.model import MAX_ACCELERATORS, MAX_NODES

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities

MAX_RANKS = 131072
"""The largest world that is planned."""

_NOTHING_TO_SHARE: tuple[str, ...] = ("moe_dispatch_gemm", *COMPANIONS)
"""Ops that exchange separate rows between every pair of ranks, so no message serves a whole
node."""


_GEMMS: tuple[str, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
_WITHOUT_B: tuple[str, ...] = ("all_reduce", "moe_combine", "ring_attention")
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
    or one rank a node all exchanges are the same, and the result is ``direct``. Raises
    ArgumentError."""
    if wanted not in ("auto", *_EXCHANGES):
        raise ArgumentError("exchange", repr(wanted), f"one of: auto, {', '.join(_EXCHANGES)}")
    if 1 in (nodes, ranks_per_node):
        return ("direct",)
    if forward(op) in _NOTHING_TO_SHARE:
        if wanted == "hierarchical":
            raise ArgumentError(
                "exchange", repr(wanted), f"direct for {op!r}: each pair exchanges rows of its own"
            )
        return ("direct",)
    return tuple(one for one in _EXCHANGES if wanted in ("auto", one))


def way_home(op: str, sizes: Mapping[str, Any]) -> tuple[Mapping[str, Any], Returns | None]:
    """Split the wish ``returns`` off the sizes and options of GEMM+combine: how results come home.
    Returns the other sizes and options, and the wish or None. Raises ArgumentError."""
    if canonical(op) != "moe_gemm_combine" or "returns" not in sizes:
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
    path: str, op: OpName, nodes: int, accelerator: str, capabilities: AcceleratorCapabilities
) -> bool:
    """Return whether the op has a library path in that world. Raises ArgumentError for an unknown
    path, and Unsupported if ``path`` asks for a library path that does not exist."""
    if path not in _PATHS:
        raise ArgumentError("path", repr(path), f"one of: {', '.join(_PATHS)}")
    found = op in capabilities.library_ops and nodes == 1
    if path == "library" and not found:
        where = f" in a world of {nodes} nodes" if op in capabilities.library_ops else ""
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
    if value != "row" and forward(op) in _WITHOUT_B:
        raise ArgumentError("b_layout", repr(value), f"'row': {op} has no such tensor")
    if value not in capabilities.b_layouts:
        raise LayoutError(
            "b_layout",
            repr(value),
            f"one of: {', '.join(capabilities.b_layouts)}",
            why=f"accelerator {accelerator!r} does not read it",
        )
    return value
