"""The schedule of a ``streams`` launch: its messages, its chunks, the products beside them, and the
landings, which are places in a rank's window that its peers write to, the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from mkernel.backends.accelerators.streams.device import DeviceName, scaled_mm, torch_device
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import (
    DTYPE_BYTES,
    AttentionShape,
    CombineShape,
    CommonPart,
    DispatchShape,
    DtypeName,
    GemmCombineShape,
    GemmShape,
    KeysTravel,
    LaunchPlan,
    MoeShape,
    OpName,
    ScaleMode,
    Schedule,
    rows_of_a_rank,
)
from mkernel.plan.ops import forward
from mkernel.plan.paths import partials_of_experts
from mkernel.plan.pipeline import Exchange, Pipeline, Returns, Runs
from mkernel.plan.predict import messages_us, payloads, predict
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows, choose
from mkernel.plan.traffic import relay_bytes


class StreamsCapabilities(AcceleratorCapabilities):
    """The capabilities of one kind of torch device, on which schedules depend."""

    torch_device: DeviceName
    scaled_mm: tuple[ScaleMode, ...] = ()
    """Scales for which torch has a product on such devices."""


class StreamsSchedule(Schedule):
    """The fields that schedules of all ops have.

    Attributes:
        rows_per_chunk: rows (tokens, positions of a piece) of a message.
        window_bytes: bytes of a rank's window, into which peers put rows by copy engines; 0:
            messages are those of torch.distributed.
        comm_share: one in this many vector cores of an NPU moves messages; 0: the two streams share
            all cores.
    """

    rows_per_chunk: int = Field(ge=1)
    window_bytes: int = Field(0, ge=0)
    comm_share: int = Field(0, ge=0)

    @property
    def copy_engines(self) -> bool:
        """True if copy engines put rows into windows."""
        return self.window_bytes > 0


class RotatingSchedule(StreamsSchedule):
    """A schedule in which every rank sends to every other. ``order``: the order in which the
    others' rows are consumed."""

    order: Runs


class ExchangeSchedule(RotatingSchedule):
    """A schedule with an exchange. ``peers_together``: messages of all peers are posted together,
    chunk by chunk; otherwise peer after peer."""

    peers_together: bool


class RelayedSchedule(ExchangeSchedule):
    """The schedule of an op of MoE. ``exchange``: between nodes. If it is hierarchical, a rank relays
    for those in its place of other nodes, and keeps ``relay_bytes`` of their rows, at most."""

    exchange: Exchange = "direct"
    relay_bytes: int = Field(0, ge=0)

    @property
    def relays(self) -> bool:
        """True if ranks relay for those of other nodes."""
        return self.exchange == "hierarchical"


class HomeSchedule(RelayedSchedule):
    """The schedule of results that come home. ``node_sums``: the dtype to which a node's sum of a
    token's results is rounded before it crosses to another node; None: the exchange is direct."""

    node_sums: DtypeName | None = None


ScaledProducts = Literal["scaled_mm", "dequantised"]


class ScaledSchedule(StreamsSchedule):
    """A GEMM op's schedule. ``scaled_products``: the way to multiply e4m3 operands, by
    ``torch._scaled_mm``, or after dequantising them in float32 where torch has no such product.
    None: operands are of other dtypes."""

    scaled_products: ScaledProducts | None = None


class GatherSchedule(ExchangeSchedule, ScaledSchedule):
    """The schedule of AllGather+GEMM. ``products_in_flight`` products run side by side, each on its
    own stream; own rows are cut into that many. ``head_start_cycles`` pass between the first
    messages and the first product, which would otherwise occupy every multiprocessor before a
    message's kernel has started."""

    kind: Literal["streams.all_gather_gemm"] = "streams.all_gather_gemm"
    products_in_flight: int = Field(ge=1)
    head_start_cycles: int = Field(ge=0)


class ReduceScatterSchedule(RotatingSchedule, ScaledSchedule):
    """The schedule of GEMM+ReduceScatter: one product and one message per chunk, chunk after chunk."""

    kind: Literal["streams.gemm_reduce_scatter"] = "streams.gemm_reduce_scatter"


class AllReduceSchedule(ExchangeSchedule, ScaledSchedule):
    """The schedule of GEMM+AllReduce: that of GEMM+ReduceScatter, then an exchange of the sums."""

    kind: Literal["streams.gemm_all_reduce"] = "streams.gemm_all_reduce"


