"""The schedule of ring attention, and its predicted time.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).

Three ways exist. Calls of cuDNN on parts are the default; from ``core_rows`` rows of a rank on our
own kernel (``kernels/attention/core.hpp``) computes the parts instead. One kernel for the whole call
is taken where its predicted time is shorter, within a node, for heads of 128 and pieces that are
multiples of 128 positions, in worlds of up to ``kernel_ranks``. Where parts would take more than
``whole_bytes`` of memory, the sequence is cut in pieces, within a node. ``MKERNEL_HOPPER_ATTENTION``
asks for parts or for the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from mkernel.backends.accelerators.hopper.attention.pieces import Pieces, flags
from mkernel.backends.accelerators.hopper.machine import CallTimes, machine
from mkernel.backends.accelerators.hopper.schedule import (
    FLAGS,
    AttentionBackwardSchedule,
    AttentionCore,
    AttentionInPiecesSchedule,
    AttentionKernelSchedule,
    AttentionLibrary,
    AttentionSchedule,
)
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.errors import ArgumentError
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, Prediction
from mkernel.plan.ops import forward
from mkernel.plan.predict import prediction
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest, TooLarge
from mkernel.plan.standard import by_rows
from mkernel.settings import load_as
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()
_FEWEST_ROWS = 64  # fewest rows of a piece
KERNEL_ROWS = 128
"""Rows of a step of kernels/attention/ring_attention.hpp."""


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of ring attention, or of its backward. Keys and values travel whole, whatever
    chunk is requested."""
    found, plan = by_rows(request, chunks=1), request.plan
    cores = found.pipeline.compute_blocks
    constants = request.constants if plan.nodes == 1 else None
    if forward(plan.op) == plan.op:
        (how, times), ways = _forward(plan, cores, constants)
        found = found._replace(schedule=how, alternatives=(*found.alternatives, *ways))
        return found if times is None else found._replace(prediction=times)
    most = min(2, attention_shape(plan).kv_heads)
    each = {lots: predicted_backward(plan, lots, constants) for lots in range(1, most + 1)}
    lots = min(each, key=lambda one: each[one].pipelined_us)
    blocks = cores * _MACHINE.attention.merge_blocks_a_core
    backward = AttentionBackwardSchedule(library="cudnn", lots=lots, sum_blocks=blocks)
    found = found._replace(schedule=backward)
    return found if constants is None else found._replace(prediction=each[lots])


AnyAttention = AttentionSchedule | AttentionInPiecesSchedule | AttentionKernelSchedule


class _Way(NamedTuple):
    """One of the ways in which the forward may run."""

    schedule: AnyAttention
    prediction: Prediction | None

    @property
    def time_us(self) -> float | None:
        return None if self.prediction is None else self.prediction.pipelined_us


def _forward(
    plan: CommonPart, cores: int, constants: MachineConstants | None
) -> tuple[_Way, tuple[Alternative, ...]]:
    """Choose one kernel or parts, whichever is predicted to be faster; return the choice and both
    alternatives, if there are two."""
    wished = load_as(HopperSettings).attention
    parts = _by_parts(plan, cores * _MACHINE.attention.merge_blocks_a_core, constants)
    judged = plan.world_size <= _MACHINE.attention.kernel_ranks
    if wished == "parts" or not (judged or wished == "kernel") or not kernel_takes(plan):
        return parts, ()
    how = AttentionKernelSchedule(chunk_rows=_chunk_rows(plan), blocks=cores)
    times = None if constants is None else predicted_kernel(plan, how.chunk_rows, constants)
    kernel = _Way(how, times)
    sooner = (
        kernel.time_us is not None and parts.time_us is not None and kernel.time_us < parts.time_us
    )
    chosen = kernel if wished == "kernel" or sooner else parts
    return chosen, tuple(
        Alternative(
            decision="attention", option=name, predicted_us=way.time_us, chosen=way is chosen
        )
        for name, way in (("parts", parts), ("kernel", kernel))
    )


def _by_parts(plan: CommonPart, blocks: int, constants: MachineConstants | None) -> _Way:
    """Schedule parts, or pieces if parts would take more memory than allowed; between nodes keys
    always travel whole."""
    rows = piece_rows(attention_shape(plan), plan.world_size, DTYPE_BYTES[plan.dtype])
    if rows is None or plan.nodes > 1:
        shape, own_rows = attention_shape(plan), _MACHINE.attention.core_rows
        core = core_takes(shape) and shape.sequence // plan.world_size >= own_rows
        library = "mkernel" if core else library_of(shape)
        whole = AttentionSchedule(library=library, merge_blocks=blocks)
        return _Way(whole, None if constants is None else predicted(plan, constants, core))
    how = AttentionInPiecesSchedule(
        library="cudnn", merge_blocks=blocks, piece_rows=rows, slots=_MACHINE.attention.slots
    )
    times = None if constants is None else predicted_in_pieces(plan, rows, constants)
    return _Way(how, times)


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


class _Times(NamedTuple):
    """Times of one rank's call, in microseconds: the work on the own keys, on each peer's, the
    kernel that merges the results, and the copies of one rank's keys and values."""

    own: float
    part: float
    merge: float
    sent: float


