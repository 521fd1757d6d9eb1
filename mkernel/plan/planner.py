"""Turns (op, shapes, world, capabilities, topology) into a :class:`LaunchPlan`, or into a
:class:`WhatIf` where something is missing to launch it.

Deterministic: equal inputs give equal plans on every rank, down to the digest. Nothing is started
here, and everything that can be wrong with a call's sizes is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

from mkernel.errors import ArgumentError, DtypeError, Unsupported
from mkernel.plan import arguments, missing, paths
from mkernel.plan.arguments import (
    NOTHING,
    RESULTS,
    Around,
    Layout,
    Norm,
    check_around,
    check_blocks,
    check_scales,
)
from mkernel.plan.missing import WhatIf
from mkernel.plan.model import (
    E4M3,
    BiasStep,
    CommonPart,
    DtypeName,
    GemmShape,
    LaunchPlan,
    NormStep,
    OpName,
    PathChoice,
    PathName,
    Prediction,
    Shape,
)
from mkernel.plan.ops import canonical
from mkernel.plan.pipeline import Exchange, Pipeline, Returns
from mkernel.plan.request import Alternative, Scheduled, Scheduler, ScheduleRequest, TooLarge
from mkernel.plan.shapes import GEMMS, MAX_DIMENSION, check_integer, shape_of
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import MachineConstants
from mkernel.topology.routes import SharedLinks
from mkernel.topology.world_map import WorldMap

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities


class Planned(NamedTuple):
    """A plan or a what-if, every alternative that was considered for one of its decisions, and its
    pipeline as the cost model sees it."""

    plan: LaunchPlan | WhatIf
    alternatives: tuple[Alternative, ...]
    pipeline: Pipeline


def explain(
    op: str,
    sizes: Mapping[str, Any],
    *,
    dtype: str,
    out_dtype: str | None = None,
    b_layout: str = "row",
    around: Around = NOTHING,
    world: WorldMap,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    nic: str | None,
    verbs: str | None,
    chunk: int | None = None,
    compute_blocks: int | None = None,
    comm_blocks: int | None = None,
    path: str = "auto",
    exchange: str = "auto",
    schedule: Scheduler = by_rows,
) -> Planned:
    """Plan one op in one world, and return the plan with what else was considered; cached by its
    inputs. If something is missing to launch it (:mod:`mkernel.plan.missing`), the result is a
    what-if: what the world would do.

    Args:
        op: canonical name or alias (``ag_gemm``).
        sizes: those of the op's shape (:mod:`mkernel.plan.model`): ``m``, ``n``, ``k``; or ``m``,
            ``n``; or ``tokens``, ``hidden``, ``features``, ``experts``, ``top_k``; or ``batch``,
            ``heads``, ``kv_heads``, ``sequence``, ``head_dim``, ``causal``. And options of a call:
            ``capacity`` of a dispatch; of MoE GEMM+combine ``partial_dtype`` (a dtype's name) and
            ``returns``, how results come home (:data:`mkernel.plan.pipeline.Returns`); default: as
            is faster.
        dtype: dtype of the inputs: ``float16``, ``bfloat16``, ``float32`` or ``float64``; of GEMM
            ops with ``around.scales`` ``float8_e4m3fn``.
        out_dtype: dtype of the output. None: that of the inputs; of GEMM ops ``float32`` where the
            backend's results may differ from its inputs, of e4m3 operands ``bfloat16``.
        b_layout: ``row``: B is stored [k, n]; ``column``: [n, k], like an ``nn.Linear`` weight.
        around: what a GEMM op does before and after the launch.
        world: where the ranks are; it has a process group where the capabilities ask for one.
        accelerator, capabilities: the backend's name and what it claims.
        nic, verbs: NIC backend and verbs provider between nodes. In a world of one node, or where a
            process group carries what crosses nodes, both are dropped from the plan.
        chunk: tiles (or rows, whatever the backend cuts by) a chunk. None: the backend's choice.
        compute_blocks, comm_blocks: cores of each kernel, for backends that deal them out. None:
            the backend's choice, by default all compute cores, and as many for communication as
            :func:`mkernel.plan.standard.comm_blocks` says.
        path: ``library``; ``fused``, where it keeps the limit of error and takes the operands
            (:func:`mkernel.plan.paths.fusable`) and so large a call; ``auto``: the one that is
            predicted to be faster.
        exchange: between nodes, ``direct``, as every backend does; ``hierarchical``; ``auto``: the
            one that is predicted to be faster, of those that the backend runs or, in a what-if, of
            both.
        schedule: gives a plan its backend's part
            (:meth:`mkernel.backends.contracts.accelerator.AcceleratorBackend.schedule`).

    Raises:
        UnknownOp, Unsupported: no such op, or the backend does not claim it, or not on that path.
        ShapeError, DtypeError, LayoutError, ArgumentError: the argument, its value, what is legal.
        NoRoute: two ranks have no path between them.
    """
    capabilities = capabilities.with_cores(world.cores)
    sizes, returns = arguments.way_home(op, sizes)
    asked, library = _checked(
        op, sizes, dtype, out_dtype, b_layout, world, accelerator, capabilities, nic, verbs, path,
        around,
    )  # fmt: skip
    if chunk is not None:
        check_integer(ArgumentError, "chunk", chunk, MAX_DIMENSION)
    for argument, blocks, cores in (
        ("compute_blocks", compute_blocks, capabilities.compute_cores),
        ("comm_blocks", comm_blocks, capabilities.comm_cores),
    ):
        if blocks is not None:
            check_integer(ArgumentError, argument, blocks, cores)
    return _planned(
        asked,
        world,
        accelerator,
        _Choice(
            capabilities,
            chunk,
            compute_blocks,
            comm_blocks,
            cast(PathChoice, path),
            library,
            arguments.exchanges(exchange, asked.op, world.nodes, world.ranks_per_node),
            returns,
        ),
        schedule,
    )


_Given = ParamSpec("_Given")


def _plan_of(considered: Callable[_Given, Planned]) -> Callable[_Given, LaunchPlan]:
    @wraps(considered)
    def plan(*args: _Given.args, **options: _Given.kwargs) -> LaunchPlan:
        made = considered(*args, **options).plan
        if isinstance(made, WhatIf):
            raise Unsupported("; ".join(made.missing))
        return made

    return plan


plan = _plan_of(explain)
"""Returns the plan alone; takes the same arguments as :func:`explain`. Raises Unsupported if
something is missing to launch it."""


def common_part(
    plan: LaunchPlan,
    *,
    world: WorldMap,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    nic: str | None,
    verbs: str | None,
) -> CommonPart:
    """Return what all plans of a plan's op, shape, dtypes, layout and path share in this world. The
    arguments are those of :func:`explain`; it raises the same errors if this world has no such
    plan."""
    sizes = plan.shape.model_dump(exclude={"kind"})
    asked, _ = _checked(
        plan.op, sizes, plan.dtype, plan.out_dtype, plan.b_layout, world, accelerator,
        capabilities, nic, verbs, plan.path, _around_of(plan),
    )  # fmt: skip
    links = _links(asked.op, world, accelerator, capabilities)[0]
    return _common(asked, world, accelerator, capabilities, plan.path, links)


def _around_of(plan: LaunchPlan) -> Around:
    norm = None if plan.norm is None else Norm(plan.norm.residual, plan.norm.eps)
    return Around(plan.copies, plan.bias is not None, plan.products, norm, plan.scales)


class _Asked(NamedTuple):
    """A call whose arguments were checked. ``nic`` and ``verbs`` are the NIC backend and verbs
    provider between nodes, if they carry anything."""

    op: OpName
    shape: Shape
    dtype: DtypeName
    out_dtype: DtypeName
    b_layout: Layout
    nic: str | None
    verbs: str | None
    around: Around


def _checked(
    op: str,
    sizes: Mapping[str, Any],
    dtype: str,
    out_dtype: str | None,
    b_layout: str,
    world: WorldMap,
    accelerator: str,
    capabilities: AcceleratorCapabilities,
    nic: str | None,
    verbs: str | None,
    path: str,
    around: Around,
) -> tuple[_Asked, bool]:
    """Check the arguments of a call, and return them with whether there is a library path."""
    name = canonical(op)
    if name not in capabilities.ops:
        raise Unsupported(
            f"accelerator {accelerator!r} does not provide {name!r}; "
            f"it provides: {', '.join(capabilities.ops) or 'nothing'}"
        )
    nodes, ranks_per_node = world.nodes, world.ranks_per_node
    arguments.check_world(nodes, ranks_per_node)
    scales, taken = around.scales, capabilities.dtypes
    if name in GEMMS:  # what there is of it, its scales decide
        taken = (*taken, E4M3)
    in_dtype = arguments.check_dtype("dtype", dtype, taken, accelerator)
    check_scales(in_dtype, out_dtype, b_layout, scales, capabilities, accelerator)
    default = "float32" if capabilities.mixed_dtypes and name in GEMMS else in_dtype
    if scales is not None:
        default = next(one for one in RESULTS if one in capabilities.out_dtypes)
    result_dtype = arguments.check_dtype(
        "out_dtype", out_dtype or default, capabilities.out_dtypes, accelerator
    )
    if not capabilities.mixed_dtypes and result_dtype != in_dtype and scales is None:
        raise DtypeError(
            "out_dtype",
            repr(result_dtype),
            f"{in_dtype!r}, the inputs'",
            why=f"accelerator {accelerator!r} keeps it",
        )
    layout = arguments.check_layout(b_layout, name, capabilities, accelerator)
    shape = shape_of(name, sizes, nodes * ranks_per_node, in_dtype, result_dtype, capabilities)
    columns = None
    if isinstance(shape, GemmShape):
        columns = shape.n
        check_blocks(scales, shape.k)
    check_around(name, around, columns)
    library = arguments.has_library_path(path, name, nodes, accelerator, capabilities)
    if scales is not None and name in capabilities.library_ops and not library:
        raise Unsupported(
            f"accelerator {accelerator!r} multiplies e4m3 operands on its library path, which "
            f"{name!r} has in worlds of one node; this one has {nodes}"
        )
    by_nics = nodes > 1 and not capabilities.process_group
    if by_nics:
        for argument, given, what in (("nic", nic, "NIC backend"), ("verbs", verbs, "provider")):
            if not given:
                raise ArgumentError(
                    argument, given, f"the name of a {what}", why=f"the world has {nodes} nodes"
                )
    nics = (nic, verbs) if by_nics else (None, None)
    return _Asked(name, shape, in_dtype, result_dtype, layout, *nics, around), library


@dataclass(frozen=True)
class _Choice:
    """The backend's claims; the chunk, cores and path that the caller wants; whether there is a
    library path; and the exchanges to choose from."""

    claims: AcceleratorCapabilities
    chunk: int | None
    compute_blocks: int | None
    comm_blocks: int | None
    path: PathChoice
    library: bool
    exchanges: tuple[Exchange, ...]
    returns: Returns | None


@lru_cache(maxsize=256)
def _planned(
    asked: _Asked,
    where: WorldMap,
    accelerator: str,
    choice: _Choice,
    schedule: Scheduler,
) -> Planned:
    """Plan checked inputs: the part that all backends share, then the backend's."""
    claims = choice.claims
    links, lacks = _links(asked.op, where, accelerator, claims)
    constants = where.constants
    if constants is not None:
        constants = constants.limited_to(links.egress_gbs)
    exchanges = choice.exchanges
    if len(exchanges) > 1 and not lacks and asked.op not in claims.hierarchical_ops:
        exchanges = exchanges[:1]
    world = len(where.placement)
    path, measured = _predicted(choice, asked, world, constants)

    def scheduled(path: PathName) -> tuple[CommonPart, Scheduled]:
        common = _common(asked, where, accelerator, claims, path, links)
        request = ScheduleRequest(
            plan=common,
            links=links,
            capabilities=claims,
            constants=constants,
            path=choice.path,
            chunk=choice.chunk,
            compute_blocks=choice.compute_blocks,
            comm_blocks=choice.comm_blocks,
            exchanges=exchanges,
            returns=choice.returns,
            measured=measured.get(path),
        )
        return common, schedule(request)

    other = _other(path, choice, asked, measured, world, constants)
    try:
        common, found = scheduled(path)
    except TooLarge:
        if path == "library" or not choice.library:
            raise
        path, other, measured = "library", None, _alone(measured)
        common, found = scheduled(path)
    if other is not None:
        with suppress(TooLarge):
            rival = scheduled(other)
            if _sooner(rival[1].prediction, found.prediction):
                path, (common, found) = other, rival
    shared = {**vars(common), "prediction": _with_known_rate(found.prediction, common, constants)}
    exchange = found.pipeline.exchange
    lacks += missing.of_exchange(exchange, asked.op, accelerator, claims)
    lacks += missing.of_returns(choice.returns, accelerator, claims, common.nodes)
    made: LaunchPlan | WhatIf = (
        WhatIf(**shared, exchange=exchange, missing=lacks)
        if lacks
        else LaunchPlan(**shared, schedule=found.schedule)
    )
    considered = _path_alternatives(path, found.prediction) + found.alternatives
    return Planned(made, considered, found.pipeline)


def _alone(measured: Mapping[PathName, Prediction]) -> dict[PathName, Prediction]:
    """Return the times of the library path if it is the only one for a call of this size."""
    return {
        path: times.model_copy(update={"fused_us": None, "library_us": None})
        for path, times in measured.items()
        if path == "library"
    }


def _with_known_rate(
    times: Prediction | None, plan: CommonPart, constants: MachineConstants | None
) -> Prediction | None:
    """Say in the times' constants if the rate of a dtype is unknown and that of float32 stands for
    it."""
    if times is None or constants is None or constants.knows_rate(plan.dtype):
        return times
    named = (
        f"{times.constants}, with the rate of float32 for that of {plan.dtype}, which is unknown"
    )
    return times.model_copy(update={"constants": named})


def _other(
    path: PathName,
    choice: _Choice,
    asked: _Asked,
    measured: Mapping[PathName, Prediction],
    world: int,
    constants: MachineConstants | None,
) -> PathName | None:
    """Return the other path if it may still be faster once the backend has scheduled it: ``fused``
    for e4m3 operands; else the library's, which a backend may run in ways that are not predicted
    here."""
    if choice.path != "auto":
        return None
    if _fuses_scaled(choice, asked, world, constants):
        return "fused"
    return "library" if path == "fused" and "library" in measured else None


def _sooner(one: Prediction | None, other: Prediction | None) -> bool:
    """Return whether both times are known and the first is shorter."""
    return one is not None and other is not None and one.pipelined_us < other.pipelined_us


@lru_cache(maxsize=256)
def _links(
    op: OpName, where: WorldMap, accelerator: str, claims: AcceleratorCapabilities
) -> tuple[SharedLinks, tuple[str, ...]]:
    """Return the links of an op's routes, and what is missing before anything goes over them."""
    group = claims.group_carries(op, where.nodes) or (
        claims.process_group and any(one.kind != "p2p" for one in where.links.table.classes)
    )
    lacks = missing.of_world(accelerator, claims, where.kinds, where.ranks_per_node)
    lacks += missing.of_op(op, accelerator, claims, where.nodes)
    links = where.group_links if group else where.fastest_links if lacks else where.links
    return links, lacks + missing.of_routes(links.table, where.placement, accelerator, claims)


def _common(
    asked: _Asked,
    where: WorldMap,
    accelerator: str,
    claims: AcceleratorCapabilities,
    path: PathName,
    links: SharedLinks,
) -> CommonPart:
    fields = asked._asdict()
    around: Around = fields.pop("around")
    bias: BiasStep = "launch" if claims.adds_bias else "after"
    return CommonPart(
        **fields,
        copies=around.copies,
        bias=bias if around.bias else None,
        norm=_norm_step(around, claims),
        scales=around.scales,
        products=around.products,
        path=path,
        nodes=where.nodes,
        ranks_per_node=where.ranks_per_node,
        accelerator=accelerator,
        carrier=claims.carrier if links.table.by_group else None,
        placement=where.placement,
        routes=links.table,
        nics=where.nic_plan.schedule if asked.nic else None,
    )


def _norm_step(around: Around, claims: AcceleratorCapabilities) -> NormStep | None:
    """Decide who normalises: the launch if nothing is added behind it, else the op."""
    if around.norm is None:
        return None
    launch = claims.adds_norm and (claims.adds_bias or not around.bias)
    return NormStep(step="launch" if launch else "after", **around.norm._asdict())


def _path_alternatives(path: PathName, times: Prediction | None) -> tuple[Alternative, ...]:
    """Return both paths as alternatives if the backend has two and their times are known."""
    if times is None or times.fused_us is None or times.library_us is None:
        return ()
    both: dict[PathName, float] = {"fused": times.fused_us, "library": times.library_us}
    return tuple(
        Alternative(decision="path", option=name, predicted_us=time, chosen=name == path)
        for name, time in both.items()
    )


def _fuses_scaled(
    choice: _Choice, asked: _Asked, world: int, constants: MachineConstants | None
) -> bool:
    """Return whether e4m3 operands may take the fused path beside a library's."""
    scales, shape = asked.around.scales, asked.shape
    if scales is None or not choice.library or not isinstance(shape, GemmShape):
        return False
    claims = choice.claims
    modes = claims.fused_scale_modes if scales.use_fast_accum else claims.fused_float32_scale_modes
    return paths.fuses_scaled(asked.op, shape, asked.out_dtype, world, scales, modes, constants)


def _predicted(
    choice: _Choice,
    asked: _Asked,
    world: int,
    constants: MachineConstants | None,
) -> tuple[PathName, Mapping[PathName, Prediction]]:
    """Choose the path, and return it with the times of both if they are known. In a tie the fused
    one is taken."""
    op, shape, dtype = asked.op, asked.shape, asked.dtype
    wanted: PathName = "library" if choice.path == "library" else "fused"
    if not choice.library or not isinstance(shape, GemmShape):
        return wanted, {}
    if dtype == E4M3:  # the backend has times of its own
        fused = choice.path == "fused" and _fuses_scaled(choice, asked, world, constants)
        return ("fused" if fused else "library"), {}
    if not paths.fusable(op, shape, dtype, world, constants):
        wanted = "library"
    if constants is None:
        return wanted, {}
    cores = choice.claims.compute_cores
    both = paths.predict(op, shape, dtype, world, choice.compute_blocks or cores, cores, constants)
    if both is None:
        return wanted, {}
    fused_times, library = both
    if choice.path == "auto" and library.pipelined_us < fused_times.pipelined_us:
        wanted = "library"
    return wanted, {"fused": fused_times, "library": library}