class SumSchedule(ExchangeSchedule):
    """The schedule of AllReduce: an exchange of rows, one sum, and an exchange of sums."""

    kind: Literal["streams.all_reduce"] = "streams.all_reduce"


Gathers = Literal["wanted", "whole"]


class TokenSchedule(RelayedSchedule):
    """The schedule of a dispatch. ``gathers``: tokens travel once to each rank that wants them, after
    the ids have arrived; or all of them to every rank, before that."""

    gathers: Gathers

    @property
    def whole_tokens(self) -> bool:
        """True if all tokens travel to every rank (``gathers``)."""
        return self.gathers == "whole"


class RowsSchedule(TokenSchedule):
    """The schedule of a dispatch without a product."""

    kind: Literal["streams.moe_rows"] = "streams.moe_rows"


class DispatchSchedule(TokenSchedule):
    """The schedule of MoE dispatch+GEMM.

    ``as_they_arrive``: tokens of each source are multiplied when they arrive; otherwise all at
    once, which gives fewer and larger products. ``grouped``: those are one product for all experts,
    which torch has for some dtypes; otherwise one for each expert that has rows."""

    kind: Literal["streams.moe_dispatch"] = "streams.moe_dispatch"
    as_they_arrive: bool
    grouped: bool


class CombineSchedule(HomeSchedule):
    """The schedule of MoE combine, and of the backward of MoE ops: exchanges, then one sum."""

    kind: Literal["streams.moe_combine"] = "streams.moe_combine"


class GemmCombineSchedule(HomeSchedule):
    """The schedule of MoE GEMM+combine: products, then an exchange of the rows that ``returns``
    names, then one sum. ``grouped``: as for a dispatch."""

    kind: Literal["streams.moe_gemm_combine"] = "streams.moe_gemm_combine"
    returns: Returns
    grouped: bool


class AttentionSchedule(StreamsSchedule):
    """The schedule of ring attention: blocks go round the ring, and each is attended to when all of
    it has arrived."""

    kind: Literal["streams.ring_attention"] = "streams.ring_attention"

    @property
    def keys_travel(self) -> KeysTravel:
        """Return that blocks go round the ring."""
        return "ring"


HIERARCHICAL_OPS = ("moe_dispatch", "moe_dispatch_gemm", "moe_combine", "moe_gemm_combine")
"""Ops that also exchange hierarchically."""
_SCHEDULES: dict[OpName, type[StreamsSchedule]] = {
    "all_gather_gemm": GatherSchedule,
    "gemm_reduce_scatter": ReduceScatterSchedule,
    "gemm_all_reduce": AllReduceSchedule,
    "all_reduce": SumSchedule,
    "moe_dispatch": RowsSchedule,
    "moe_dispatch_gemm": DispatchSchedule,
    "moe_combine": CombineSchedule,
    "moe_gemm_combine": GemmCombineSchedule,
    "moe_dispatch_backward": CombineSchedule,
    "moe_combine_backward": CombineSchedule,
    "moe_gemm_combine_backward": CombineSchedule,
    "ring_attention": AttentionSchedule,
    "ring_attention_backward": AttentionSchedule,
}


