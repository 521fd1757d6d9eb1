"""The schedule of ring attention, and its predicted time.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).

A library is called on parts. Where these would take more than ``whole_bytes`` of memory, the sequence
is cut in pieces, within a node. A backend with kernels of its own has further ways of the forward.

Between nodes keys and values travel by a kernel, in chunks (kernels/attention/crossing.hpp), once to
each other node unless the caller wishes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from mkernel.backends.accelerators.cuda.attention.pieces import Pieces, flags
from mkernel.backends.accelerators.cuda.machine import CallTimes, machine
from mkernel.backends.accelerators.cuda.schedule import (
    FLAGS,
    AttentionBackwardSchedule,
    AttentionCore,
    AttentionInPiecesSchedule,
    AttentionLibrary,
    AttentionSchedule,
    KeysSchedule,
)
from mkernel.errors import ArgumentError
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, Prediction, Schedule
from mkernel.plan.ops import forward
from mkernel.plan.pipeline import Exchange
from mkernel.plan.predict import prediction
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest, TooLarge
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()
_FEWEST_ROWS = 64  # fewest rows of a piece


class Way(NamedTuple):
    """One of the ways in which the forward may run."""

    schedule: Schedule
    prediction: Prediction | None

    @property
    def time_us(self) -> float | None:
        """Return its predicted time."""
        return None if self.prediction is None else self.prediction.pipelined_us


class Far(NamedTuple):
    """The way of keys and values to other nodes: the fields of :class:`KeysSchedule`, none in one node,
    and the microseconds for which they occupy the links between nodes, or all links."""

    fields: dict[str, Any]
    wire_us: float

    def arrivals(self, plan: CommonPart, sent: float) -> list[float]:
        """Return when the keys of each other rank have come, in the order in which they are read, if
        those of a neighbour take ``sent`` microseconds."""
        near = plan.ranks_per_node - 1
        far = plan.world_size - 1 - near
        return [sent * (number + 1) for number in range(near)] + [
            self.wire_us * (number + 1) / far for number in range(far)
        ]


NEAR = Far({}, 0.0)
"""The way of a world of one node."""
Forward = Callable[
    [CommonPart, int, MachineConstants | None, Far], tuple[Way, tuple[Alternative, ...]]
]
"""Chooses the way of a forward on so many cores, and says which there were, if several."""


def parts(
    plan: CommonPart, cores: int, constants: MachineConstants | None, far: Far
) -> tuple[Way, tuple[Alternative, ...]]:
    """Return the only way that takes no kernel of ours."""
    return by_parts(plan, cores, constants, far), ()


def schedule(request: ScheduleRequest, choose: Forward = parts) -> Scheduled:
    """Schedule a plan of ring attention, or of its backward. Chunks are not those that are
    requested."""
    # Keys cross no slower if each does so once for a node.
    found = by_rows(replace(request, exchanges=request.exchanges[-1:]), chunks=1)
    plan, cores = request.plan, found.pipeline.compute_blocks
    constants = request.constants
    if forward(plan.op) == plan.op:
        wire_us = 0.0 if found.prediction is None else found.prediction.comm_us
        far = Far(crossing(plan, found.pipeline.exchange), wire_us) if plan.nodes > 1 else NEAR
        (how, times), ways = choose(plan, cores, constants, far)
        found = found._replace(schedule=how, alternatives=(*found.alternatives, *ways))
        return found if times is None else found._replace(prediction=times)
    constants = constants if plan.nodes == 1 else None
    most = min(2, attention_shape(plan).kv_heads)
    each = {lots: predicted_backward(plan, lots, constants) for lots in range(1, most + 1)}
    lots = min(each, key=lambda one: each[one].pipelined_us)
    blocks = cores * _MACHINE.attention.merge_blocks_a_core
    backward = AttentionBackwardSchedule(library="cudnn", lots=lots, sum_blocks=blocks)
    found = found._replace(schedule=backward)
    return found if constants is None else found._replace(prediction=each[lots])


def crossing(plan: CommonPart, exchange: Exchange) -> dict[str, Any]:
    """Return the fields of :class:`KeysSchedule` of a plan of several nodes. TooLarge."""
    shape, how, world = attention_shape(plan), _MACHINE.attention, plan.world_size
    heads, rows = shape.batch * shape.kv_heads, shape.sequence // world
    most = (FLAGS - 1) // (world * heads)  # chunks of a head
    if most == 0:
        raise TooLarge(
            f"ring attention between nodes: {heads} heads of keys of {world} ranks need "
            f"{heads * world} flags, and there are {FLAGS - 1}"
        )
    chunks = rows * 2 * shape.head_dim * DTYPE_BYTES[plan.dtype] // how.far_bytes
    copies = exchange == "hierarchical" or plan.routes.staged
    return {
        "exchange": exchange,
        "far_rows": -(-rows // max(1, min(chunks, most)) // 128) * 128,
        "put_blocks": how.put_blocks,
        "land_blocks": how.land_blocks if copies else 1,
    }


def by_parts(
    plan: CommonPart,
    cores: int,
    constants: MachineConstants | None,
    far: Far = NEAR,
    core_takes: Callable[[AttentionShape, int], bool] = lambda shape, rows: False,
) -> Way:
    """Schedule parts, or pieces if parts would take more memory than allowed; between nodes keys
    always travel whole. ``core_takes``: whether a kernel of the backend's own computes parts of that
    shape, of so many rows of a rank."""
    shape, blocks = attention_shape(plan), cores * _MACHINE.attention.merge_blocks_a_core
    rows = piece_rows(shape, plan.world_size, DTYPE_BYTES[plan.dtype])
    if rows is None or plan.nodes > 1:
        core = core_takes(shape, shape.sequence // plan.world_size)
        library = "mkernel" if core else library_of(shape)
        whole = AttentionSchedule(library=library, merge_blocks=blocks, **far.fields)
        return Way(whole, None if constants is None else predicted(plan, constants, core, far))
    how = AttentionInPiecesSchedule(
        library="cudnn", merge_blocks=blocks, piece_rows=rows, slots=_MACHINE.attention.slots
    )
    times = None if constants is None else predicted_in_pieces(plan, rows, constants)
    return Way(how, times)


def piece_rows(shape: AttentionShape, world: int, element_bytes: int) -> int | None:
    """Return the rows of a piece, a power of two; None: keys and values travel whole. TooLarge.

    Parts take memory for the queries' results on each, and for the peers' keys and values. A row of
    pieces takes memory for three parts' results, for the results so far in float32, and for its
    place in each peer's slots.
    """
    how, rows = _MACHINE.attention, shape.sequence // world
    queries = shape.batch * shape.heads * shape.head_dim * element_bytes
    keys = 2 * shape.batch * shape.kv_heads * shape.head_dim * element_bytes
    if rows * (world * queries + (world - 1) * keys) <= how.whole_bytes or shape.documents:
        return None
    a_row = queries * 3 + queries // element_bytes * 4 + keys * how.slots * (world - 1)
    found = max(_FEWEST_ROWS, 1 << max(1, how.pieces_bytes // a_row).bit_length() - 1)
    while flags(shape, world, found) > FLAGS:
        if found >= rows:
            raise TooLarge(
                f"ring attention on {world} ranks: pieces of whole shards need "
                f"{flags(shape, world, found)} flags, and there are {FLAGS}"
            )
        found *= 2
    return found


class Times(NamedTuple):
    """Times of one rank's call, in microseconds: the work on the own keys, on each peer's, the
    kernel that merges the results, and the copies of one rank's keys and values."""

    own: float
    part: float
    merge: float
    sent: float


