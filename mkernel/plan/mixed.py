"""Worlds of unlike nodes: what their ranks share of a plan.

Each kind of accelerator is a node of its own, and unlike ranks speak only the wire between nodes:
bytes, then a signal. A plan of such a world fixes what they share: rows of each node, chunks, the order
of nodes, the dtype of sums on the wire. A rank launches each chunk as a call of its own backend in a
world of its node alone, whose plan no other node sees.

AllGather+GEMM: rows cross to the rank in the same place of each other node, and each chunk is gathered
and multiplied there. GEMM+ReduceScatter: sums of a node cross in the same way, to their owner.
GEMM+AllReduce: each rank sends its share of the rows of its node's sum to every rank of other nodes.
Sums of nodes are added in the order of nodes. AllReduce multiplies nothing: ranks add up the rows that
they own, in the order of ranks, and send them to all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from mkernel.errors import ArgumentError, DtypeError, Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import (
    DTYPE_BYTES,
    CommonPart,
    DtypeName,
    GemmShape,
    LaunchPlan,
    Prediction,
    Schedule,
    SumShape,
)
from mkernel.plan.pipeline import ConsumptionOrder, Pipeline
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.plan.shapes import SHAPES
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator, Model

OPS = tuple(op for op, shape in SHAPES.items() if shape in (GemmShape, SumShape))
"""The ops of worlds of unlike nodes."""
JOINT = "+"
"""Joins the accelerators of unlike nodes, in the order of the nodes, to the name of a world's."""
Shards = Literal["even", "speed"] | Sequence[int]
"""The shares of nodes in a dimension: even, by predicted speed, or the parts of a rank, by node."""
_CHUNKS = 4
_RATED: tuple[DtypeName, ...] = ("float16", "bfloat16", "float32")


class Side(Model):
    """The claims of the ranks of a node, as all ranks of the world know them. ``tflops``: of one of
    them, by dtype, as its constants predict; empty: they are unknown."""

    accelerator: str
    claims: AcceleratorCapabilities
    card: str | None = None
    tflops: dict[DtypeName, float] = Field({})

    def __str__(self) -> str:
        rate = self.tflops.get("float16")
        known = "unknown" if rate is None else f"{rate:.0f} TFLOP/s in float16, of {self.card}"
        return f"speed of a rank on {self.accelerator}: {known}"

    @classmethod
    def of(
        cls, accelerator: str, claims: AcceleratorCapabilities, constants: MachineConstants | None
    ) -> Side:
        """Return the side of an accelerator with these claims and constants."""
        fields = {name: getattr(claims, name) for name in AcceleratorCapabilities.model_fields}
        common = AcceleratorCapabilities(**{**fields, "constants": None, "cards": ()})
        if constants is None:
            return cls(accelerator=accelerator, claims=common)
        rates = {dtype: claims.compute_cores * constants.tflops_per_core(dtype) for dtype in _RATED}
        card = constants.card or constants.name
        return cls(accelerator=accelerator, claims=common, card=card, tflops=rates)


class MixedCapabilities(AcceleratorCapabilities):
    """The capabilities of a world of unlike nodes: what all of them claim. ``sides``: by node."""

    sides: tuple[Side, ...] = Field(min_length=2)

    def check_dtype(self, dtype: str) -> None:
        """Raise DtypeError, which names the accelerators without it, if only some have a dtype."""
        without = [side.accelerator for side in self.sides if dtype not in side.claims.dtypes]
        if without and len(without) < len(self.sides):
            names = " and ".join(map(repr, dict.fromkeys(without)))
            legal = f"what all nodes have: {', '.join(self.dtypes)}"
            raise DtypeError("dtype", repr(dtype), legal, why=f"accelerator {names} lacks it")

    def speeds(self, dtype: DtypeName = "float16") -> list[float]:
        """Return the TFLOP/s of a rank by node. Unsupported: those of some node are unknown."""
        for side in self.sides:
            if not side.tflops.get(dtype):
                raise Unsupported(
                    f"shards='speed': nobody says how fast a rank on {side.accelerator!r} is; "
                    "MKERNEL_CONSTANTS names a file that does (`mkernel probe --measure`)"
                )
        return [side.tflops[dtype] for side in self.sides]

    def misfit(self, device: Accelerator) -> str | None:
        """Return why calls can run on no node with such a device; None: nothing speaks against it."""
        reasons = [side.claims.misfit(device) for side in self.sides]
        return None if None in reasons else reasons[0]


def name_of(sides: Sequence[Side]) -> str:
    """Return the name of what such a world runs on, such as ``hopper+streams``."""
    names = [side.accelerator for side in sides]
    kinds = [name for at, name in enumerate(names) if name not in names[:at]]
    return JOINT.join(kinds if kinds[1:] else kinds * 2)


