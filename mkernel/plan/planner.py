"""Turns (op, shapes, world, capabilities, topology) into a :class:`LaunchPlan`.

Deterministic: equal inputs give equal plans on every rank, down to the digest. Nothing is started
here, and everything that can be wrong with a call's sizes is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast, get_args

from mkernel.errors import ArgumentError, DtypeError, LayoutError, Unsupported
from mkernel.plan import chunking, paths, predict
from mkernel.plan.model import (
    DtypeName,
    GemmShape,
    LaunchPlan,
    OpName,
    PathChoice,
    PathName,
    Prediction,
    Resources,
    Shape,
)
from mkernel.plan.ops import canonical
from mkernel.plan.order import ConsumptionOrder
from mkernel.plan.shapes import MAX_DIMENSION, check_integer, shape_of
from mkernel.topology.cost import MachineConstants, default_constants
from mkernel.topology.kinds import NodeKinds, node_kinds
from mkernel.topology.model import Topology
from mkernel.topology.placement import NOT_PINNED, Pinning, place
from mkernel.topology.routing import routes

if TYPE_CHECKING:
    from mkernel.backends.base import AcceleratorCapabilities

Layout = Literal["row", "column"]


def plan(  # noqa: PLR0913 - keywords, one decision each
    op: str,
    sizes: Mapping[str, int],
    *,
    dtype: str,
    out_dtype: str | None = None,
    b_layout: str = "row",
    nodes: int,
    ranks_per_node: int,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    nic: str | None,
    verbs: str | None,
    topology: Topology,
    chunk: int | None = None,
    compute_blocks: int | None = None,
    comm_blocks: int | None = None,
    constants: MachineConstants | None = None,
    path: str = "auto",
    pinning: Pinning = NOT_PINNED,
) -> LaunchPlan:
    """The plan of one op in one world; cached by its inputs.

    Args:
        op: canonical name or alias (``ag_gemm``).
        sizes: those of the op's shape (:mod:`mkernel.plan.model`): ``m``, ``n``, ``k``; or
            ``tokens``, ``hidden``, ``features``, ``experts``, ``top_k``; or ``batch``, ``heads``,
            ``kv_heads``, ``sequence``, ``head_dim``, ``causal``.
        dtype: of the inputs: ``float16``, ``bfloat16`` or ``float32``.
        out_dtype: of the output. None: ``float32``, or the inputs' where the backend keeps it.
        b_layout: ``row``: B is stored [k, n]; ``column``: [n, k], like an ``nn.Linear`` weight.
        nodes, ranks_per_node: the world; ``topology`` must have these nodes, each with at least
            this many accelerators that ranks may use.
        accelerator, capabilities: the backend's name and what it claims.
        nic, verbs: NIC backend and verbs provider between nodes. In a world of one node both are
            dropped from the plan.
        chunk: tiles (or rows, see ``capabilities.chunk_unit``) a chunk. None: the default of
            :func:`mkernel.plan.chunking.chunking` or :func:`mkernel.plan.chunking.row_chunk`.
        compute_blocks, comm_blocks: cores of each kernel. None: all compute cores, and as many
            for communication as :func:`mkernel.plan.chunking.comm_blocks` says.
        constants: of the cost model. None: the shipped ones of the accelerator.
        path: ``library``; ``fused``, where it keeps the limit of error
            (:func:`mkernel.plan.paths.fusable`); ``auto``: the one that is predicted to be faster.
        pinning: what the user decided of the placement.

    Raises:
        UnknownOp, Unsupported: no such op, or the backend does not claim it, or not on that path.
        ShapeError, DtypeError, LayoutError, ArgumentError: the argument, its value, what is legal.
        NoRoute: two ranks have no path between them.
    """
    name = canonical(op)
    if name not in capabilities.ops:
        raise Unsupported(
            f"accelerator {accelerator!r} does not provide {name!r}; "
            f"it provides: {', '.join(capabilities.ops) or 'nothing'}"
        )
    for argument, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
        check_integer(ArgumentError, argument, value, MAX_DIMENSION)
    if len(topology.nodes) != nodes:
        raise ArgumentError(
            "nodes", nodes, f"{len(topology.nodes)}, the topology's number of nodes"
        )
    in_dtype = _check_dtype("dtype", dtype, capabilities.dtypes, accelerator)
    default = "float32" if capabilities.mixed_dtypes else in_dtype
    result_dtype = _check_dtype(
        "out_dtype", out_dtype or default, capabilities.out_dtypes, accelerator
    )
    if not capabilities.mixed_dtypes and result_dtype != in_dtype:
        raise DtypeError(
            "out_dtype",
            repr(result_dtype),
            f"{in_dtype!r}, the inputs'",
            why=f"accelerator {accelerator!r} keeps it",
        )
    layout = _check_layout(b_layout, capabilities, accelerator)
    world = nodes * ranks_per_node
    shape = shape_of(name, sizes, world, in_dtype, result_dtype, capabilities)
    library = _has_library_path(path, name, nodes, accelerator, capabilities)
    if chunk is not None:
        check_integer(ArgumentError, "chunk", chunk, MAX_DIMENSION)
    resources = Resources(
        compute_blocks=_blocks("compute_blocks", compute_blocks, capabilities.compute_cores),
        comm_blocks=_blocks(
            "comm_blocks",
            comm_blocks,
            capabilities.comm_cores,
            default=chunking.comm_blocks(nodes, ranks_per_node, capabilities.comm_cores),
        ),
    )
    if nodes > 1:
        for argument, given, what in (("nic", nic, "NIC backend"), ("verbs", verbs, "provider")):
            if not given:
                raise ArgumentError(
                    argument, given, f"the name of a {what}", why=f"the world has {nodes} nodes"
                )
    return _plan(
        name,
        shape,
        in_dtype,
        result_dtype,
        layout,
        _Places(node_kinds(topology), ranks_per_node, pinning),
        accelerator,
        (nic, verbs) if nodes > 1 else (None, None),
        _Choice(
            capabilities.chunk_unit,
            capabilities.row_chunks if capabilities.overlaps else 1,
            chunk,
            cast(PathChoice, path),
            library,
            capabilities.compute_cores,
        ),
        resources,
        constants if constants is not None else default_constants(accelerator),
    )


@dataclass(frozen=True)
class _Places:
    """Where ranks can be, and what the user decided of it."""

    kinds: NodeKinds
    ranks_per_node: int
    pinning: Pinning


@dataclass(frozen=True)
class _Choice:
    """How the caller and the backend want chunks; the path that the caller wants, whether the backend
    has a library path, and how many cores that has."""

    unit: Literal["tiles", "rows"]
    row_chunks: int
    chunk: int | None
    path: PathChoice
    library: bool
    cores: int


@lru_cache(maxsize=256)
def _plan(
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    b_layout: Layout,
    places: _Places,
    accelerator: str,
    between: tuple[str | None, str | None],
    choice: _Choice,
    resources: Resources,
    constants: MachineConstants,
) -> LaunchPlan:
    """The plan of checked inputs."""
    kinds, ranks_per_node = places.kinds, places.ranks_per_node
    nodes = len(kinds.of)
    placement = place(kinds, ranks_per_node, nics=nodes > 1, pinning=places.pinning)
    links = routes(kinds, placement, constants)
    tiles, rows = None, None
    if choice.unit == "rows":
        rows = chunking.row_chunk(shape, len(placement), choice.chunk, choice.row_chunks)
    elif isinstance(shape, GemmShape):
        own_rows = shape.m if op == "gemm_all_reduce" else shape.m // len(placement)
        tiles = chunking.chunking(own_rows, shape.k, dtype, choice.chunk)
    path, prediction = _predicted(choice, op, shape, dtype, len(placement), resources, constants)
    if prediction is None:
        prediction = predict.predict(
            op, shape, dtype, out_dtype, placement, links, tiles, resources, constants
        )
    return LaunchPlan(
        op=op,
        shape=shape,
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        path=path,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=accelerator,
        nic=between[0],
        verbs=between[1],
        placement=placement,
        routes=links,
        chunking=tiles,
        rows_per_chunk=rows,
        order=ConsumptionOrder(nodes=nodes, ranks_per_node=ranks_per_node),
        resources=resources,
        prediction=prediction,
    )


def _predicted(
    choice: _Choice,
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    world: int,
    resources: Resources,
    constants: MachineConstants,
) -> tuple[PathName, Prediction | None]:
    """The path, and its times where both paths' are known. A tie goes to the fused one."""
    wanted: PathName = "library" if choice.path == "library" else "fused"
    if not choice.library or not isinstance(shape, GemmShape):
        return wanted, None
    if not paths.fusable(op, shape, dtype, world):
        wanted = "library"
    both = paths.predict(op, shape, dtype, world, resources.compute_blocks, choice.cores, constants)
    if both is None:
        return wanted, None
    fused, library = both
    if choice.path == "auto" and library.pipelined_us < fused.pipelined_us:
        wanted = "library"
    return wanted, library if wanted == "library" else fused


