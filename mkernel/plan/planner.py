"""Turns (op, shapes, world, capabilities, topology) into a :class:`LaunchPlan`, or into a
:class:`WhatIf` where something is missing to launch it.

Deterministic: equal inputs give equal plans on every rank, down to the digest. Nothing is started
here, and everything that can be wrong with a call's sizes is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

from mkernel.errors import ArgumentError, DtypeError, Unsupported
from mkernel.plan import arguments, missing, paths
from mkernel.plan.arguments import (
    NOTHING,
    RESULTS,
    SCALED_EXPERTS,
    Around,
    Norm,
    check_around,
    check_blocks,
    check_scales,
)
from mkernel.plan.missing import WhatIf
from mkernel.plan.mixed import MixedCapabilities
from mkernel.plan.model import (
    E4M3,
    BiasStep,
    CombineShape,
    CommonPart,
    DispatchShape,
    GemmCombineShape,
    GemmShape,
    LaunchPlan,
    MoeShape,
    NormStep,
    OpName,
    PathChoice,
    PathName,
    Prediction,
    Schedule,
    Shape,
    sums_of,
)
from mkernel.plan.ops import canonical
from mkernel.plan.pipeline import Exchange, Pipeline, Returns
from mkernel.plan.request import Alternative, Scheduled, Scheduler, ScheduleRequest, TooLarge
from mkernel.plan.shapes import GEMMS, MAX_DIMENSION, check_integer, shape_of
from mkernel.plan.standard import by_rows
from mkernel.plan.traffic import relay_bytes
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
    return _plans(
        op, dtype, out_dtype, b_layout, around, world, accelerator, capabilities, nic, verbs,
        path=path, exchange=exchange, schedule=schedule,
    ).explain(sizes, chunk, compute_blocks, comm_blocks)  # fmt: skip


_Given = ParamSpec("_Given")


def _launched(made: LaunchPlan | WhatIf) -> LaunchPlan:
    if isinstance(made, WhatIf):
        raise Unsupported("; ".join(made.missing))
    return made


def _plan_of(considered: Callable[_Given, Planned]) -> Callable[_Given, LaunchPlan]:
    @wraps(considered)
    def plan(*args: _Given.args, **options: _Given.kwargs) -> LaunchPlan:
        return _launched(considered(*args, **options).plan)

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
    plans = Plans(
        plan.op, plan.dtype, plan.out_dtype, plan.b_layout, _around_of(plan), world, accelerator,
        capabilities, nic, verbs, path=plan.path,
    )  # fmt: skip
    return plans.common_part(plan.shape.model_dump(exclude={"kind"}), plan.path)


def _around_of(plan: LaunchPlan) -> Around:
    norm = None
    if plan.norm is not None:
        norm = Norm(plan.norm.residual, plan.norm.eps, plan.norm.quantises)
    return Around(
        plan.copies, plan.bias is not None, plan.products, norm, plan.scales, plan.invariant
    )


class Plans:
    """The plans of one op, with operands of one kind, in one world. What does not depend on sizes is
    checked and made once, for the first call or before: a plan of other sizes has only these to
    check, and closed forms of them to compare."""

    def __init__(
        self,
        op: str,
        dtype: str,
        out_dtype: str | None,
        b_layout: str,
        around: Around,
        world: WorldMap,
        accelerator: str,
        capabilities: AcceleratorCapabilities,
        nic: str | None,
        verbs: str | None,
        *,
        path: str = "auto",
        exchange: str = "auto",
        schedule: Scheduler = by_rows,
    ) -> None:
        """Check what does not depend on sizes; the arguments are those of :func:`explain`. Raises as
        that does."""
        self.op = name = canonical(op)
        self.capabilities = capabilities
        self.claims = claims = capabilities.with_cores(world.cores)
        self.world, self.around, self.schedule = world, around, schedule
        self._accelerator, self._nic, self._verbs = accelerator, nic, verbs
        self.path, self._exchange = cast(PathChoice, path), exchange
        if name not in claims.ops:
            raise Unsupported(
                f"accelerator {accelerator!r} does not provide {name!r}; "
                f"it provides: {', '.join(claims.ops) or 'nothing'}"
            )
        arguments.check_world(world.nodes, world.ranks_per_node)
        self.ranks = world.nodes * world.ranks_per_node
        scales, taken = around.scales, claims.dtypes
        experts = name in SCALED_EXPERTS and scales is not None
        if name in GEMMS or experts:  # what there is of it, its scales decide
            taken = (*taken, E4M3)
        self.dtype = arguments.check_dtype("dtype", dtype, taken, accelerator)
        check_scales(name, self.dtype, out_dtype, b_layout, scales, claims, accelerator)
        default = "float32" if claims.mixed_dtypes and name in GEMMS else self.dtype
        if scales is not None:
            default = next(one for one in RESULTS if one in claims.out_dtypes)
            default = E4M3 if name == "moe_dispatch" else default
        quantised = (E4M3,) if experts else ()
        self.out_dtype = arguments.check_dtype(
            "out_dtype", out_dtype or default, (*claims.out_dtypes, *quantised), accelerator
        )
        if not claims.mixed_dtypes and self.out_dtype != self.dtype and scales is None:
            raise DtypeError(
                "out_dtype",
                repr(self.out_dtype),
                f"{self.dtype!r}, the inputs'",
                why=f"accelerator {accelerator!r} keeps it",
            )
        self.layout = arguments.check_layout(b_layout, name, claims, accelerator)
        self.invariant = arguments.promised(
            name, around.invariant, self.dtype, self.out_dtype, self.ranks, claims, accelerator
        )
        self._parts: dict[PathName, CommonPart] = {}
        self._launches: dict[PathName, LaunchPlan] = {}

    def request(self, sizes: Mapping[str, Any], chunk: int | None = None) -> str:
        """Return what :meth:`plan` is asked for, as text: in worlds that are alike, equal requests get
        equal plans."""
        kind = (self.op, self.dtype, self.out_dtype, self.layout, self.around, self.path)
        return repr((*kind, self._accelerator, *sizes.items(), chunk))

    def plan(self, sizes: Mapping[str, Any], chunk: int | None = None) -> LaunchPlan:
        """Plan a call, as :func:`plan` does, which remembers it."""
        return _launched(self.planned(self._asked(sizes, chunk)).plan)

    def explain(
        self,
        sizes: Mapping[str, Any],
        chunk: int | None = None,
        compute_blocks: int | None = None,
        comm_blocks: int | None = None,
    ) -> Planned:
        """Plan a call, as :func:`explain` does."""
        return _planned(self, self._asked(sizes, chunk, compute_blocks, comm_blocks))

    def _asked(
        self,
        sizes: Mapping[str, Any],
        chunk: int | None,
        compute_blocks: int | None = None,
        comm_blocks: int | None = None,
    ) -> _Asked:
        sizes, returns = arguments.way_home(self.op, sizes)
        shape = self._shape(sizes)
        if chunk is not None:
            check_integer(ArgumentError, "chunk", chunk, MAX_DIMENSION)
        for argument, blocks, cores in (
            ("compute_blocks", compute_blocks, self.claims.compute_cores),
            ("comm_blocks", comm_blocks, self.claims.comm_cores),
        ):
            if blocks is not None:
                check_integer(ArgumentError, argument, blocks, cores)
        return _Asked(shape, chunk, compute_blocks, comm_blocks, returns)

    def common_part(self, sizes: Mapping[str, Any], path: PathName) -> CommonPart:
        """Return what all plans of such sizes and of a path share."""
        return self._common(self._shape(sizes), path)

    def _shape(self, sizes: Mapping[str, Any]) -> Shape:
        """Check sizes, and then what :attr:`library` does."""
        around = self.around
        promised = None if self.invariant is None else self.invariant.partial_dtype
        kinds = (self.dtype, self.out_dtype)
        shape = shape_of(self.op, sizes, self.ranks, *kinds, self.claims, promised)
        columns = None
        if isinstance(shape, GemmShape):
            columns = shape.n
            if shape.rows and not isinstance(self.claims, MixedCapabilities):
                raise Unsupported(f"rows = {shape.rows}: nodes that are alike share rows evenly")
            check_blocks(around.scales, "k", shape.k)
            arguments.check_segments(self.op, self.invariant, shape.k, self.ranks, around.scales)
        elif isinstance(shape, MoeShape | DispatchShape):
            check_blocks(around.scales, "hidden", shape.hidden)
            if self.out_dtype == E4M3 and isinstance(shape, MoeShape):
                check_blocks(around.scales, "features", shape.features)
        elif isinstance(shape, GemmCombineShape):
            check_blocks(around.scales, "features", shape.features)
        check_around(self.op, around, columns)
        _ = self.library
        return shape

    @cached_property
    def library(self) -> bool:
        """Return whether there is a library path. Raises what is wrong with the path and with NICs."""
        world, claims, name = self.world, self.claims, self.op
        found = arguments.has_library_path(
            self.path, name, world.nodes, self._accelerator, claims, self.invariant
        )
        scales = self.around.scales
        if self.invariant is not None and scales is not None and name in claims.library_ops:
            fast = scales.use_fast_accum
            modes = claims.fused_scale_modes if fast else claims.fused_float32_scale_modes
            if scales.mode not in modes:
                raise Unsupported(
                    f"accelerator {self._accelerator!r} has invariant results of {name!r} with scales "
                    f"by: {', '.join(modes) or 'nothing'}; not by {scales.mode!r}"
                )
        elif scales is not None and name in claims.library_ops and not found:
            raise Unsupported(
                f"accelerator {self._accelerator!r} multiplies e4m3 operands on its library path, "
                f"which {name!r} has in worlds of one node; this one has {world.nodes}"
            )
        if self._by_nics:
            for argument, given, what in (
                ("nic", self._nic, "NIC backend"),
                ("verbs", self._verbs, "provider"),
            ):
                if not given:
                    raise ArgumentError(
                        argument, given, f"the name of a {what}",
                        why=f"the world has {world.nodes} nodes",
                    )  # fmt: skip
        return found

    @property
    def _by_nics(self) -> bool:
        return self.world.nodes > 1 and not self.claims.process_group

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the exchanges to choose from, the default first."""
        found = arguments.exchanges(
            self._exchange, self.op, self.world.nodes, self.world.ranks_per_node
        )
        several = len(found) > 1 and not self.lacks
        return found[:1] if several and self.op not in self.claims.hierarchical_ops else found

    def _fitting(self, shape: Shape) -> tuple[Exchange, ...]:
        """Return those of the exchanges for which devices have the memory: relays keep rows. Raises
        Unsupported."""
        if "hierarchical" not in self.exchanges:
            return self.exchanges
        # Sums of a combine alone may be as wide as those that backends add up.
        sums = sums_of(self.dtype, self.dtype) if isinstance(shape, CombineShape) else None
        nbytes = relay_bytes(self.op, shape, self.dtype, self.world.nodes, sums)
        if not nbytes:
            return self.exchanges
        devices = (one for node in self.world.kinds.prototypes for one in node.accelerators)
        least = min((one.memory_bytes for one in devices if one.memory_bytes), default=nbytes)
        if nbytes <= least:
            return self.exchanges
        if self.exchanges[0] == "hierarchical":
            raise Unsupported(
                f"in a hierarchical exchange a rank keeps {nbytes} bytes of rows that it relays, and a "
                f"device has {least}; set MKERNEL_EXCHANGE to auto or direct, or pass fewer tokens"
            )
        return ("direct",)

    @property
    def links(self) -> SharedLinks:
        """Return the links of the op's routes."""
        return self._links[0]

    @property
    def lacks(self) -> tuple[str, ...]:
        """Return what is missing before anything goes over the links."""
        return self._links[1]

    @cached_property
    def _links(self) -> tuple[SharedLinks, tuple[str, ...]]:
        return _links(self.op, self.world, self._accelerator, self.claims)

    @cached_property
    def constants(self) -> MachineConstants | None:
        """Return the machine's constants, on links that may be slower than those they are of. Over
        PCIe alone there are no Lamport exchanges."""
        found = self.world.constants
        if found is not None and any(one.over_pcie for one in self.links.table.classes):
            found = found.by_flags()
        return None if found is None else found.limited_to(self.links.egress_gbs)

    def planned(self, asked: _Asked) -> Planned:
        """Plan checked inputs: the part that all backends share, then the backend's."""
        constants, shape = self.constants, asked.shape
        exchanges = self._fitting(shape)
        path, measured = self._predicted(asked)

        def scheduled(path: PathName) -> tuple[CommonPart, Scheduled]:
            common = self._common(shape, path)
            request = ScheduleRequest(
                plan=common,
                links=self.links,
                capabilities=self.claims,
                constants=constants,
                path=self.path,
                chunk=asked.chunk,
                compute_blocks=asked.compute_blocks,
                comm_blocks=asked.comm_blocks,
                exchanges=exchanges,
                returns=asked.returns,
                measured=measured.get(path),
            )
            return common, self.schedule(request)

        other = self._other(path, shape, measured)
        try:
            common, found = scheduled(path)
        except TooLarge:
            if path == "library" or not self.library:
                raise
            path, other, measured = "library", None, _alone(measured)
            common, found = scheduled(path)
        if other is not None:
            with suppress(TooLarge):
                rival = scheduled(other)
                if _sooner(rival[1].prediction, found.prediction):
                    path, (common, found) = other, rival
        times = _with_known_rate(found.prediction, common, constants)
        exchange, lacks = found.pipeline.exchange, self.lacks
        lacks += missing.of_exchange(exchange, self.op, self._accelerator, self.claims)
        lacks += missing.of_returns(asked.returns, self._accelerator, self.claims, common.nodes)
        made: LaunchPlan | WhatIf
        if lacks:
            made = WhatIf(**{**vars(common), "prediction": times}, exchange=exchange, missing=lacks)
        else:
            made = self._launched(common, times, found.schedule)
        considered = _path_alternatives(path, found.prediction) + found.alternatives
        return Planned(made, considered, found.pipeline)

    def _common(self, shape: Shape, path: PathName) -> CommonPart:
        made = self._parts.get(path)
        if made is not None:  # what was checked when it was made, the sizes do not change
            return made.model_copy(update={"shape": shape})
        claims, around, world, links = self.claims, self.around, self.world, self.links
        nics = (self._nic, self._verbs) if self._by_nics else (None, None)
        bias: BiasStep = "launch" if claims.adds_bias else "after"
        made = self._parts[path] = CommonPart(
            op=self.op,
            shape=shape,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            b_layout=self.layout,
            nic=nics[0],
            verbs=nics[1],
            copies=around.copies,
            bias=bias if around.bias else None,
            norm=_norm_step(around, claims),
            scales=around.scales,
            invariant=self.invariant,
            products=around.products,
            path=path,
            nodes=world.nodes,
            ranks_per_node=world.ranks_per_node,
            accelerator=self._accelerator,
            carrier=claims.carrier if links.table.by_group else None,
            placement=world.placement,
            routes=links.table,
            nics=world.nic_plan.schedule if nics[0] else None,
            card=None if world.constants is None else world.constants.card,
        )
        return made

    def _launched(
        self, common: CommonPart, times: Prediction | None, schedule: Schedule
    ) -> LaunchPlan:
        made = self._launches.get(common.path)
        if made is not None:
            return made.like(common.shape, times, schedule)
        own = {**vars(common), "prediction": times, "schedule": schedule}
        made = self._launches[common.path] = LaunchPlan(**own)
        return made

    def _predicted(self, asked: _Asked) -> tuple[PathName, Mapping[PathName, Prediction]]:
        """Choose the path, and return it with the times of both if they are known. In a tie the fused
        one is taken."""
        op, shape, dtype, constants = self.op, asked.shape, self.dtype, self.constants
        wanted: PathName = "library" if self.path == "library" else "fused"
        if not self.library or not isinstance(shape, GemmShape):
            return wanted, {}
        if op in self.claims.only_library_ops:
            return "library", self._predicted_alone(shape)
        if dtype == E4M3:  # the backend has times of its own
            fused = self.path == "fused" and self._fuses_scaled(shape)
            return ("fused" if fused else "library"), {}
        if not paths.fusable(op, shape, dtype, self.ranks, constants):
            wanted = "library"
        if constants is None:
            return wanted, {}
        cores = self.claims.compute_cores
        both = paths.predict(
            op, shape, dtype, self.ranks, asked.compute_blocks or cores, cores, constants
        )
        if both is None:
            return wanted, {}
        fused_times, library = both
        if self.path == "auto" and library.pipelined_us < fused_times.pipelined_us:
            wanted = "library"
        return wanted, {"fused": fused_times, "library": library}

    def _predicted_alone(self, shape: GemmShape) -> Mapping[PathName, Prediction]:
        """Return the time of the library path where there is no other, on one node."""
        if self.constants is None or self.dtype == E4M3 or self.world.nodes > 1:
            return {}
        cores = self.claims.compute_cores
        times = paths.predict_library(self.op, shape, self.dtype, self.ranks, cores, self.constants)
        return {} if times is None else {"library": times}

    def _other(
        self, path: PathName, shape: Shape, measured: Mapping[PathName, Prediction]
    ) -> PathName | None:
        """Return the other path if it may still be faster once the backend has scheduled it:
        ``fused`` for e4m3 operands; else the library's, which a backend may run in ways that are not
        predicted here."""
        if self.path != "auto":
            return None
        if self._fuses_scaled(shape):
            return "fused"
        return "library" if path == "fused" and "library" in measured else None

    def _fuses_scaled(self, shape: Shape) -> bool:
        """Return whether e4m3 operands may take the fused path beside a library's."""
        scales, claims = self.around.scales, self.claims
        if scales is None or not self.library or not isinstance(shape, GemmShape):
            return False
        fast = scales.use_fast_accum
        modes = claims.fused_scale_modes if fast else claims.fused_float32_scale_modes
        return paths.fuses_scaled(
            self.op, shape, self.out_dtype, self.ranks, scales, modes, self.constants
        )


