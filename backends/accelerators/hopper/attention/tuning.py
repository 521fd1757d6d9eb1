"""The schedule of ring attention where kernels with wgmma take part, and its predicted time.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`..cuda.machine`).

Besides the ways of ``cuda`` there are two. From ``core_rows`` rows of a rank on our own kernel
(``kernels/attention/core.hpp``) computes the parts. One kernel for the whole call is taken where its
predicted time is shorter, for pieces that are multiples of 128 positions.
``MKERNEL_HOPPER_ATTENTION`` asks for parts or for the kernel. Invariant results always take the one
kernel.
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.attention import tuning
from mkernel.backends.accelerators.cuda.attention.tuning import Far, Way, attention_shape, times_of
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.hopper.schedule import AttentionKernelSchedule
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.errors import Unsupported
from mkernel.plan.model import DTYPE_BYTES, AttentionShape, CommonPart, Prediction
from mkernel.plan.predict import prediction
from mkernel.plan.request import Alternative, Scheduled, ScheduleRequest
from mkernel.settings import load_as
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()
KERNEL_ROWS = 128
"""Rows of a step of kernels/attention/ring_attention.hpp."""


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of ring attention, or of its backward."""
    return tuning.schedule(request, _forward)


def _forward(
    plan: CommonPart, cores: int, constants: MachineConstants | None, far: Far
) -> tuple[Way, tuple[Alternative, ...]]:
    """Choose one kernel or parts, whichever is predicted to be faster; return the choice and both
    alternatives, if there are two."""
    wished = load_as(HopperSettings).attention
    if plan.invariant is not None:
        return _ordered(plan, cores, constants, far), ()
    parts = tuning.by_parts(plan, cores, constants, far, _core_takes)
    if wished == "parts" or not kernel_takes(plan):
        return parts, ()
    kernel = _by_kernel(plan, cores, constants, far)
    sooner = (
        kernel.time_us is not None and parts.time_us is not None and kernel.time_us < parts.time_us
    )
    chosen = kernel if wished == "kernel" or sooner else parts
    judged = plan.nodes == 1 and plan.world_size <= _MACHINE.attention.kernel_ranks
    return chosen, tuple(
        Alternative(
            decision="attention",
            option=name,
            predicted_us=way.time_us,
            chosen=way is chosen,
            why="" if judged or way is parts else "the kernel was never judged in such a world",
        )
        for name, way in (("parts", parts), ("kernel", kernel))
    )


def _by_kernel(plan: CommonPart, cores: int, constants: MachineConstants | None, far: Far) -> Way:
    chunk_rows = far.fields.get("far_rows") or _chunk_rows(plan)
    how = AttentionKernelSchedule(chunk_rows=chunk_rows, blocks=cores, **far.fields)
    times = None if constants is None else predicted_kernel(plan, how.chunk_rows, constants, far)
    return Way(how, times)


def _ordered(plan: CommonPart, cores: int, constants: MachineConstants | None, far: Far) -> Way:
    """Schedule invariant results, which the one kernel alone has. Unsupported."""
    if kernel_takes(plan) and load_as(HopperSettings).attention != "parts":
        return _by_kernel(plan, cores, constants, far)
    shape, world = attention_shape(plan), plan.world_size
    raise Unsupported(
        "ring attention with invariant results on 'hopper' takes heads of 64 or 128 elements, no "
        f"packed documents, on several ranks pieces of whole {KERNEL_ROWS} positions, of which a "
        f"causal call has two a rank, and {_MACHINE.attention.whole_bytes} bytes of other ranks' "
        f"keys; here head_dim = {shape.head_dim}, documents = {shape.documents}, sequence = "
        f"{shape.sequence}, causal = {shape.causal} on {world} ranks, MKERNEL_HOPPER_ATTENTION = "
        f"{load_as(HopperSettings).attention!r}; pass invariant=False, or other sizes"
    )


def predicted_kernel(
    plan: CommonPart, chunk_rows: int, constants: MachineConstants, far: Far = tuning.NEAR
) -> Prediction:
    """Predict the work by one kernel. Each chunk arrives in two copies followed by a flag; the last
    one is computed when it has arrived, and tiles that reach a chunk too early wait for a share of
    all copies. Between nodes keys arrive head by head: the first head's are waited for, and other
    nodes' keys of the last head are computed when they have arrived."""
    shape, world = attention_shape(plan), plan.world_size
    machine = _MACHINE.of_plan(plan)
    own, part, _, _ = times_of(plan, machine.attention.kernel, 0)
    rows = shape.sequence // world
    chunk_rows = min(chunk_rows, rows)
    nbytes = shape.batch * shape.kv_heads * chunk_rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    copies = (
        (world - 1)
        * -(-rows // chunk_rows)
        * sum(
            machine.copies.choose("put", nbytes, 0, flagged=flagged).microseconds
            for flagged in (False, True)
        )
    )
    part -= machine.attention.kernel.call_us
    compute = own + (world - 1) * part
    if plan.nodes > 1:
        head = 1 / (shape.batch * shape.kv_heads)
        last = (world - plan.ranks_per_node) * part * head
        ended = max(compute + far.wire_us * head, far.wire_us + last)
        return prediction(compute, far.wire_us, ended, constants.launch_us, constants)
    waits = machine.attention.kernel_waits * copies
    ended = max(compute + waits, copies + part * chunk_rows / rows)
    return prediction(compute, copies, ended, constants.launch_us, constants)


def _chunk_rows(plan: CommonPart) -> int:
    """Return the rows of the smallest chunk that is worth a copy, in whole steps of the kernel."""
    shape = attention_shape(plan)
    a_row = shape.batch * shape.kv_heads * shape.head_dim * DTYPE_BYTES[plan.dtype]
    return -(-_MACHINE.attention.chunk_bytes // (a_row * KERNEL_ROWS)) * KERNEL_ROWS


def core_takes(shape: AttentionShape) -> bool:
    """Return whether our own kernel for parts supports such attention: heads of 128, no packed
    documents. For heads of 64 the library is the faster one (``of_width`` of its times)."""
    return shape.head_dim == 128 and not shape.documents


def kernel_takes(plan: CommonPart) -> bool:
    """Return whether one kernel can compute all parts: heads of 64 or 128, no packed documents,
    several ranks, whose pieces of the sequence are whole steps and whose keys fit beside a call's
    tensors; invariant results of one rank, too."""
    shape, world = attention_shape(plan), plan.world_size
    rows = shape.sequence // world
    whole = rows % (KERNEL_ROWS * (2 if shape.causal else 1)) == 0
    keys = 2 * shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES[plan.dtype]
    return (
        shape.head_dim in (64, 128)
        and not shape.documents
        and (whole if world > 1 else plan.invariant is not None)
        and (world - 1) * keys <= _MACHINE.attention.whole_bytes
    )


def _core_takes(shape: AttentionShape, rows: int) -> bool:
    """Return whether our own kernel is the faster one, too."""
    return core_takes(shape) and rows >= _MACHINE.attention.core_rows
