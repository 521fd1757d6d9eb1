"""Everything decided before launch, as validated data.

A :class:`LaunchPlan` is what ``mkernel plan`` prints and what a backend's ``launch`` reads; there
is no second copy of these decisions anywhere. Plans are frozen, round-trip exactly through JSON and
have a content hash, which all ranks of a world must share.
Times are microseconds and *predicted*; sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from typing_extensions import Self

from mkernel.errors import ArgumentError
from mkernel.plan.invariance import Invariant
from mkernel.plan.pipeline import ConsumptionOrder, Runs
from mkernel.schema_version import SchemaVersion
from mkernel.topology.lanes import NicSchedule
from mkernel.topology.model import Model, fingerprint
from mkernel.topology.placement import WorldPlacement
from mkernel.topology.routes import Route, RouteTable, egress_gbs

KeysTravel = Literal["all", "seen", "ring"]
"""The way in which keys and values of attention travel: all of a rank's to every other one; of a causal
call only those that queries there see; or all of them to the next rank, which passes them on."""


def even_shares(rows: int, columns: int, world: int) -> tuple[int, ...]:
    """Return the elements of [rows, columns] that each rank has if rows are shared out as evenly as
    possible, with one more for the first ranks."""
    each, more = divmod(rows, world)
    return tuple((each + (rank < more)) * columns for rank in range(world))


class Schedule(Model):
    """The decisions of a backend's launches of one plan that no other backend knows: tile sizes,
    who moves the bytes, in which pieces.

    A subclass gives ``kind`` a default of its own, such as ``"mine.gemm"``. JSON is read as the
    class of its kind, once the module of that class has been imported.
    """

    kind: str

    @property
    def copy_engines(self) -> bool:
        """Return whether copy engines, not kernels, write to the memory of peers."""
        return False

    @property
    def whole_tokens(self) -> bool:
        """Return whether all tokens of a dispatch go to every rank, or sums of all tokens come from
        every rank of another node, not only those wanted there."""
        return False

    @property
    def one_exchange(self) -> bool:
        """Return whether partial results of an all-reduce go whole to every rank; else they go to
        their owners, whose sums travel again."""
        return False

    def own_sizes(self, op: str) -> set[str]:
        """Return the sizes that each rank has for itself, so that ranks do not compare them."""
        return set()

    @property
    def partials(self) -> str:
        """Return the dtype in which partial results of a GEMM op travel: that of ``sums``, of
        ``results``, or one by name."""
        return "sums"

    @property
    def keys_travel(self) -> KeysTravel:
        """Return how keys and values of attention travel."""
        return "all"

    def owned(self, rows: int, columns: int, world: int) -> tuple[int, ...]:
        """Return how many elements of the sum [rows, columns] of an all-reduce each rank adds up."""
        return even_shares(rows, columns, world)

    _of_kind: ClassVar[dict[str, type[Schedule]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str):  # else it is a base of others
            Schedule._of_kind[kind] = cls

    @staticmethod
    def read(value: Any) -> Any:
        """Read a schedule, as its own class, from what JSON gave. Raises ValueError if no loaded
        backend has its kind."""
        if not isinstance(value, dict):
            return value
        found = Schedule._of_kind.get(str(value.get("kind")))
        if found is None:
            known = ", ".join(sorted(Schedule._of_kind)) or "none"
            raise ValueError(
                f"no backend that is loaded has schedules of kind {value.get('kind')!r}; known: {known}"
            )
        return found.model_validate(value)


AnySchedule = Annotated[SerializeAsAny[Schedule], BeforeValidator(Schedule.read)]
"""A field that holds a schedule of any kind, and keeps its class through JSON."""


DtypeName = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
E4M3: DtypeName = "float8_e4m3fn"
"""The dtype of operands that come with scales (:mod:`mkernel.plan.arguments`), and of nothing else."""
BLOCK = 128
"""The number of elements of a row of A, and of rows and columns of B, that share a scale by
blocks."""
ScaleMode = Literal["tensor", "row", "block"]
"""The modes of scales of e4m3 operands. ``tensor``: one scale each. ``row``: one for each row of A
and each column of B. ``block``: one for each 128 of a row of A and each 128 x 128 of B."""
_Schedule = TypeVar("_Schedule", bound=Schedule)


def scales_of_rows(mode: ScaleMode, rows: int, k: int) -> tuple[int, int]:
    """Return the shape of the scales of so many rows of A."""
    return {"tensor": (1, 1), "row": (rows, 1), "block": (rows, k // BLOCK)}[mode]


PathName = Literal["fused", "library"]
"""The path of a GEMM op: one kernel that communicates while it computes; or a library's product and
a collective of the backend's own, one after the other."""
PathChoice = Literal["auto", "fused", "library"]
AttentionLayout = Literal["heads", "positions"]
"""The layout of q, k and v in memory: packed as [B, H, S, D], or as [B, S, H, D]."""
Copied = Literal["a", "b", "bias", "out", "gathered", "a_scale", "b_scale"]
"""A tensor of a GEMM op that may be copied before or after the launch."""
BiasStep = Literal["launch", "after"]
"""The step that adds a bias, or adds a residual and normalises: the launch, before it rounds
results; or the op, after the launch, on rounded results."""
DTYPE_BYTES: dict[str, int] = {
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


def sums_of(dtype: DtypeName, out_dtype: DtypeName) -> DtypeName:
    """Return the dtype in which products of such operands accumulate, and results of ranks and
    slots are added."""
    return "float64" if "float64" in (dtype, out_dtype) else "float32"


OpName = Literal[
    "all_gather_gemm",
    "all_reduce",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "moe_dispatch",
    "moe_dispatch_gemm",
    "moe_combine",
    "moe_gemm_combine",
    "ring_attention",
    "moe_dispatch_backward",
    "moe_combine_backward",
    "moe_gemm_combine_backward",
    "ring_attention_backward",
]


class GemmShape(Model):
    """Sizes of C [m, n] = A [m, k] @ B [k, n]. AllGather+GEMM: ``m`` counts all ranks' rows, ``n``
    is one rank's columns of B. GEMM+ReduceScatter and GEMM+AllReduce: ``k`` is one rank's share of
    K. ``rows``: of ``m``, those of each rank of a node, by node; empty: ranks share ``m`` evenly."""

    kind: Literal["gemm"] = "gemm"
    m: int = Field(ge=1)
    n: int = Field(ge=1)
    k: int = Field(ge=1)
    rows: tuple[int, ...] = ()


class SumShape(Model):
    """Sizes of the rows [m, n] on each rank; every rank gets the whole sum over ranks."""

    kind: Literal["sum"] = "sum"
    m: int = Field(ge=1)
    n: int = Field(ge=1)


Activation = Literal["silu_and_mul"]
"""The function of a product of [gate, up]: silu(gate) * up, which has half its columns."""


class MoeShape(Model):
    """Sizes of a dispatch: ``tokens`` [tokens, hidden] on each rank go to ``top_k`` of ``experts``
    (all ranks together), each with a weight [hidden, columns]; results have ``features``.
    ``capacity`` is the number of rows that a rank has for all its experts; None: as many as there
    are. ``routed``: an earlier dispatch's routing is used again, so no ids travel."""

    kind: Literal["moe"] = "moe"
    tokens: int = Field(ge=1)
    hidden: int = Field(ge=1)
    features: int = Field(ge=1)
    experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    capacity: int | None = Field(None, ge=1)
    activation: Activation | None = None
    routed: bool = False

    @property
    def columns(self) -> int:
        """Return the number of columns of an expert's weight."""
        return self.features if self.activation is None else 2 * self.features


class DispatchShape(Model):
    """Sizes of a dispatch without a product: ``tokens`` [tokens, hidden] on each rank go to ``top_k``
    of ``experts`` (all ranks together), and results are these rows. ``capacity``, ``routed``: as of
    :class:`MoeShape`."""

    kind: Literal["dispatch"] = "dispatch"
    tokens: int = Field(ge=1)
    hidden: int = Field(ge=1)
    experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    capacity: int | None = Field(None, ge=1)
    routed: bool = False


class CombineShape(Model):
    """Sizes of a combine: results [rows, features] of experts go home to ``tokens`` on each
    rank."""

    kind: Literal["combine"] = "combine"
    tokens: int = Field(ge=1)
    features: int = Field(ge=1)
    experts: int = Field(ge=1)
    top_k: int = Field(ge=1)


class GemmCombineShape(Model):
    """Sizes of GEMM+combine: rows [rows, features] of experts, each times its expert's weight
    [features, hidden], go home to ``tokens`` on each rank. ``partial_dtype`` is the dtype of what
    travels home."""

    kind: Literal["gemm_combine"] = "gemm_combine"
    tokens: int = Field(ge=1)
    hidden: int = Field(ge=1)
    features: int = Field(ge=1)
    experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    partial_dtype: DtypeName


class AttentionShape(Model):
    """Sizes of q [batch, heads, sequence / W, head_dim], k and v with ``kv_heads``; ``sequence``
    counts all ranks' positions. ``layout`` is that of all three in memory, and of the result.
    ``documents``: several are packed into the sequence; each call says where they begin (its tensor
    ``cu_seqlens``)."""

    kind: Literal["attention"] = "attention"
    batch: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    sequence: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    causal: bool = False
    layout: AttentionLayout = "heads"
    documents: bool = False


AnyShape = (
    GemmShape
    | SumShape
    | MoeShape
    | DispatchShape
    | CombineShape
    | GemmCombineShape
    | AttentionShape
)
Shape = Annotated[AnyShape, Field(discriminator="kind")]


def rows_of_a_rank(shape: Shape, world: int) -> int:
    """Return the number of rows (positions, tokens) that each rank has."""
    if isinstance(shape, GemmShape | SumShape):
        return -(-shape.m // world)
    if isinstance(shape, AttentionShape):
        return shape.sequence // world
    return shape.tokens


class Prediction(Model):
    """The cost model's times of one call, in microseconds, and where its constants came from."""

    compute_us: float = Field(ge=0)
    comm_us: float = Field(ge=0)
    sequential_us: float = Field(ge=0)
    pipelined_us: float = Field(ge=0)
    constants: str
    measured: bool = Field(
        True, description="False: the constants follow from a card's public figures alone"
    )
    fused_us: float | None = Field(None, ge=0, description="of a call on the fused path")
    library_us: float | None = Field(
        None, ge=0, description="of a call on the library path; both None where there is one path"
    )


class NormStep(Model):
    """The RMSNorm of the rows of a sum that every rank gets, perhaps with a residual added to it
    before (``backends/contracts/norm.py``). ``quantises``: the launch gives normalised rows in e4m3
    with a scale each (``backends/contracts/scaled.py``)."""

    step: BiasStep
    residual: bool
    eps: float = Field(gt=0)
    quantises: bool = False


class Scales(Model):
    """The scales of the e4m3 operands of a product. ``use_fast_accum``: their products may be added
    with fewer bits than float32 has, if the device is faster so, as in ``torch._scaled_mm``; not by
    blocks. ``quantises``: the dtype of rows of MoE ops that the launch quantises, each once; None: they
    are e4m3 beside scales of their own."""

    mode: ScaleMode
    use_fast_accum: bool = False
    quantises: DtypeName | None = None


class CommonPart(Model):
    """The part that plans of all backends share: one op, one shape, one world. It is the same on
    every rank."""

    schema_version: Annotated[Literal[1], SchemaVersion] = 1
    op: OpName
    shape: Shape
    dtype: DtypeName
    out_dtype: DtypeName
    b_layout: Literal["row", "column"]
    copies: tuple[Copied, ...] = Field(
        (),
        description="what the op copies on this rank, since the backend does not take it as the "
        "caller's lies in memory: operands before the launch, results after it. Each rank has its "
        "own; they are not compared",
    )
    bias: BiasStep | None = Field(
        None,
        description="where there is one, added to each row of out: by the launch before it rounds, or "
        "by the op after the launch",
    )
    norm: NormStep | None = Field(
        None, description="where rows of a sum over ranks are normalised: how, and by whom"
    )
    scales: Scales | None = Field(None, description="of e4m3 operands; of others none")
    invariant: Invariant | None = Field(
        None,
        description="the sum whose bits are promised, with its partial dtype; None: none are",
    )
    products: tuple[int, ...] = Field(
        (),
        description="AllGather+GEMM with several B: the columns of each, in the caller's order. The "
        "launch computes the first of the widest; a library the others, from the rows it gathered",
    )
    path: PathName = Field(
        "fused", description="the faster one by prediction, or the one asked for"
    )
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    accelerator: str
    nic: str | None
    verbs: str | None
    carrier: str | None = Field(
        None, description="what the process group is that carries bytes, where one does"
    )
    placement: WorldPlacement
    routes: RouteTable
    nics: NicSchedule | None = Field(
        None,
        description="how a NIC backend lays puts on the routes' rails; None: none carries them",
    )
    card: str | None = Field(
        None, description="whose constants decide, by the accelerator's name for it; None: not said"
    )
    prediction: Prediction | None = Field(
        None, description="None: there are no constants of the chips"
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks: nodes * ranks_per_node."""
        return self.nodes * self.ranks_per_node

    @property
    def gemm(self) -> GemmShape:
        """Return the shape of a GEMM op. Raises TypeError for another op's plan."""
        if not isinstance(self.shape, GemmShape):
            raise TypeError(f"a plan of {self.op} has no GEMM shape")
        return self.shape

    @property
    def summed(self) -> SumShape:
        """Return the shape of a plain sum. Raises TypeError for another op's plan."""
        if not isinstance(self.shape, SumShape):
            raise TypeError(f"a plan of {self.op} sums no rows that are there")
        return self.shape

    @property
    def launched(self) -> int:
        """Return the index in ``products`` of the one that the launch computes; 0 if there is only
        one product."""
        return self.products.index(self.gemm.n) if self.products else 0

    def order(self, runs: Runs) -> ConsumptionOrder:
        """Return the order in which ranks consume the others' rows. Raises ArgumentError if
        ``runs`` only renames the order ``node``, as in a world of one node or of one rank a
        node."""
        if runs != "node" and 1 in (self.nodes, self.ranks_per_node):
            raise ArgumentError(
                "plan.schedule.order",
                repr(runs),
                f"'node', the only order of {self.nodes} nodes x {self.ranks_per_node} ranks",
            )
        return ConsumptionOrder(self.nodes, self.ranks_per_node, runs)

    @property
    def egress_gbs(self) -> float | None:
        """Return the GB/s at which a rank sends to all others of its node together, by the routes;
        None if it has no neighbours."""
        return egress_gbs(self.routes, self.placement)

    @property
    def sums(self) -> DtypeName:
        """Return the dtype of sums: :func:`sums_of` the plan's dtypes."""
        return sums_of(self.dtype, self.out_dtype)

    def route(self, src: int, dst: int) -> Route:
        """Return the route of the ordered pair. Raises KeyError if ``src == dst`` or a rank is out
        of range."""
        return self.routes.route(self.placement, src, dst)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        world = self.world_size
        placed = (self.placement.nodes, self.placement.ranks_per_node)
        if placed != (self.nodes, self.ranks_per_node):
            raise ValueError(
                f"placement is of {placed[0]} nodes x {placed[1]} ranks, the plan of {self.nodes} x "
                f"{self.ranks_per_node}"
            )
        self.routes.check(self.placement)
        if self.path == "library" and not isinstance(self.shape, GemmShape):
            raise ValueError(f"{self.op} has no library path")
        sharded = self.op in ("all_gather_gemm", "gemm_reduce_scatter")
        rows = self.gemm.rows if isinstance(self.shape, GemmShape) else ()
        whole = (
            sharded and self.ranks_per_node * sum(rows) == self.gemm.m and min(rows, default=0) > 0
        )
        if rows and not (whole and len(rows) == self.nodes):
            raise ValueError(f"shape.rows = {rows} are no shares of {self.nodes} nodes")
        if sharded and not rows and self.gemm.m % world:
            raise ValueError(f"shape.m = {self.gemm.m} is not a multiple of {world} ranks")
        return self


PREDICTED = ("card", "prediction")
"""Fields that say how a plan was decided, and that nothing executes."""
_OF_A_RANK = {*PREDICTED, "copies"}
"""Fields of a plan that ranks need not share."""
_OF_SIZES = {"shape", "schedule"}
"""Fields that differ between plans of one op, if ranks share them."""


class LaunchPlan(CommonPart):
    """All decisions of a call: what all backends share, and ``schedule``, what the launches of this
    plan's backend do. Every field is executed; a prediction that nothing executes is a
    :class:`mkernel.plan.missing.WhatIf`."""

    schedule: AnySchedule | None = Field(
        None,
        description="the backend's own decisions; None while the backend has not been asked for them",
    )

    def part(self, of: type[_Schedule]) -> _Schedule:
        """Check the class of the backend's own decisions and return them. Raises TypeError if they
        are not of this class: the plan was made without its backend, or for another one. Raises
        ArgumentError if their ``kind`` is not that of the class."""
        if not isinstance(self.schedule, of):
            raise TypeError(
                f"a plan of op {self.op} on {self.accelerator}, path {self.path!r}, has the schedule "
                f"{self.schedule!r}, no {of.__name__}; plan with the backend's `schedule`"
            )
        kind = type(self.schedule).__pydantic_fields__["kind"].default
        if self.schedule.kind != kind:
            raise ArgumentError("plan.schedule.kind", repr(self.schedule.kind), repr(kind))
        return self.schedule

    def digest(self) -> str:
        """Return the SHA-256 (hex), which is equal exactly when all :meth:`decisions` are."""
        return self._digest

    def decisions(self) -> dict[str, Any]:
        """Return everything that ranks must share, as JSON: the plan without its prediction and its
        copies, which peers do not see."""
        own = self._own_sizes
        return self.model_dump(
            mode="json", exclude={**dict.fromkeys(_OF_A_RANK, True), "shape": own}
        )

    @property
    def _own_sizes(self) -> set[str]:
        return self.schedule.own_sizes(self.op) if self.schedule else set()

    def like(self, shape: Shape, times: Prediction | None, schedule: Schedule) -> Self:
        """Return this plan with other sizes, and what was decided for them, unchecked."""
        own = {"shape": shape, "prediction": times, "schedule": schedule}
        made = self.model_copy(update=own)
        made.__dict__["_rest"] = self._rest
        return made

    @cached_property
    def _digest(self) -> str:
        shape = self.shape.__pydantic_serializer__.to_json(self.shape, exclude=self._own_sizes)
        schedule = self.schedule
        own = [shape, schedule.__pydantic_serializer__.to_json(schedule)] if schedule else [shape]
        return sha256(b" ".join([self._rest.encode(), *own])).hexdigest()

    @cached_property
    def _rest(self) -> str:
        """The digest of all that plans of other sizes share with this one."""
        # All plans of a world have these two, which grow with it.
        placement, routes = self.placement.fingerprint, self.routes.fingerprint
        others = {*_OF_A_RANK, *_OF_SIZES, "placement", "routes"}
        own = self.model_dump(mode="json", exclude=others)
        return fingerprint(own | {"placement": placement, "routes": routes})

    @model_validator(mode="after")
    def _executed(self) -> Self:
        if self.routes.untaken:
            kind = self.routes.untaken[0].kind
            raise ValueError(
                f"a route of kind {kind!r}: no backend takes it, and a plan holds none"
            )
        if (self.nics is None) != (self.nic is None):
            raise ValueError(f"a plan with nic {self.nic!r} has the NIC schedule {self.nics!r}")
        return self


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted path and both values of the first field (model order) in which two dumps
    differ; None if they are equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            where = f"{path}.{key}" if path else str(key)
            both = key in left and key in right
            found = (
                first_difference(left[key], right[key], where)
                if both
                else (where, left.get(key), right.get(key))
            )
            if found:
                return found
        return None
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return f"{path}.length", len(left), len(right)
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            found = first_difference(one, other, f"{path}[{index}]")
            if found:
                return found
        return None
    return None if left == right else (path, left, right)