def _times(plan: CommonPart, calls: CallTimes, merged: int) -> _Times:
    """Predict the times of the rank that sends most, which is the last one if attention is causal.

    A call on a part takes call_us + flop / rate; the merge takes merge_us + moved bytes / rate.
    ``merged``: the number of tensors like q that it reads and writes.
    """
    shape, how = attention_shape(plan), _MACHINE.attention
    rows = shape.sequence // plan.world_size
    queries = shape.batch * shape.heads * rows * shape.head_dim
    flop_us = calls.work * queries * rows / (calls.tflops * 1e6)  # if all queries see all keys
    seen_us = flop_us / 2 if shape.causal else flop_us
    own = (calls.causal_call_us if shape.causal else calls.call_us) + seen_us
    merge = how.merge_us + queries * DTYPE_BYTES[plan.dtype] * merged / (how.merge_gbs * 1e3)
    keys = shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = _MACHINE.on_links_of(plan).copies
    sent = (
        copies.choose("put", keys, 0).microseconds
        + copies.choose("put", keys, 0, flagged=True).microseconds
    )
    return _Times(own, calls.call_us + seen_us, merge, sent)


def predicted(plan: CommonPart, constants: MachineConstants, core: bool = False) -> Prediction:
    """Predict the work by parts. Parts arrive one after another, each in two copies followed by a
    flag. The call on a part starts when the part has arrived and the previous call has ended; the
    call on the own keys runs where others leave room. ``core``: calls use our own kernel."""
    world, how = plan.world_size, _MACHINE.attention
    own, part, merge, sent = _times(plan, how.core if core else how.forward, world + 1)
    last = 0.0
    for peer in range(1, world):
        last = max(last, peer * sent) + part
    compute, copies = own + (world - 1) * part, (world - 1) * sent
    ended = max(compute, last) + merge
    return prediction(compute + merge, copies, ended, constants.launch_us, constants)


def predicted_kernel(plan: CommonPart, chunk_rows: int, constants: MachineConstants) -> Prediction:
    """Predict the work by one kernel. Each chunk arrives in two copies followed by a flag; the last
    one is computed when it has arrived, and tiles that reach a chunk too early wait for a share of
    all copies."""
    shape, world = attention_shape(plan), plan.world_size
    own, part, _, _ = _times(plan, _MACHINE.attention.kernel, 0)
    rows = shape.sequence // world
    chunk_rows = min(chunk_rows, rows)
    nbytes = shape.batch * shape.kv_heads * chunk_rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = (
        (world - 1)
        * -(-rows // chunk_rows)
        * sum(
            _MACHINE.on_links_of(plan).copies.choose("put", nbytes, 0, flagged=flagged).microseconds
            for flagged in (False, True)
        )
    )
    part -= _MACHINE.attention.kernel.call_us
    waits = _MACHINE.attention.kernel_waits * copies
    compute = own + (world - 1) * part
    ended = max(compute + waits, copies + part * chunk_rows / rows)
    return prediction(compute, copies, ended, constants.launch_us, constants)


def _chunk_rows(plan: CommonPart) -> int:
    """Return the rows of the smallest chunk that is worth a copy, in whole steps of the kernel."""
    shape = attention_shape(plan)
    a_row = shape.batch * shape.kv_heads * shape.head_dim * DTYPE_BYTES[plan.dtype]
    return -(-_MACHINE.attention.chunk_bytes // (a_row * KERNEL_ROWS)) * KERNEL_ROWS


def predicted_in_pieces(plan: CommonPart, rows: int, constants: MachineConstants) -> Prediction:
    """Predict the work in pieces: calls and merges one after another, or the copies if these take
    longer."""
    shape, how, world = attention_shape(plan), _MACHINE.attention, plan.world_size
    pieces = Pieces(shape, world, rows, how.slots)
    own, part, _, _ = _times(plan, how.forward, world + 1)
    steps = sum(1 for _ in pieces.steps(world - 1))
    queries = shape.batch * shape.heads * rows * shape.head_dim
    merge = how.merge_us + queries * (4 + 4 + DTYPE_BYTES[plan.dtype]) / (how.merge_gbs * 1e3)
    calls = 2 * len(pieces.cuts) + steps
    compute = own + (world - 1) * part + calls * how.forward.call_us + steps * merge
    sent = steps * sum(
        _MACHINE.on_links_of(plan)
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
    world, calls = plan.world_size, _MACHINE.attention.backward
    own, part, merge, sent = _times(plan, calls, 2 * world + 2)
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


def core_takes(shape: AttentionShape) -> bool:
    """Return whether our own kernel supports such attention: heads of 128, no packed documents."""
    return shape.head_dim == 128 and not shape.documents


def kernel_takes(plan: CommonPart) -> bool:
    """Return whether one kernel can compute all parts: heads of 128, no packed documents, several
    ranks of one node, whose pieces of the sequence are whole steps and whose keys fit beside a
    call's tensors."""
    shape, world = attention_shape(plan), plan.world_size
    rows = shape.sequence // world
    keys = 2 * shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    return (
        shape.head_dim == 128
        and not shape.documents
        and plan.nodes == 1 < world
        and rows % (KERNEL_ROWS * (2 if shape.causal else 1)) == 0
        and (world - 1) * keys <= _MACHINE.attention.whole_bytes
    )


def check_library(plan: CommonPart, library: AttentionLibrary | AttentionCore) -> None:
    """Raise ArgumentError for a schedule's library that a call of the plan would not use."""
    shape = attention_shape(plan)
    if library == "mkernel" and core_takes(shape):
        return
    used = library_of(shape)
    if library != used:
        raise ArgumentError("plan.schedule.library", repr(library), repr(used))


def attention_shape(plan: CommonPart) -> AttentionShape:
    """Return the plan's attention shape. TypeError for another op's plan."""
    if not isinstance(plan.shape, AttentionShape):
        raise TypeError(f"a plan of {plan.op} has no attention shape")
    return plan.shape