_plans = lru_cache(maxsize=64)(Plans)


class _Asked(NamedTuple):
    """The sizes of a call, and what the caller wishes of its plan, all of it checked."""

    shape: Shape
    chunk: int | None
    compute_blocks: int | None
    comm_blocks: int | None
    returns: Returns | None


@lru_cache(maxsize=256)
def _planned(plans: Plans, asked: _Asked) -> Planned:
    return plans.planned(asked)


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


def _norm_step(around: Around, claims: AcceleratorCapabilities) -> NormStep | None:
    """Decide who normalises, and quantises: the launch if nothing is added behind it, else the op."""
    if around.norm is None:
        return None
    launch = claims.adds_norm and (claims.adds_bias or not around.bias)
    residual, eps, quantises = around.norm
    return NormStep(
        step="launch" if launch else "after",
        residual=residual,
        eps=eps,
        quantises=quantises and launch and claims.quantises_norms,
    )


def _path_alternatives(path: PathName, times: Prediction | None) -> tuple[Alternative, ...]:
    """Return both paths as alternatives if the backend has two and their times are known."""
    if times is None or times.fused_us is None or times.library_us is None:
        return ()
    return (
        Alternative("path", "fused", times.fused_us, path == "fused"),
        Alternative("path", "library", times.library_us, path == "library"),
    )