def times_of(plan: CommonPart, calls: CallTimes, merged: int) -> Times:
    """Predict the times of the rank that sends most, which is the last one if attention is causal.

    A call on a part takes call_us + flop / rate; the merge takes merge_us + moved bytes / rate.
    ``merged``: the number of tensors like q that it reads and writes.
    """
    shape, how = attention_shape(plan), _MACHINE.of_plan(plan).attention
    rows = shape.sequence // plan.world_size
    queries = shape.batch * shape.heads * rows * shape.head_dim
    tflops = calls.tflops * calls.of_width.get(shape.head_dim, 1)
    flop_us = calls.work * queries * rows / (tflops * 1e6)  # if all queries see all keys
    seen_us = flop_us / 2 if shape.causal else flop_us
    own = (calls.causal_call_us if shape.causal else calls.call_us) + seen_us
    merge = how.merge_us + queries * DTYPE_BYTES[plan.dtype] * merged / (how.merge_gbs * 1e3)
    keys = shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = _MACHINE.of_plan(plan).copies
    sent = (
        copies.choose("put", keys, 0).microseconds
        + copies.choose("put", keys, 0, flagged=True).microseconds
    )
    return Times(own, calls.call_us + seen_us, merge, sent)


def predicted(
    plan: CommonPart, constants: MachineConstants, core: bool = False, far: Far = NEAR
) -> Prediction:
    """Predict the work by parts. Parts arrive one after another, each in two copies followed by a
    flag, and between nodes as links carry them. The call on a part starts when the part has arrived
    and the previous call has ended; the call on the own keys runs where others leave room.
    ``core``: calls use our own kernel."""
    world, how = plan.world_size, _MACHINE.of_plan(plan).attention
    own, part, merge, sent = times_of(plan, how.core if core else how.forward, world + 1)
    last, arrivals = 0.0, far.arrivals(plan, sent)
    for arrival in arrivals:
        last = max(last, arrival) + part
    compute, copies = own + (world - 1) * part, max(arrivals, default=0.0)
    ended = max(compute, last) + merge
    return prediction(compute + merge, copies, ended, constants.launch_us, constants)