def schedule(request: ScheduleRequest) -> Scheduled:
    """Choose puts where the routes are p2p, and chunks and order by predicted times. TypeError for
    capabilities that are not :class:`StreamsCapabilities`."""
    plan, claims = request.plan, request.capabilities
    if not isinstance(claims, StreamsCapabilities):
        raise TypeError(f"schedules of 'streams' need StreamsCapabilities, not {claims!r}")
    traits, ring = torch_device(claims.torch_device).traits, isinstance(plan.shape, AttentionShape)
    window = landing_bytes(plan)
    together = traits.peers_together and not window
    found = by_rows(
        request,
        chunks=traits.row_chunks,
        orders=("node",) if ring else get_args(Runs),
        one_kernel_per_chunk=True,
        grouped=together and issubclass(_SCHEDULES[plan.op], ExchangeSchedule),
    )
    rows = min(found.pipeline.rows_per_chunk or 1, _most_rows(plan))
    order = found.pipeline.order.runs
    common: dict[str, Any] = {
        "rows_per_chunk": rows,
        "window_bytes": window,
        "comm_share": traits.comm_share,
    }
    if issubclass(_SCHEDULES[plan.op], ScaledSchedule):
        common["scaled_products"] = _scaled_products(plan, claims.scaled_mm)[0]
    if issubclass(_SCHEDULES[plan.op], RelayedSchedule):
        common |= _relaying(plan, found.pipeline.exchange)
        if common["exchange"] == "hierarchical":
            found, order = _in_order_of_nodes(found), "node"
            together = together and _several_at_a_time(plan)
    made: StreamsSchedule
    if plan.op == "all_gather_gemm":
        full = plan.gemm.m * plan.gemm.n >= claims.compute_cores * traits.tile_elements
        late = full and not window and plan.world_size > 1
        made = GatherSchedule(
            **common,
            order=order,
            peers_together=together,
            products_in_flight=traits.products_in_flight,
            head_start_cycles=traits.head_start_cycles if late else 0,
        )
    elif plan.op == "gemm_reduce_scatter":
        made = ReduceScatterSchedule(**common, order=order)
    elif plan.op == "gemm_all_reduce":
        made = AllReduceSchedule(**common, order=order, peers_together=together)
    elif plan.op == "all_reduce":
        made = SumSchedule(**common, order=order, peers_together=together)
    elif issubclass(_SCHEDULES[plan.op], TokenSchedule):
        common |= {"order": order, "peers_together": together}
        found, made = _dispatch(request, found, common, claims.torch_device)
    elif plan.op == "moe_gemm_combine":
        returns = found.pipeline.returns
        made = GemmCombineSchedule(
            **common,
            order=order,
            peers_together=together,
            returns=returns,
            grouped=_grouped(plan, _results(plan, returns), claims.torch_device),
        )
    elif _SCHEDULES[plan.op] is CombineSchedule:
        made = CombineSchedule(**common, order=order, peers_together=together)
    else:
        made = AttentionSchedule(**common)
    return found._replace(schedule=made)


def _dispatch(
    request: ScheduleRequest, found: Scheduled, common: dict[str, Any], device: DeviceName
) -> tuple[Scheduled, TokenSchedule]:
    """Schedule a dispatch, given what all schedules of exchanges have."""
    plan = request.plan
    gathers, considered = _gathering(request, found.pipeline)
    pipeline = replace(found.pipeline, whole_tokens=gathers == "whole")
    times = found.prediction
    if request.constants is not None and request.measured is None:
        times = predict(plan, request.links, pipeline, request.constants)
    found = Scheduled(found.schedule, pipeline, times, found.alternatives + considered)
    if plan.op == "moe_dispatch":
        return found, RowsSchedule(**common, gathers=gathers)
    grouped = _grouped(plan, _products(plan), device)
    early = torch_device(device).traits.overlaps and not grouped
    return found, DispatchSchedule(**common, gathers=gathers, as_they_arrive=early, grouped=grouped)


def _in_order_of_nodes(found: Scheduled) -> Scheduled:
    """Return the schedule in the one order that relays have."""
    order = replace(found.pipeline.order, runs="node")
    others = tuple(one for one in found.alternatives if one.decision != "order")
    pipeline = replace(found.pipeline, order=order)
    return found._replace(pipeline=pipeline, alternatives=others)


def _several_at_a_time(plan: CommonPart) -> bool:
    """Return whether a relaying rank exchanges with several others of its node, or of its place."""
    return max(plan.nodes, plan.ranks_per_node) > 2


def _relaying(plan: CommonPart, exchange: Exchange) -> dict[str, Any]:
    """Return the fields of an op's :class:`RelayedSchedule` that the exchange decides."""
    shape, crosses = plan.shape, exchange == "hierarchical"
    node_sums: DtypeName | None = None
    if crosses and plan.invariant is not None and isinstance(shape, CombineShape):
        node_sums = plan.invariant.partial_dtype
    elif crosses and isinstance(shape, CombineShape):
        elements = shape.tokens * shape.features
        node_sums = partials_of_experts(elements, plan.out_dtype, plan.sums)
    elif crosses and isinstance(shape, GemmCombineShape):
        node_sums = shape.partial_dtype
    nbytes = relay_bytes(plan.op, shape, plan.dtype, plan.nodes, node_sums) if crosses else 0
    found: dict[str, Any] = {"exchange": exchange, "relay_bytes": nbytes}
    comes_home = issubclass(_SCHEDULES[plan.op], HomeSchedule)
    return {**found, "node_sums": node_sums} if comes_home else found


