"""Turns (op, shapes, world, capabilities, topology) into a :class:`LaunchPlan`.

Deterministic: equal inputs give equal plans on every rank, down to the digest. Nothing is started
here, and everything that can be wrong with a call's sizes is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, cast

from mkernel.errors import ArgumentError, DtypeError, Unsupported
from mkernel.plan import arguments, chunking, paths, predict
from mkernel.plan.arguments import Layout
from mkernel.plan.decide import Alternative, choose
from mkernel.plan.model import (
    Chunking,
    DtypeName,
    Exchange,
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
from mkernel.plan.schedule import Schedule
from mkernel.plan.shapes import MAX_DIMENSION, check_integer, shape_of
from mkernel.plan.tune import tune
from mkernel.topology.cost import MachineConstants
from mkernel.topology.kinds import NodeKinds
from mkernel.topology.placement import WorldPlacement
from mkernel.topology.sources.chips import architecture
from mkernel.topology.world_map import WorldMap

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities


Scheduler = Callable[[LaunchPlan], Schedule | None]
"""Gives a plan its backend's part: a pure function of what the plan has decided so far."""


def no_schedule(plan: LaunchPlan) -> None:
    """Of a backend whose launches follow from the common part of a plan."""
    return


class Planned(NamedTuple):
    """A plan, and every alternative that was considered for one of its decisions."""

    plan: LaunchPlan
    alternatives: tuple[Alternative, ...]


