"""Bytes of Lamport exchanges ("mail", ``device/mailbox.cuh``): those that the ranks of a call send,
and the most that a call may send.

A word of a rank's mail area that is zero has not arrived yet; senders write +0 as -0, so neither
fence nor flag follows the data. All functions are pure: they read a plan's sizes alone.
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.schedule import MOST_NORMED_COLUMNS, Way
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName, GemmShape, SumShape

MAIL_BYTES = 16 << 20
"""Bytes that one call may send; as in device/workspace.cuh."""
_SLOT_BYTES = 128
"""A rank's data is rounded up to a multiple of this; as in kernels/collectives/{sum_rows,mail}.cu."""
_PLACE_BYTES = 16
"""Bytes of gathered data with each of which one more byte travels; as in
kernels/collectives/mail.cu."""
_OWNED = 8
"""The elements of an all-reduce's owner are a multiple of this; as in
kernels/collectives/collectives.cu."""


def of_sums(nbytes: int, world: int) -> int:
    """Return the bytes sent if each rank sends ``nbytes`` to each peer, to be added."""
    return world * _slot(nbytes)


def of_two_exchanges(
    elements: int, world: int, product: DtypeName, result: DtypeName, whole: int = _OWNED
) -> int:
    """Return the bytes of an all-reduce whose owners add up their parts and send their sums to all
    peers. ``whole``: elements that one of them owns together, as a row that it normalises."""
    owned = -(-elements // (world * whole)) * whole
    each = sum(_slot(owned * DTYPE_BYTES[dtype]) for dtype in (product, result))
    return (world - 1) * each


def _slot(nbytes: int) -> int:
    return -(-nbytes // _SLOT_BYTES) * _SLOT_BYTES


def keeps_rows(shape: GemmShape | SumShape, world: int, way: Way) -> bool:
    """Return whether the kernel that takes the rows of a sum by mail can normalise them: a block
    keeps a row, and owners in two exchanges have whole ones."""
    sent = of_two_exchanges(shape.m * shape.n, world, "bfloat16", "bfloat16", whole=shape.n)
    return shape.n <= MOST_NORMED_COLUMNS and (way == "one_shot" or sent <= MAIL_BYTES)


def of_plan(plan: CommonPart, product: DtypeName, way: Way | None) -> int:
    """Return the bytes of a GEMM op's one collective. ``product``: the dtype in which partial
    results travel. ``way``: the way of an all-reduce."""
    shape, world = plan.gemm, plan.world_size
    if plan.op == "all_gather_gemm":
        rows = shape.m // world
        places = -(-rows * shape.k * DTYPE_BYTES[plan.dtype] // _PLACE_BYTES)
        if plan.scales is not None:  # they go beside their rows
            height, width = scale_sizes(plan.scales.mode, rows, shape.n, shape.k)[0]
            places += -(-height * width * DTYPE_BYTES["float32"] // _PLACE_BYTES)
        return of_sums(places * (_PLACE_BYTES + 1), world)
    if way == "two_shot":
        return of_two_exchanges(shape.m * shape.n, world, product, plan.out_dtype)
    nbytes = shape.m * shape.n * DTYPE_BYTES[product]
    return of_sums(nbytes if plan.op == "gemm_all_reduce" else nbytes // world, world)


def fits(plan: CommonPart, product: DtypeName, way: Way | None) -> bool:
    """Return whether a call may send the bytes that :func:`of_plan` returns."""
    return of_plan(plan, product, way) <= MAIL_BYTES