def _has_library_path(
    path: str, op: OpName, nodes: int, accelerator: str, capabilities: AcceleratorCapabilities
) -> bool:
    if path not in get_args(PathChoice):
        raise ArgumentError("path", repr(path), f"one of: {', '.join(get_args(PathChoice))}")
    found = op in capabilities.library_ops and nodes == 1
    if path == "library" and not found:
        where = f" in a world of {nodes} nodes" if op in capabilities.library_ops else ""
        raise Unsupported(
            f"accelerator {accelerator!r} has no library path for {op!r}{where}; "
            "set MKERNEL_PATH to auto or fused"
        )
    return found


def _check_dtype(
    argument: str, value: str, claimed: tuple[DtypeName, ...], accelerator: str
) -> DtypeName:
    if value not in get_args(DtypeName):
        raise DtypeError(argument, repr(value), f"one of: {', '.join(get_args(DtypeName))}")
    if value not in claimed:
        raise DtypeError(
            argument,
            repr(value),
            f"one of: {', '.join(claimed)}",
            why=f"accelerator {accelerator!r} does not take it",
        )
    return value


def _check_layout(value: str, capabilities: AcceleratorCapabilities, accelerator: str) -> Layout:
    if value not in get_args(Layout):
        raise ArgumentError("b_layout", repr(value), f"one of: {', '.join(get_args(Layout))}")
    if value not in capabilities.b_layouts:
        raise LayoutError(
            "b_layout",
            repr(value),
            f"one of: {', '.join(capabilities.b_layouts)}",
            why=f"accelerator {accelerator!r} does not read it",
        )
    return value


def _blocks(argument: str, value: int | None, cores: int, default: int | None = None) -> int:
    if value is None:
        return default or cores
    check_integer(ArgumentError, argument, value, cores)
    return value