def capabilities(sides: Sequence[Side]) -> MixedCapabilities:
    """Return what a world of such nodes claims. Unsupported: they have no dtype or op in common."""
    every = [side.claims for side in sides]

    def common(field: str) -> tuple[Any, ...]:
        first = getattr(every[0], field)
        return tuple(one for one in first if all(one in getattr(each, field) for each in every))

    ops = tuple(op for op in OPS if op in common("ops") or op == "all_reduce")
    dtypes, results = common("dtypes"), common("out_dtypes")
    if not (dtypes and results):
        raise Unsupported(
            f"nodes on {name_of(sides)} have no dtype in common; see `mkernel doctor` on each"
        )
    limits = [each.most_ranks for each in every if each.most_ranks is not None]
    return MixedCapabilities(
        sides=tuple(sides),
        ops=ops,
        dtypes=dtypes,
        out_dtypes=results,
        mixed_dtypes=all(each.mixed_dtypes for each in every),
        rounded_partials=any(each.rounded_partials for each in every),
        b_layouts=common("b_layouts") or ("row",),
        alignment_bytes=max(each.alignment_bytes for each in every),
        most_ranks=min(limits) * len(sides) if limits else None,
        simulated=any(each.simulated for each in every),
        transfer_paths=("p2p", "nic", "staged"),
        peer_access=True,
        sums_in_rank_order=False,  # a node adds up its own ranks' first
        compute_cores=1,
        comm_cores=1,
    )