def explain(
    op: str,
    sizes: Mapping[str, int],
    *,
    dtype: str,
    out_dtype: str | None = None,
    b_layout: str = "row",
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
    schedule: Scheduler = no_schedule,
) -> Planned:
    """The plan of one op in one world, and what else was considered; cached by its inputs.

    Args:
        op: canonical name or alias (``ag_gemm``).
        sizes: those of the op's shape (:mod:`mkernel.plan.model`): ``m``, ``n``, ``k``; or
            ``tokens``, ``hidden``, ``features``, ``experts``, ``top_k``; or ``batch``, ``heads``,
            ``kv_heads``, ``sequence``, ``head_dim``, ``causal``.
        dtype: of the inputs: ``float16``, ``bfloat16`` or ``float32``.
        out_dtype: of the output. None: ``float32``, or the inputs' where the backend keeps it.
        b_layout: ``row``: B is stored [k, n]; ``column``: [n, k], like an ``nn.Linear`` weight.
        world: where the ranks are; it has a process group where the capabilities ask for one.
        accelerator, capabilities: the backend's name and what it claims.
        nic, verbs: NIC backend and verbs provider between nodes. In a world of one node, or where a
            process group carries what crosses nodes, both are dropped from the plan.
        chunk: tiles (or rows, see ``capabilities.chunk_unit``) a chunk. None: the default of
            :func:`mkernel.plan.chunking.chunking` or :func:`mkernel.plan.chunking.row_chunk`.
        compute_blocks, comm_blocks: cores of each kernel. None: all compute cores, and as many
            for communication as :func:`mkernel.plan.chunking.comm_blocks` says.
        path: ``library``; ``fused``, where it keeps the limit of error
            (:func:`mkernel.plan.paths.fusable`); ``auto``: the one that is predicted to be faster.
        exchange: between nodes, ``direct`` or ``hierarchical``; ``auto``: of what the backend provides
            the one that is predicted to be faster.
        schedule: gives a plan its backend's part
            (:meth:`mkernel.backends.contracts.accelerator.AcceleratorBackend.schedule`).

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
    nodes, ranks_per_node = world.nodes, world.ranks_per_node
    arguments.check_world(nodes, ranks_per_node)
    in_dtype = arguments.check_dtype("dtype", dtype, capabilities.dtypes, accelerator)
    default = "float32" if capabilities.mixed_dtypes else in_dtype
    result_dtype = arguments.check_dtype(
        "out_dtype", out_dtype or default, capabilities.out_dtypes, accelerator
    )
    if not capabilities.mixed_dtypes and result_dtype != in_dtype:
        raise DtypeError(
            "out_dtype",
            repr(result_dtype),
            f"{in_dtype!r}, the inputs'",
            why=f"accelerator {accelerator!r} keeps it",
        )
    layout = arguments.check_layout(b_layout, capabilities, accelerator)
    shape = shape_of(name, sizes, nodes * ranks_per_node, in_dtype, result_dtype, capabilities)
    library = arguments.has_library_path(path, name, nodes, accelerator, capabilities)
    if chunk is not None:
        check_integer(ArgumentError, "chunk", chunk, MAX_DIMENSION)
    resources = Resources(
        compute_blocks=arguments.blocks(
            "compute_blocks", compute_blocks, capabilities.compute_cores
        ),
        comm_blocks=arguments.blocks(
            "comm_blocks",
            comm_blocks,
            capabilities.comm_cores,
            default=chunking.comm_blocks(nodes, ranks_per_node, capabilities.comm_cores),
        ),
    )
    if nodes > 1 and not capabilities.process_group:
        for argument, given, what in (("nic", nic, "NIC backend"), ("verbs", verbs, "provider")):
            if not given:
                raise ArgumentError(
                    argument, given, f"the name of a {what}", why=f"the world has {nodes} nodes"
                )
    return _planned(
        name,
        shape,
        in_dtype,
        result_dtype,
        layout,
        world,
        accelerator,
        _Nics(nic, verbs) if nodes > 1 and not capabilities.process_group else _Nics(),
        _Choice(
            capabilities,
            chunk,
            cast(PathChoice, path),
            library,
            arguments.exchanges(exchange, name, nodes, accelerator, capabilities),
            comm_blocks,
        ),
        resources,
        schedule,
    )


_Given = ParamSpec("_Given")


def _plan_of(considered: Callable[_Given, Planned]) -> Callable[_Given, LaunchPlan]:
    @wraps(considered)
    def plan(*args: _Given.args, **options: _Given.kwargs) -> LaunchPlan:
        return considered(*args, **options).plan

    return plan


plan = _plan_of(explain)
"""Returns the plan alone; takes the same arguments."""


class _Nics(NamedTuple):
    """NIC backend and verbs provider between nodes, where they carry anything."""

    nic: str | None = None
    verbs: str | None = None


@dataclass(frozen=True)
class _Choice:
    """What the backend claims; the chunk and the path that the caller wants, and whether there is a
    library path; the exchanges to choose from; how many blocks the caller wants for communication."""

    claims: AcceleratorCapabilities
    chunk: int | None
    path: PathChoice
    library: bool
    exchanges: tuple[Exchange, ...]
    comm_blocks: int | None


@lru_cache(maxsize=256)
def _planned(
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    b_layout: Layout,
    where: WorldMap,
    accelerator: str,
    between: _Nics,
    choice: _Choice,
    resources: Resources,
    schedule: Scheduler,
) -> Planned:
    """The plan of checked inputs. Decisions are made one after another, each with the defaults of
    those that follow: path, exchange, chunks of tiles, communication blocks; then, by simulation, rows
    a chunk and order. Where both paths' times are known from measured constants (in one node), these
    are all that was measured: chunks and order stay as they are by default. So they do, and nothing is
    predicted, where there are no constants."""
    nodes, ranks_per_node = where.nodes, where.ranks_per_node
    constants, placement = where.constants, where.placement
    group = choice.claims.group_carries(op, nodes) or (
        choice.claims.process_group and any(one.kind != "p2p" for one in where.links.table.classes)
    )
    links = where.group_links if group else where.links
    tiles, rows = None, None
    claims = choice.claims
    row_chunks = claims.row_chunks if claims.overlaps else 1
    if claims.chunk_unit == "rows" or not isinstance(shape, GemmShape):
        rows = chunking.row_chunk(shape, len(placement), choice.chunk, row_chunks)
    else:
        tiles = chunking.cut(op, shape, len(placement), dtype, choice.chunk, claims.tile)
    path, prediction = _predicted(choice, op, shape, dtype, len(placement), resources, constants)
    exchange, alternatives = choice.exchanges[0], _path_alternatives(path, prediction)
    measured = prediction is not None
    if prediction is None and constants is not None:

        def predicted(
            exchange: Exchange,
            tiles: Chunking | None,
            resources: Resources,
            constants: MachineConstants = constants,
        ) -> Prediction:
            return predict.predict(
                op, shape, dtype, out_dtype, links, exchange, tiles, resources, constants
            )

        exchange, considered = choose(
            "exchange",
            choice.exchanges,
            lambda option: predicted(option, tiles, resources).pipelined_us,
        )
        alternatives += considered
        if tiles is not None and choice.chunk is None and isinstance(shape, GemmShape):
            more = chunking.others(tiles, op, shape, len(placement), dtype, claims.tile)
            cuts: list[Chunking] = [tiles, *more]
            cut, considered = choose(
                "chunk",
                cuts,
                lambda option: predicted(exchange, option, resources).pipelined_us,
                lambda option: f"{option.tiles_per_chunk} tiles",
            )
            tiles = cut
            alternatives += considered
        if choice.comm_blocks is None:
            resources, considered = choose(
                "communication",
                [resources, *_more_blocks(resources, claims.comm_cores)],
                lambda option: predicted(exchange, tiles, option).pipelined_us,
                lambda option: f"{option.comm_blocks} blocks",
            )
            alternatives += considered
        prediction = predicted(exchange, tiles, resources)
    made = LaunchPlan(
        op=op,
        shape=shape,
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        path=path,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=accelerator,
        nic=between.nic,
        verbs=between.verbs,
        carrier=choice.claims.carrier if group and len(placement) > 1 else None,
        placement=placement,
        routes=links.table,
        exchange=exchange,
        chunking=tiles,
        rows_per_chunk=rows,
        order=ConsumptionOrder(nodes=nodes, ranks_per_node=ranks_per_node, runs=claims.orders[0]),
        resources=resources,
        prediction=prediction,
    )
    if len(placement) > 1 and path == "fused" and not measured and constants is not None:
        by_rows: list[int] = []
        if rows is not None and choice.chunk is None and row_chunks > 1:
            found = chunking.other_row_chunks(shape, len(placement), rows, row_chunks)
            by_rows = [rows, *found]
            if claims.one_kernel_per_chunk:  # each must gain what it costs: the fewest first
                by_rows.sort(reverse=True)
        made, considered = tune(
            made, by_rows, claims.orders, constants, claims.one_kernel_per_chunk
        )
        alternatives += considered
    made = made.model_copy(update={"schedule": schedule(made)})
    if constants is not None and not _hold(constants, where.kinds, placement):
        made = made.model_copy(update={"prediction": None})
        alternatives = tuple(one.model_copy(update={"predicted_us": None}) for one in alternatives)
    return Planned(made, alternatives)


def _hold(constants: MachineConstants, kinds: NodeKinds, placement: WorldPlacement) -> bool:
    """Whether the constants are of the chips that the ranks use."""
    if not constants.architectures:
        return True
    used = {seat.accelerator for site in placement.sites for seat in site.seats}
    return all(
        architecture(one) in constants.architectures
        for node in kinds.prototypes
        for one in node.accelerators
        if one.id in used and not one.emulated
    )


def _more_blocks(resources: Resources, cores: int) -> list[Resources]:
    """The same with twice and four times the blocks for communication, as far as there are cores."""
    more = [factor * resources.comm_blocks for factor in (2, 4)]
    return [resources.model_copy(update={"comm_blocks": n}) for n in more if n <= cores]


def _path_alternatives(path: PathName, times: Prediction | None) -> tuple[Alternative, ...]:
    """Both paths, where the backend has two and their times are known."""
    if times is None or times.fused_us is None or times.library_us is None:
        return ()
    both: dict[PathName, float] = {"fused": times.fused_us, "library": times.library_us}
    return tuple(
        Alternative(decision="path", option=name, predicted_us=time, chosen=name == path)
        for name, time in both.items()
    )


def _predicted(
    choice: _Choice,
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    world: int,
    resources: Resources,
    constants: MachineConstants | None,
) -> tuple[PathName, Prediction | None]:
    """The path, and its times where both paths' are known. A tie goes to the fused one."""
    wanted: PathName = "library" if choice.path == "library" else "fused"
    if not choice.library or not isinstance(shape, GemmShape):
        return wanted, None
    if not paths.fusable(op, shape, dtype, world):
        wanted = "library"
    if constants is None:
        return wanted, None
    cores = choice.claims.compute_cores
    both = paths.predict(op, shape, dtype, world, resources.compute_blocks, cores, constants)
    if both is None:
        return wanted, None
    fused, library = both
    if choice.path == "auto" and library.pipelined_us < fused.pipelined_us:
        wanted = "library"
    return wanted, library if wanted == "library" else fused