def predicted_in_pieces(plan: CommonPart, rows: int, constants: MachineConstants) -> Prediction:
    """Predict the work in pieces: calls and merges one after another, or the copies if these take
    longer."""
    shape, world = attention_shape(plan), plan.world_size
    how = _MACHINE.of_plan(plan).attention
    pieces = Pieces(shape, world, rows, how.slots)
    own, part, _, _ = times_of(plan, how.forward, world + 1)
    steps = sum(1 for _ in pieces.steps(world - 1))
    queries = shape.batch * shape.heads * rows * shape.head_dim
    merge = how.merge_us + queries * (4 + 4 + DTYPE_BYTES[plan.dtype]) / (how.merge_gbs * 1e3)
    calls = 2 * len(pieces.cuts) + steps
    compute = own + (world - 1) * part + calls * how.forward.call_us + steps * merge
    sent = steps * sum(
        _MACHINE.of_plan(plan)
        .copies.choose("put", pieces.bytes(rows), 0, flagged=flagged)
        .microseconds
        for flagged in (False, True)
    )
    return prediction(compute, sent, max(compute, sent), constants.launch_us, constants)


def predicted_backward(
    plan: CommonPart, lots: int, constants: MachineConstants | None
) -> Prediction:
    """Predict the backward, in the same way. A call takes its share of a part, plus call_us for
    each further lot. A lot's gradients travel when its call and the copies before it have ended;
    they are added up when all of the lot has arrived."""
    world, calls = plan.world_size, _MACHINE.of_plan(plan).attention.backward
    own, part, merge, sent = times_of(plan, calls, 2 * world + 2)
    part += (lots - 1) * calls.call_us
    compute, copies = own + (world - 1) * part, (world - 1) * sent
    last, home = 0.0, copies
    for peer in range(1, world):
        last = max(last, peer * sent)
        for _ in range(lots):
            last += part / lots
            home = max(home, last) + sent / lots
    # Blocks of both streams run as they come: the parts end last if the own part came first.
    if world > 1:
        home = max(home, compute + sent / lots)
    ended = max(compute + merge, home + merge / lots)
    launch = _MACHINE.constants if constants is None else constants
    return prediction(compute + merge, 2 * copies, ended, launch.launch_us, launch)


def library_of(shape: AttentionShape) -> AttentionLibrary:
    """Return the library that computes attention: the faster one, unless packed documents need the
    other."""
    return "flash" if shape.documents else "cudnn"


def check_crossing(plan: CommonPart, how: KeysSchedule) -> None:
    """Raise ArgumentError for what a schedule says of other nodes and a call would not follow."""
    far = {"far_rows": how.far_rows, "put_blocks": how.put_blocks, "land_blocks": how.land_blocks}
    for name, value in far.items():
        if (value > 0) != (plan.nodes > 1):
            legal = "0 in one node" if value else "1 or more between nodes"
            raise ArgumentError(f"plan.schedule.{name}", value, legal)
    if how.exchange == "hierarchical" and 1 in (plan.nodes, plan.ranks_per_node):
        raise ArgumentError("plan.schedule.exchange", how.exchange, "direct: there are no relays")


def check_library(plan: CommonPart, library: AttentionLibrary | AttentionCore) -> None:
    """Raise ArgumentError for a schedule's library that a call of the plan would not use."""
    used = library_of(attention_shape(plan))
    if library != used:
        raise ArgumentError("plan.schedule.library", repr(library), repr(used))


def attention_shape(plan: CommonPart) -> AttentionShape:
    """Return the plan's attention shape. TypeError for another op's plan."""
    if not isinstance(plan.shape, AttentionShape):
        raise TypeError(f"a plan of {plan.op} has no attention shape")
    return plan.shape