def _scaled_products(
    plan: CommonPart, scaled_mm: tuple[ScaleMode, ...]
) -> tuple[ScaledProducts | None, ...]:
    """Return the ways to multiply e4m3 operands, the best first; (None,) for operands of other
    dtypes."""
    if plan.scales is None:
        return (None,)
    has = plan.scales.mode in scaled_mm and plan.invariant is None
    return ("scaled_mm", "dequantised") if has else ("dequantised",)


def _grouped(plan: CommonPart, results: DtypeName, device: str) -> bool:
    """Return whether torch has one product for all experts' rows, with float32 sums: operands and
    results must have one dtype, and their rows multiples of 16 bytes. It may choose by rows, so
    invariant results do without."""
    shape = plan.shape
    assert isinstance(shape, MoeShape | GemmCombineShape)
    some: dict[str, tuple[DtypeName, ...]] = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
    rows = (width * DTYPE_BYTES[plan.dtype] for width in (shape.hidden, shape.features))
    packed = all(nbytes % 16 == 0 for nbytes in rows)
    known = plan.dtype == results and plan.dtype in some.get(device, ())
    return known and packed and plan.invariant is None


def _gathering(
    request: ScheduleRequest, pipeline: Pipeline
) -> tuple[Gathers, tuple[Alternative, ...]]:
    """Choose the movement of tokens, assuming uniform routing: only those that are wanted, or whole
    if that is predicted to be faster, since it saves the wait for the ids. Relays pass on what is
    wanted."""
    plan, constants = request.plan, request.constants
    shape, world = plan.shape, plan.world_size
    assert isinstance(shape, MoeShape | DispatchShape)
    if constants is None or world == 1 or shape.routed or pipeline.exchange == "hierarchical":
        return "wanted", ()

    def travel_us(gathers: Gathers) -> float:
        whole = gathers == "whole"
        sent = payloads(plan.op, shape, plan.dtype, world, whole_tokens=whole).gather
        first = 0.0 if whole else constants.signal_us
        return first + messages_us(sent, request.links, pipeline, constants)

    return choose("tokens", get_args(Gathers), travel_us, by="without the products")


def _products(plan: CommonPart) -> DtypeName:
    """Return the dtype of the experts' products of a dispatch: an activation takes sums."""
    assert isinstance(plan.shape, MoeShape)
    return plan.out_dtype if plan.shape.activation is None else plan.sums


def _results(plan: CommonPart, returns: Returns) -> DtypeName:
    """Return the dtype of the experts' results of GEMM+combine: the one in which they travel, or
    are added."""
    assert isinstance(plan.shape, GemmCombineShape)
    return plan.sums if returns == "ranks" else plan.shape.partial_dtype


def _most_rows(plan: CommonPart) -> int:
    """Return the most rows that one rank sends another at once."""
    rows = rows_of_a_rank(plan.shape, plan.world_size)
    if isinstance(plan.shape, CombineShape) or (
        isinstance(plan.shape, GemmCombineShape) and plan.op == "moe_gemm_combine"
    ):
        return rows * plan.shape.top_k
    return rows


def check(plan: LaunchPlan, device: str) -> StreamsSchedule:
    """Return a plan's schedule if launches on such a device follow every field of it.

    Raises:
        Unsupported, TypeError: the op, or the plan, is not of this backend.
        ArgumentError: a field and its value, and the values that launches could follow.
    """
    if plan.op not in _SCHEDULES:
        raise Unsupported(f"accelerator 'streams' does not run {plan.op}")
    how = plan.part(_SCHEDULES[plan.op])
    most, window = _most_rows(plan), landing_bytes(plan)
    _legal(how, "rows_per_chunk", how.rows_per_chunk <= most, f"at most {most}")
    _legal(how, "window_bytes", how.window_bytes == window, f"{window}, by the plan's routes")
    _legal(how, "comm_share", device == "npu" or not how.comm_share, f"0 on {device!r} devices")
    if isinstance(how, RotatingSchedule):
        plan.order(how.order)
    if isinstance(how, RelayedSchedule):
        known = plan.nodes > 1 and plan.ranks_per_node > 1 and plan.op in HIERARCHICAL_OPS
        several = known or not how.relays
        _legal(how, "exchange", several, "'direct', in this world and of this op")
        for field, value in _relaying(plan, how.exchange).items():
            _legal(how, field, getattr(how, field) == value, f"{value!r}, by the plan's shape")
        if how.relays:
            _legal(how, "order", how.order == "node", "'node', where ranks relay")
            alone = not (how.peers_together and not _several_at_a_time(plan))
            _legal(how, "peers_together", alone, "False, where ranks relay for one other")
        if isinstance(how, TokenSchedule) and how.relays:
            _legal(how, "gathers", how.gathers == "wanted", "'wanted', where ranks relay")
    if isinstance(how, ScaledSchedule):
        ways = _scaled_products(plan, scaled_mm(device))
        legal = " or ".join(map(str, ways))
        _legal(how, "scaled_products", how.scaled_products in ways, legal)
    if isinstance(how, GatherSchedule):
        side_by_side, late = how.products_in_flight > 1, how.head_start_cycles > 0
        _legal(how, "products_in_flight", device != "cpu" or not side_by_side, "1 on 'cpu' devices")
        _legal(how, "head_start_cycles", device == "cuda" or not late, f"0 on {device!r} devices")
    if isinstance(how, DispatchSchedule):
        can = _grouped(plan, _products(plan), device)
        _legal(how, "grouped", can or not how.grouped, "False, for such operands")
        _legal(how, "as_they_arrive", not (how.grouped and how.as_they_arrive), "False, if grouped")
    if isinstance(how, GemmCombineSchedule):
        can = _grouped(plan, _results(plan, how.returns), device)
        _legal(how, "grouped", can or not how.grouped, "False, for such operands")
    return how