class MixedSchedule(Schedule):
    """The decisions that unlike ranks share of a call, beyond those of all plans.

    ``accelerators``: by node. ``rows``: what each rank of a node has of the rows that ranks share, by
    node. Rows cross in chunks of ``rows_per_chunk``; each node consumes those of the next one first.
    ``wire``: the dtype in which rows or sums cross.
    """

    kind: Literal["mixed"] = "mixed"
    accelerators: tuple[str, ...]
    rows: tuple[int, ...]
    rows_per_chunk: int = Field(ge=1)
    wire: DtypeName

    def own_sizes(self, op: str) -> set[str]:
        """Return the part of a product that each node may cut as it likes: columns of what is gathered,
        terms of what is summed."""
        return {"all_gather_gemm": {"n"}, "all_reduce": set()}.get(op, {"k"})

    @property
    def partials(self) -> str:
        """Return the dtype in which sums travel."""
        return self.wire

    def chunks(self, node: int) -> Iterator[slice]:
        """Yield the chunks of a rank's rows on a node."""
        for start in range(0, self.rows[node], self.rows_per_chunk):
            yield slice(start, min(self.rows[node], start + self.rows_per_chunk))

    @property
    def most_chunks(self) -> int:
        """Return the most chunks that a rank's rows make."""
        return -(-max(self.rows) // self.rows_per_chunk)


def schedule(request: ScheduleRequest) -> Scheduled:
    """Decide rows, chunks and what crosses, alike on all ranks."""
    plan, claims = request.plan, request.capabilities
    assert isinstance(claims, MixedCapabilities)
    assert isinstance(plan.shape, GemmShape | SumShape)
    shared = plan.shape.rows if isinstance(plan.shape, GemmShape) else ()
    if not shared:
        whole = plan.op == "gemm_all_reduce"
        shared = (-(-plan.shape.m // (1 if whole else plan.world_size)),) * plan.nodes
    rows = max(shared)
    step = min(rows, request.chunk or -(-rows // _CHUNKS))
    crosses = plan.dtype
    rounds = plan.op == "all_reduce" and plan.dtype == plan.out_dtype  # one rank adds all terms
    if plan.op != "all_gather_gemm" and not rounds:
        crosses = _sums(claims, plan.dtype, plan.out_dtype)
    made = MixedSchedule(
        accelerators=tuple(side.accelerator for side in claims.sides),
        rows=shared,
        rows_per_chunk=step,
        wire=crosses,
    )
    pipeline = Pipeline(
        order=ConsumptionOrder(plan.nodes, plan.ranks_per_node),
        compute_blocks=1,
        comm_blocks=1,
        rows_per_chunk=step,
        one_kernel_per_chunk=True,
    )
    return Scheduled(made, pipeline, _predicted(plan, claims, made))


def _sums(claims: MixedCapabilities, dtype: DtypeName, out_dtype: DtypeName) -> DtypeName:
    """Return the dtype of a node's sums: float32 where all backends give it, else the result's."""
    if dtype == "float64" or out_dtype == "float64":
        return "float64"
    wide = claims.mixed_dtypes and "float32" in claims.out_dtypes
    return "float32" if wide else out_dtype


def _predicted(
    plan: CommonPart, claims: MixedCapabilities, made: MixedSchedule, parts: Sequence[float] = ()
) -> Prediction | None:
    """Predict a call by each rank's own constants: the slowest node's products, and what crosses a
    rank's wire. None: the constants of some node are not known. ``parts``: of the plan's product by
    node, where nodes have unequal ones."""
    shape, dtype = plan.shape, plan.dtype
    assert isinstance(shape, GemmShape | SumShape)
    rates = [side.tflops.get(dtype) for side in claims.sides]
    known = [rate for rate in rates if rate]
    if len(known) < len(rates):
        return None
    products = 2e-6 * shape.m * shape.n * shape.k if isinstance(shape, GemmShape) else 0.0
    parts = parts or [1.0] * len(known)
    compute_us = max(products * part / rate for part, rate in zip(parts, known, strict=True))
    gathers = plan.op == "all_gather_gemm"
    columns = shape.k if gathers and isinstance(shape, GemmShape) else shape.n
    rows = max(made.rows)
    if plan.op == "all_reduce":  # there and back, to each rank of the others
        rows *= 2 * plan.ranks_per_node
    nbytes = (plan.nodes - 1) * rows * columns * DTYPE_BYTES[made.wire]
    comm_us = nbytes / (1e3 * wire_gbs(plan))
    comm_us += max(one.latency_us for one in plan.routes.classes if not one.within)
    longer, shorter = max(compute_us, comm_us), min(compute_us, comm_us)
    cards = " and ".join(dict.fromkeys(side.card or side.accelerator for side in claims.sides))
    return Prediction(
        compute_us=compute_us,
        comm_us=comm_us,
        sequential_us=compute_us + comm_us,
        pipelined_us=longer + shorter / made.most_chunks,
        constants=f"by rank, of {cards}; in a node nothing is counted",
        measured=False,
    )


def sharings(plan: LaunchPlan, claims: MixedCapabilities) -> Iterator[Alternative]:
    """Yield the predicted times of even shards and of shards by speed, of the same product of all ranks
    together. Unsupported: the speeds of some node are unknown."""
    how, nodes = plan.part(MixedSchedule), plan.nodes
    for name in how.own_sizes(plan.op):
        even = plan.shape.model_dump()[name]
        for option, rates in ("even", [1.0] * nodes), ("by speed", claims.speeds(plan.dtype)):
            own = shares(even * plan.world_size, math.gcd(even, 64), plan.ranks_per_node, rates)
            times = _predicted(plan, claims, how, [size / even for size in own])
            each = dict.fromkeys(zip(own, how.accelerators, strict=True))
            told = f"{option}: {name} a rank " + ", ".join(
                f"{size} on {kind}" for size, kind in each
            )
            if times is not None:
                chosen = option == "even"
                yield Alternative("shards", told, times.pipelined_us, chosen, times.constants)


def wire_gbs(plan: CommonPart) -> float:
    """Return the GB/s of a rank to other nodes while all ranks send, which may share a NIC."""
    slowest = min(one.bandwidth_gbs for one in plan.routes.classes if not one.within)
    users = (
        Counter(nic for seat in site.seats for nic in seat.nics) for site in plan.placement.sites
    )
    return slowest / max(max(each.values(), default=1) for each in users)


def encoded(shards: Shards) -> str | None:
    """Return the argument ``shards`` of ops as native code compares it; None: even. ArgumentError."""
    if not isinstance(shards, str):
        return " ".join(map(str, shards))
    if shards not in ("even", "speed"):
        legal = "'even', 'speed' or the size of a rank's part, by node"
        raise ArgumentError("shards", repr(shards), legal)
    return None if shards == "even" else shards


def shares(size: int, multiple: int, ranks: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Cut a dimension for nodes of ``ranks`` ranks in proportion to these speeds: what each rank of a
    node gets, by node, in multiples of ``multiple``, at least one. ArgumentError: the dimension is no
    whole number of these for the ranks of every node."""
    unit = ranks * multiple
    units, nodes = size // unit, len(speeds)
    if size % unit or units < nodes:
        legal = f"a multiple of {unit} ({ranks} ranks a node, in multiples of {multiple})"
        raise ArgumentError("size", size, f"{legal}, at least {nodes * unit}")
    exact = [(units - nodes) * speed / sum(speeds) for speed in speeds]
    found = [1 + int(each) for each in exact]
    by_rest = sorted(range(nodes), key=lambda node: int(exact[node]) - exact[node])
    for node in by_rest[: units - sum(found)]:  # largest remainders first
        found[node] += 1
    return tuple(each * multiple for each in found)
