"""The bytes that ranks send each other in one call: the one place that counts them.

A call is a few *flows*. One goes out, from the rank that has something to the ranks that need it: rows
of A, sums, tokens, ids, keys. Or one goes home, from the ranks that made something to the one that
keeps it: partial results, results of experts. A flow states what an ordered pair of ranks exchanges,
and what a rank and a whole node do; :class:`Traffic` lays it on the ranks as the exchange says.
Predictions, statistics and floors take expected bytes, with uniform routing of tokens; with the routing
of a call (:class:`RoutedTokens`) the bytes are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, prod
from typing import Literal, NamedTuple, Protocol, cast

from mkernel.errors import ArgumentError
from mkernel.plan.model import (
    BLOCK,
    DTYPE_BYTES,
    E4M3,
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
    Scales,
    Shape,
    SumShape,
    scales_of_rows,
    sums_of,
)
from mkernel.plan.ops import forward
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.topology.routes import Route

_ID_BYTES = 4
"""The bytes of an expert's number as it travels."""
Routing = Literal["uniform", "balanced"]
"""The routing of tokens that a number of bytes assumes. ``uniform``: each token has different experts,
all equally likely; predictions, floors and statistics assume it unless they say otherwise.
``balanced``: a token's experts lie on as many ranks as can be, as in the calls that a simulator records
without ids."""
Moe = MoeShape | DispatchShape | CombineShape | GemmCombineShape


def wanted(experts: int, top_k: int, parts: int, routing: Routing = "uniform") -> float:
    """Return the share of a rank's tokens that have experts in one of ``parts`` equal parts of all
    experts, as those of a rank or of a node are: 1 - C(E - E/P, k) / C(E, k) where routing is uniform,
    min(1, k/P) where it is balanced."""
    if routing == "balanced":
        return min(1.0, top_k / parts)
    chosen, others = min(top_k, experts), experts - experts // parts
    return 1 - comb(others, chosen) / comb(experts, chosen)


class TokenCounts(Protocol):
    """Numbers of a rank's tokens."""

    def to_rank(self, source: int, rank: int) -> float:
        """Return how many tokens of ``source`` have an expert on ``rank``."""

    def to_node(self, source: int, node: int) -> float:
        """Return how many tokens of ``source`` have an expert on some rank of a node."""

    def slots(self, source: int, rank: int) -> float:
        """Return how many slots of all tokens of ``source`` have their expert on ``rank``."""


@dataclass(frozen=True)
class ExpectedTokens:
    """The numbers that are expected of a routing that is not known."""

    shape: Moe
    world: int
    nodes: int = 1
    routing: Routing = "uniform"

    def to_rank(self, source: int, rank: int) -> float:
        """Return the expected number."""
        return self._wanted(self.world)

    def to_node(self, source: int, node: int) -> float:
        """Return the expected number."""
        return self._wanted(self.nodes)

    def slots(self, source: int, rank: int) -> float:
        """Return the expected number."""
        return self.shape.tokens * (self.shape.top_k / self.world)

    def _wanted(self, parts: int) -> float:
        return self.shape.tokens * wanted(self.shape.experts, self.shape.top_k, parts, self.routing)


