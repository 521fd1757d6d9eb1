"""How ring attention is scheduled, and what it is predicted to take.

Pure functions of a plan's sizes and of ``machine.json`` (:mod:`.machine`).
"""

from __future__ import annotations

from typing import NamedTuple

from mkernel.backends.accelerators.hopper.machine import CallTimes, machine
from mkernel.backends.accelerators.hopper.schedule import (
    AttentionBackwardSchedule,
    AttentionSchedule,
)
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, Prediction
from mkernel.plan.ops import forward
from mkernel.plan.predict import prediction
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()


def schedule(request: ScheduleRequest) -> Scheduled:
    """How a plan of ring attention, or of its backward, runs. Keys and values travel whole, whatever
    chunk is wished."""
    found, plan = by_rows(request, chunks=1), request.plan
    blocks = found.pipeline.compute_blocks * _MACHINE.attention.merge_blocks_a_core
    constants = request.constants if plan.nodes == 1 else None
    if forward(plan.op) == plan.op:
        found = found._replace(schedule=AttentionSchedule(library="cudnn", merge_blocks=blocks))
        return found if constants is None else found._replace(prediction=predicted(plan, constants))
    heads = attention_shape(plan).kv_heads
    ways = {ahead: predicted_backward(plan, ahead, constants) for ahead in {heads, -(-heads // 2)}}
    ahead = min(ways, key=lambda one: (ways[one].pipelined_us, -one))
    how = AttentionBackwardSchedule(library="cudnn", heads_ahead=ahead, sum_blocks=blocks)
    found = found._replace(schedule=how)
    return found if constants is None else found._replace(prediction=ways[ahead])


class _Times(NamedTuple):
    """Of one rank's call, in microseconds: on the own keys, on each peer's, the kernel that makes one
    result of them, and the copies of one rank's keys and values."""

    own: float
    part: float
    merge: float
    sent: float


def _times(plan: CommonPart, calls: CallTimes, merged: int) -> _Times:
    """The rank that sends most, which is the last one where attention is causal.

    A call on a part takes call_us + flop / rate; the merge merge_us + what it moves / rate. ``merged``:
    tensors like q that it reads and writes.
    """
    shape, how = attention_shape(plan), _MACHINE.attention
    rows = shape.sequence // plan.world_size
    queries = shape.batch * shape.heads * rows * shape.head_dim
    flop_us = calls.work * queries * rows / (calls.tflops * 1e6)  # if all queries see all keys
    seen_us = flop_us / 2 if shape.causal else flop_us
    own = (calls.causal_call_us if shape.causal else calls.call_us) + seen_us
    merge = how.merge_us + queries * DTYPE_BYTES[plan.dtype] * merged / (how.merge_gbs * 1e3)
    keys = shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = _MACHINE.copies
    sent = (
        copies.choose("put", keys, 0).microseconds
        + copies.choose("put", keys, 0, flagged=True).microseconds
    )
    return _Times(own, calls.call_us + seen_us, merge, sent)


def predicted(plan: CommonPart, constants: MachineConstants) -> Prediction:
    """Parts come one after another, each in two copies with a flag behind; a call starts when the one
    before has ended and its part is there."""
    world = plan.world_size
    own, part, merge, sent = _times(plan, _MACHINE.attention.forward, world + 1)
    now = own
    for peer in range(1, world):
        now = max(now, peer * sent) + part
    compute = own + (world - 1) * part + merge
    return prediction(compute, (world - 1) * sent, now + merge, constants.launch_us, constants)


def predicted_backward(
    plan: CommonPart, heads_ahead: int, constants: MachineConstants | None
) -> Prediction:
    """The same; gradients of a part travel when its call has ended and the copies before have, and sums
    begin when the last ones are home. A call on some heads of the own keys takes its share, and
    call_us more than that where there is another one."""
    world, heads = plan.world_size, attention_shape(plan).kv_heads
    calls = _MACHINE.attention.backward
    own, part, merge, sent = _times(plan, calls, 2 * world + 2)
    behind = own * (heads - heads_ahead) / heads + (calls.call_us if heads_ahead < heads else 0.0)
    now = own * heads_ahead / heads
    copied = (world - 1) * sent
    for peer in range(1, world):
        now = max(now, peer * sent) + part
        copied = max(copied, now) + sent
    now = max(now + behind, copied if world > 1 else 0.0)
    compute = own + (world - 1) * part + merge
    launch = _MACHINE.constants if constants is None else constants
    return prediction(compute, 2 * (world - 1) * sent, now + merge, launch.launch_us, launch)


def attention_shape(plan: CommonPart) -> AttentionShape:
    """The plan's. TypeError for another op's."""
    if not isinstance(plan.shape, AttentionShape):
        raise TypeError(f"a plan of {plan.op} has no attention shape")
    return plan.shape