def _legal(how: StreamsSchedule, field: str, legal: bool, expected: str) -> None:
    if not legal:
        raise ArgumentError(f"plan.schedule.{field}", getattr(how, field), expected)


_ALIGNMENT = 256
GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
INVARIANT = tuple(op for op in _SCHEDULES if op != "ring_attention_backward")
"""Ops that keep the promise of invariant results."""


def depths(plan: CommonPart, invariant: Invariant) -> tuple[int, ...]:
    """Return the K of each kind of product of invariant results."""
    shape, backward = plan.shape, forward(plan.op) != plan.op
    if isinstance(shape, GemmShape):
        return (shape.k // max(1, invariant.segments // plan.world_size),)
    if isinstance(shape, MoeShape):
        return (shape.features if backward else shape.hidden,)
    if isinstance(shape, GemmCombineShape):
        return (shape.hidden if backward else shape.features,)
    return ()


_Wanted = dict[str, tuple[int, int, DtypeName]]
"""Rows and columns from each source, and their dtype, by name."""


class Landing(NamedTuple):
    """A place that peers write to: ``offset`` in bytes in the window, ``shape`` [source, rows,
    columns]."""

    offset: int
    shape: tuple[int, int, int]
    dtype: DtypeName

    @property
    def nbytes(self) -> int:
        """The size of the landing in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def landings(plan: CommonPart) -> dict[str, Landing]:
    """Return a plan's landings by name. MoE has none because its messages vary in size, attention
    because it passes on what it receives."""
    wanted = _of_sum(plan) if plan.op == "all_reduce" else _of_gemm(plan)
    found, end = {}, 0
    for name, (height, columns, dtype) in wanted.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        found[name] = Landing(offset, (plan.world_size, height, columns), dtype)
        end = offset + found[name].nbytes
    return found


def _of_sum(plan: CommonPart) -> _Wanted:
    rows, columns = -(-plan.summed.m // plan.world_size), plan.summed.n
    return {"slots": (rows, columns, plan.dtype), "results": (rows, columns, plan.out_dtype)}


def _of_gemm(plan: CommonPart) -> _Wanted:
    if plan.op not in GEMMS:
        return {}
    gemm = plan.gemm
    rows = -(-gemm.m // plan.world_size)
    wanted: _Wanted = {}
    if plan.op == "all_gather_gemm":
        wanted["gathered"] = (rows, gemm.k, plan.dtype)
        if plan.scales is not None:
            of_a = scale_sizes(plan.scales.mode, rows, gemm.n, gemm.k)[0]
            wanted["scales"] = (*of_a, "float32")
    else:
        partial = plan.invariant and plan.invariant.partial_dtype
        wanted["slots"] = (rows, gemm.n, partial or plan.sums)
    if plan.op == "gemm_all_reduce":
        wanted["results"] = (rows, gemm.n, plan.out_dtype)
    return wanted


def landing_bytes(plan: CommonPart) -> int:
    """Return the bytes of a window with all of a plan's landings; 0 if its messages are no puts."""
    if plan.world_size == 1 or any(route.kind != "p2p" for route in plan.routes.classes):
        return 0
    return max((each.offset + each.nbytes for each in landings(plan).values()), default=0)