class RoutedTokens:
    """The numbers of a routing.

    Args:
        ids: the experts [W, T, k] that the tokens of every rank go to; a number that is no expert's
            is nobody's.
        experts: number on all ranks together. nodes: number of them.
    """

    def __init__(self, ids: Sequence[Sequence[Sequence[int]]], experts: int, nodes: int) -> None:
        world = len(ids)
        if not world or world % nodes or experts % world:
            legal = f"those of a multiple of {nodes} nodes, which share {experts} experts evenly"
            raise ArgumentError("ids", f"of {world} ranks", legal)
        own, each = experts // world, world // nodes
        self._ranks, self._nodes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._slots = Counter[tuple[int, int]]()
        for source, tokens in enumerate(ids):
            for token in tokens:
                owners = [expert // own for expert in token if 0 <= expert < experts]
                self._slots.update((source, owner) for owner in owners)
                self._ranks.update((source, owner) for owner in set(owners))
                self._nodes.update((source, node) for node in {owner // each for owner in owners})

    def to_rank(self, source: int, rank: int) -> int:
        """Return the number."""
        return self._ranks[source, rank]

    def to_node(self, source: int, node: int) -> int:
        """Return the number."""
        return self._nodes[source, node]

    def slots(self, source: int, rank: int) -> int:
        """Return the number."""
        return self._slots[source, rank]


Count = Callable[[int, int], float]


class Flow(NamedTuple):
    """The items that ranks exchange in one of a call's exchanges.

    Attributes:
        out: from the owner, to the ranks that need it; else home, to the owner.
        pair: how many items an owner and another rank exchange.
        node: how many cross between an owner and all ranks of another node where these share them.
        nbytes: the bytes of an item between ranks of a node, or of a pair that exchanges directly.
        across: the bytes of an item that a whole node shares; None: as many.
        describes: items say what rows are, or how to add them: ids, scales of A, weights of slots.
    """

    out: bool
    pair: Count
    node: Count
    nbytes: float
    across: float | None = None
    describes: bool = False


@dataclass(frozen=True)
class Traffic:
    """The bytes of one call between each two ranks. ``even``: all ranks send alike."""

    nodes: int
    ranks_per_node: int
    exchange: Exchange
    flows: tuple[Flow, ...]
    even: bool = False

    def by_port(self, rank: int, route: Callable[[int, int], Route]) -> dict[str, float]:
        """Return the bytes that leave by each of a rank's ports, given the route of two ranks. Several
        rails of a pair share its bytes evenly, as they do large puts; small ones go whole by one rail
        after the other (:class:`mkernel.topology.lanes.NicSchedule`), which nothing here counts."""
        found: dict[str, float] = {}
        for dst, nbytes in self.from_rank(rank).items():
            rails = route(rank, dst).rails
            for rail in rails:
                found[rail.src_nic] = found.get(rail.src_nic, 0.0) + nbytes / len(rails)
        return found

    def sent(self, src: int, dst: int) -> float:
        """Return the bytes that rank ``src`` sends to another rank ``dst``."""
        return 0.0 if src == dst else sum(self._sent(flow, src, dst) for flow in self.flows)

    def from_rank(self, src: int) -> dict[int, float]:
        """Return the bytes that a rank sends to each rank that it sends any."""
        every = {
            dst: self.sent(src, dst)
            for dst in range(self.nodes * self.ranks_per_node)
            if dst != src
        }
        return {dst: nbytes for dst, nbytes in every.items() if nbytes}

    def _sent(self, flow: Flow, src: int, dst: int) -> float:
        each = self.ranks_per_node
        owner, other = (src, dst) if flow.out else (dst, src)
        if self.exchange == "direct":
            return flow.pair(owner, other) * flow.nbytes
        if src // each == dst // each:  # of the owners in the same place of every node
            if self.even:
                return self.nodes * flow.pair(owner, other) * flow.nbytes
            owners = range(owner % each, self.nodes * each, each)
            return sum(flow.pair(one, other) for one in owners) * flow.nbytes
        if src % each != dst % each:
            return 0.0
        nbytes = flow.nbytes if flow.across is None else flow.across
        return flow.node(owner, other // each) * nbytes


@dataclass(frozen=True)
class Way:
    """The way in which a call moves its bytes.

    Attributes:
        exchange: the exchange between nodes.
        returns: the way home of results of GEMM+combine.
        whole_tokens: all tokens of a dispatch go to every rank; sums of all tokens, and weights for
            them, to and from every rank of other nodes, or hierarchically every other node.
        one_exchange: partial results of an all-reduce go whole to every rank.
        partials, results: dtypes in which partial results and their sums travel. None: the same as the
            operands'.
        node_sums: dtype in which a node's sums of a token's results cross to another node; None: the
            one in which results travel.
        owned: elements of an all-reduce that each rank adds up; None: as many on average.
        keys: how keys and values of attention travel.
        routing: assumed where the routing of tokens is not known.
    """

    exchange: Exchange = "direct"
    returns: Returns = "slots"
    whole_tokens: bool = False
    one_exchange: bool = False
    partials: DtypeName | None = None
    results: DtypeName | None = None
    node_sums: DtypeName | None = None
    owned: tuple[int, ...] | None = None
    keys: KeysTravel = "all"
    routing: Routing = "uniform"


USUAL = Way()


def traffic_of(plan: LaunchPlan, routed: RoutedTokens | None = None) -> Traffic:
    """Return the bytes of a launch plan's calls: of MoE the expected ones, or exact ones if ``routed``
    has the numbers of a call's routing. TypeError: the plan has no schedule."""
    how = plan.schedule
    if how is None:
        raise TypeError(f"a plan of {plan.op} without a schedule says not how bytes travel")
    dtypes: dict[str, DtypeName] = {"sums": plan.sums, "results": plan.out_dtype}
    terms = dtypes.get(how.partials, cast(DtypeName, how.partials))
    if plan.invariant is not None:  # whose ranks send roots of subtrees
        terms = plan.invariant.partial_dtype or terms
    owned = None
    if plan.op in ("all_reduce", "gemm_all_reduce"):
        shape = plan.shape
        assert isinstance(shape, GemmShape | SumShape)
        owned = how.owned(shape.m, shape.n, plan.world_size)
    if isinstance(plan.shape, GemmShape) and plan.shape.rows:
        width = plan.gemm.k if plan.op == "all_gather_gemm" else plan.gemm.n
        owned = tuple(rows * width for rows in plan.shape.rows for _ in range(plan.ranks_per_node))
    way = Way(
        exchange=getattr(how, "exchange", "direct"),
        returns=getattr(how, "returns", "slots"),
        whole_tokens=how.whole_tokens,
        one_exchange=how.one_exchange,
        partials=plan.dtype if plan.op == "all_reduce" else terms,
        results=plan.out_dtype,
        node_sums=getattr(how, "node_sums", None),
        owned=owned,
        keys=how.keys_travel,
    )
    return traffic(plan, way, routed)


def traffic(plan: CommonPart, way: Way, routed: RoutedTokens | None = None) -> Traffic:
    """Return the bytes of a plan's calls that move them in such a way."""
    return Traffic(
        plan.nodes,
        plan.ranks_per_node,
        way.exchange,
        flows(
            plan.op, plan.shape, plan.dtype, plan.world_size, plan.nodes, way, routed,
            scales=plan.scales, sums=plan.sums,
        ),
        even=routed is None and way.owned is None and way.keys == "all",
    )  # fmt: skip


def relay_bytes(
    op: OpName, shape: Shape, dtype: DtypeName, nodes: int, node_sums: DtypeName | None = None
) -> int:
    """Return the bytes of rows that a rank keeps to relay them, whatever the routing: of a dispatch the
    tokens that come from the ranks in its place of other nodes, of a combine the sums for them. Each of
    these has ``tokens`` of them at most. ``node_sums``: as of :class:`Way`. 0 for other ops."""
    if not isinstance(shape, Moe):
        return 0
    row = flows(op, shape, dtype, nodes, nodes, Way("hierarchical", node_sums=node_sums))[0]
    return round((nodes - 1) * shape.tokens * (row.across or row.nbytes))


def flows(
    op: OpName,
    shape: Shape,
    dtype: DtypeName,
    world: int,
    nodes: int,
    way: Way,
    routed: RoutedTokens | None = None,
    *,
    scales: Scales | None = None,
    sums: DtypeName | None = None,
) -> tuple[Flow, ...]:
    """Return the flows of an op: of rows of operands and results, then of what describes them.
    ``routed``: the numbers of tokens; None: those that the way's routing lets expect."""
    sums = sums or sums_of(dtype, dtype)
    if isinstance(shape, GemmShape | SumShape):
        return _of_sums(op, shape, dtype, world, way, scales)
    if isinstance(shape, AttentionShape):
        return (_of_keys(op, shape, dtype, world, nodes, way.keys, DTYPE_BYTES[sums]),)
    tokens = routed or ExpectedTokens(shape, world, nodes, way.routing)
    return _of_tokens(op, shape, dtype, way, tokens, sums, world // nodes)


def _everyone(items: float) -> Count:
    return lambda owner, other: items


def _of_sums(
    op: OpName,
    shape: GemmShape | SumShape,
    dtype: DtypeName,
    world: int,
    way: Way,
    scales: Scales | None,
) -> tuple[Flow, ...]:
    gathered = shape if isinstance(shape, GemmShape) and op == "all_gather_gemm" else None
    whole = shape.m * (shape.n if gathered is None else gathered.k)

    def owned(owner: int, other: int) -> float:
        return whole / world if way.owned is None else way.owned[owner]

    if gathered is not None:
        found = [Flow(True, owned, owned, DTYPE_BYTES[dtype])]
        if scales is not None:
            of_a = prod(scales_of_rows(scales.mode, gathered.m // world, gathered.k))
            count = _everyone(of_a)
            found.append(Flow(True, count, count, DTYPE_BYTES["float32"], describes=True))
        return tuple(found)
    terms, results = (DTYPE_BYTES[each or dtype] for each in (way.partials, way.results))
    if way.one_exchange:
        return (Flow(False, _everyone(whole), _everyone(whole), terms),)

    scattered = Flow(False, owned, owned, terms)
    if op == "gemm_reduce_scatter":
        return (scattered,)
    return (scattered, Flow(True, owned, owned, results))


def _of_keys(
    op: OpName,
    shape: AttentionShape,
    dtype: DtypeName,
    world: int,
    nodes: int,
    keys: KeysTravel,
    of_sums: int,
) -> Flow:
    """Return the flow of keys and values, and of their gradients, which go round after them."""
    own = 2.0 * shape.batch * shape.kv_heads * shape.sequence / world * shape.head_dim
    back = of_sums if forward(op) != op else 0
    nbytes = own * (DTYPE_BYTES[dtype] + back)

    def passed_on(owner: int, other: int) -> float:
        """Count the blocks that go to the next rank: all but one, and gradients once more, home."""
        return (world - 1 + back * own / nbytes) * ((owner + 1) % world == other)

    def seen(owner: int, other: int) -> float:
        """Count what some query sees there: a zigzag's later half is not seen by later ranks."""
        return 0.5 if shape.causal and owner < other else 1.0

    def node_sees(owner: int, node: int) -> float:
        """Count what some query of a node sees there: its ranks are all earlier, or all later."""
        return seen(owner, node * (world // nodes))

    count = {"ring": passed_on, "seen": seen}.get(keys, _everyone(1.0))
    return Flow(True, count, node_sees if keys == "seen" else count, nbytes)


def _of_tokens(
    op: OpName,
    shape: Moe,
    dtype: DtypeName,
    way: Way,
    tokens: TokenCounts,
    sums: DtypeName,
    ranks_per_node: int,
) -> tuple[Flow, ...]:
    size: float = DTYPE_BYTES[dtype]
    top_k, of_sums = shape.top_k, DTYPE_BYTES[sums]
    if isinstance(shape, MoeShape | DispatchShape):
        if dtype == E4M3:  # each block's scale goes with it
            size += DTYPE_BYTES["float32"] / BLOCK
        row = shape.hidden * size
        if forward(op) != op:  # gradients of tokens come home
            return (
                Flow(True, tokens.to_rank, tokens.to_node, row),
                Flow(False, tokens.to_rank, tokens.to_node, shape.hidden * of_sums),
            )
        sent = Flow(True, tokens.to_rank, tokens.to_node, row)
        if way.whole_tokens:
            sent = Flow(True, _everyone(shape.tokens), _everyone(shape.tokens), row)
        ids = _everyone(shape.tokens * top_k)
        return (sent,) if shape.routed else (sent, Flow(True, ids, ids, _ID_BYTES, describes=True))
    width = shape.features if isinstance(shape, CombineShape) else shape.hidden
    weights = Flow(True, tokens.to_rank, tokens.to_node, top_k * of_sums, describes=True)
    if forward(op) != op:  # gradients of results go out, those of weights come home
        return (
            Flow(True, tokens.to_rank, tokens.to_node, width * size),
            weights,
            Flow(False, tokens.slots, tokens.to_node, of_sums, describes=True),
        )
    travels = dtype if isinstance(shape, CombineShape) else shape.partial_dtype
    row, across = (width * DTYPE_BYTES[one] for one in (travels, way.node_sums or travels))
    by_rank = way.returns == "ranks"
    home = Flow(False, tokens.to_rank if by_rank else tokens.slots, tokens.to_node, row, across)
    if way.whole_tokens:  # by rank, those of a combine alone as partial results

        def far(owner: int, other: int) -> float:
            across = owner // ranks_per_node != other // ranks_per_node
            return shape.tokens if across else tokens.to_rank(owner, other)

        if isinstance(shape, CombineShape):
            row = width * DTYPE_BYTES[way.partials or sums]
        whole, relays = _everyone(shape.tokens), way.exchange == "hierarchical"
        home = Flow(False, tokens.to_rank if relays else far, whole, row)
        weights = weights._replace(pair=whole if relays else far, node=whole)
    if by_rank:
        return home, weights
    if way.exchange == "hierarchical":  # the rank that adds up a node's results weights them
        return home, weights._replace(pair=_everyone(0))
    return (home,)
