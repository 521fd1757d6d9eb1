"""Turns (op, shapes, world, capabilities, topology) into a :class:`LaunchPlan`.

Deterministic: equal inputs give equal plans on every rank, down to the digest. Nothing is started
here, and everything that can be wrong with a call's sizes is found here.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Literal, get_args

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError, Unsupported
from mkernel.plan import chunking, predict
from mkernel.plan.model import DTYPE_BYTES, DtypeName, GemmShape, LaunchPlan, Resources
from mkernel.plan.ops import canonical
from mkernel.topology.cost import MachineConstants, default_constants
from mkernel.topology.model import Topology
from mkernel.topology.placement import place
from mkernel.topology.routing import routes

if TYPE_CHECKING:
    from mkernel.backends.base import AcceleratorCapabilities

MAX_DIMENSION = 2**31 - 1
"""Kernels index rows and columns with 32-bit signed integers."""

Layout = Literal["row", "column"]


def plan(  # noqa: PLR0913 - everything a plan depends on, by name
    op: str,
    *,
    m: int,
    n: int,
    k: int,
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
) -> LaunchPlan:
    """The plan of one op in one world; cached by its inputs.

    Args:
        op: canonical name or alias (``ag_gemm``).
        m, n, k: C [m, n] = A [m, k] @ B [k, n]; m counts the rows of all ranks, n the columns of
            the B that one rank holds.
        dtype: of A and B: ``float16``, ``bfloat16`` or ``float32``.
        out_dtype: of C. None: ``float32``.
        b_layout: ``row``: B is stored [k, n]; ``column``: [n, k], like an ``nn.Linear`` weight.
        nodes, ranks_per_node: the world; ``topology`` must have these nodes, each with at least
            this many accelerators that ranks may use.
        accelerator, capabilities: the backend's name and what it claims.
        nic, verbs: NIC backend and verbs provider between nodes. In a world of one node both are
            dropped from the plan.
        chunk: tiles per chunk. None: see :func:`mkernel.plan.chunking.chunking`.
        compute_blocks, comm_blocks: cores of each kernel. None: all compute cores, and as many
            for communication as :func:`mkernel.plan.chunking.comm_blocks` says.
        constants: of the cost model. None: the shipped ones of the accelerator.

    Raises:
        UnknownOp, Unsupported: no such op, or the backend does not claim it.
        ShapeError, DtypeError, LayoutError, ArgumentError: the argument, its value, what is legal.
        NoRoute: two ranks have no path between them.
    """
    name = canonical(op)
    if name not in capabilities.ops:
        raise Unsupported(
            f"accelerator {accelerator!r} does not provide {name!r}; "
            f"it provides: {', '.join(capabilities.ops) or 'nothing'}"
        )
    if name != "all_gather_gemm":
        raise Unsupported(f"the planner cannot plan {name!r} yet; it plans: all_gather_gemm")
    for argument, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
        _check_integer(ArgumentError, argument, value, MAX_DIMENSION)
    if len(topology.nodes) != nodes:
        raise ArgumentError(
            "nodes", nodes, f"{len(topology.nodes)}, the topology's number of nodes"
        )
    in_dtype = _check_dtype("dtype", dtype, capabilities.dtypes, accelerator)
    result_dtype = _check_dtype(
        "out_dtype", out_dtype or "float32", capabilities.out_dtypes, accelerator
    )
    layout = _check_layout(b_layout, capabilities, accelerator)
    _check_shape(m, n, k, nodes * ranks_per_node, in_dtype, result_dtype, capabilities)
    if chunk is not None:
        _check_integer(ArgumentError, "chunk", chunk, MAX_DIMENSION)
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
        GemmShape(m=m, n=n, k=k),
        in_dtype,
        result_dtype,
        layout,
        ranks_per_node,
        accelerator,
        nic if nodes > 1 else None,
        verbs if nodes > 1 else None,
        topology,
        chunk,
        resources,
        constants if constants is not None else default_constants(accelerator),
    )


@lru_cache(maxsize=256)
def _plan(
    shape: GemmShape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    b_layout: Layout,
    ranks_per_node: int,
    accelerator: str,
    nic: str | None,
    verbs: str | None,
    topology: Topology,
    chunk: int | None,
    resources: Resources,
    constants: MachineConstants,
) -> LaunchPlan:
    """The plan of checked inputs."""
    nodes = len(topology.nodes)
    placement = place(topology, ranks_per_node, nics=nodes > 1)
    paths = routes(topology, placement, constants)
    cut = chunking.chunking(shape.m // len(placement), shape.k, dtype, chunk)
    return LaunchPlan(
        op="all_gather_gemm",
        shape=shape,
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=accelerator,
        nic=nic,
        verbs=verbs,
        placement=placement,
        routes=paths,
        chunking=cut,
        order=chunking.consumption_order(nodes, ranks_per_node),
        resources=resources,
        prediction=predict.all_gather_gemm(
            shape, dtype, out_dtype, placement, paths, cut, resources, constants
        ),
    )


def nearest_multiples(value: int, step: int) -> str:
    """The legal neighbours of a value that must be a positive multiple of ``step``, in words."""
    below = value // step * step
    above = below + step
    return f"{below} or {above}" if below else f"{above}"


def _check_integer(error: type[ArgumentError], argument: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise error(argument, repr(value), f"an integer from 1 to {most}")


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


def _check_shape(
    m: int,
    n: int,
    k: int,
    world: int,
    dtype: DtypeName,
    out_dtype: DtypeName,
    capabilities: AcceleratorCapabilities,
) -> None:
    for argument, value in (("m", m), ("n", n), ("k", k)):
        _check_integer(ShapeError, argument, value, MAX_DIMENSION)
    if m % world:
        raise ShapeError(
            "m",
            m,
            f"a multiple of {world}, the number of ranks; nearest: {nearest_multiples(m, world)}",
        )
    # K is a row's length in A, N in C and in row-major B: every row must start aligned. The
    # narrowest of the dtypes decides for N.
    alignment = capabilities.alignment_bytes
    narrow = min(dtype, out_dtype, key=DTYPE_BYTES.__getitem__)
    for argument, value, of in (("k", k, dtype), ("n", n, narrow)):
        step = alignment // gcd(alignment, DTYPE_BYTES[of])
        if value % step:
            raise ShapeError(
                argument,
                value,
                f"a multiple of {step} ({alignment}-byte alignment of {of} rows); "
                f"nearest: {nearest_multiples(value, step)}",
            )


def _blocks(argument: str, value: int | None, cores: int, default: int | None = None) -> int:
    if value is None:
        return default or cores
    _check_integer(ArgumentError, argument, value, cores)
    return value
