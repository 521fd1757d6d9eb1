"""How ring attention is scheduled, and what it is predicted to take.

Pure functions of a plan's sizes and of ``machine.json`` (:mod:`.machine`).
"""

from __future__ import annotations

from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.backends.accelerators.hopper.schedule import AttentionSchedule
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, Prediction
from mkernel.plan.predict import prediction
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()


def schedule(request: ScheduleRequest) -> Scheduled:
    """How a plan of ring attention runs. Keys and values travel whole, whatever chunk is wished."""
    found, plan = by_rows(request, chunks=1), request.plan
    blocks = found.pipeline.compute_blocks * _MACHINE.attention.merge_blocks_a_core
    found = found._replace(schedule=AttentionSchedule(library="cudnn", merge_blocks=blocks))
    if request.constants is None or plan.nodes > 1:
        return found
    return found._replace(prediction=predicted(plan, request.constants))


def predicted(plan: CommonPart, constants: MachineConstants) -> Prediction:
    """The rank that sends most, which is the last one where attention is causal.

    A call on a part takes call_us + flop / rate; the merge merge_us + what it moves / rate. Parts come
    one after another, each in two copies with a flag behind; a call starts when the one before has
    ended and its part is there.
    """
    shape, world, how = attention_shape(plan), plan.world_size, _MACHINE.attention
    rows = shape.sequence // world
    queries = shape.batch * shape.heads * rows * shape.head_dim
    flop_us = 4.0 * queries * rows / (how.tflops * 1e6)  # of all queries on all keys of one rank
    own = how.causal_call_us + flop_us / 2 if shape.causal else how.call_us + flop_us
    part = how.call_us + (flop_us / 2 if shape.causal else flop_us)
    moved = queries * DTYPE_BYTES[plan.dtype] * (world + 1)
    merge = how.merge_us + moved / (how.merge_gbs * 1e3)
    keys = shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = _MACHINE.copies
    sent = (
        copies.choose("put", keys, 0).microseconds
        + copies.choose("put", keys, 0, flagged=True).microseconds
    )
    now = own
    for peer in range(1, world):
        now = max(now, peer * sent) + part
    compute = own + (world - 1) * part + merge
    return prediction(compute, (world - 1) * sent, now + merge, constants.launch_us, constants)


def attention_shape(plan: CommonPart) -> AttentionShape:
    """The plan's. TypeError for another op's."""
    if not isinstance(plan.shape, AttentionShape):
        raise TypeError(f"a plan of {plan.op} has no attention shape")
    return plan.shape
