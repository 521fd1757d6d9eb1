"""How much mail the ranks of a call send (``device/mailbox.cuh``), and how much a call may have.

Pure functions of a plan's sizes.
"""

from __future__ import annotations

from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName
from mkernel.plan.scales import scale_sizes

MAIL_BYTES = 16 << 20
"""Of one call; as in device/workspace.cuh."""
_SLOT_BYTES = 128
"""What a rank sends is rounded up to so many; as in kernels/{sum_rows,mail_collectives}.cu."""
_PLACE_BYTES = 16
"""Of gathered bits, beside which goes one more byte; as in kernels/mail_collectives.cu."""


def of_sums(nbytes: int, world: int) -> int:
    """Bytes where each rank sends so many to each peer, to be added up."""
    return world * -(-nbytes // _SLOT_BYTES) * _SLOT_BYTES


def of_plan(plan: CommonPart, product: DtypeName) -> int:
    """Bytes of a GEMM op's one collective. ``product``: the dtype in which partial results travel."""
    shape, world = plan.gemm, plan.world_size
    if plan.op == "all_gather_gemm":
        rows = shape.m // world
        places = -(-rows * shape.k * DTYPE_BYTES[plan.dtype] // _PLACE_BYTES)
        if plan.scales is not None:  # they go beside their rows
            height, width = scale_sizes(plan.scales.mode, rows, shape.n, shape.k)[0]
            places += -(-height * width * DTYPE_BYTES["float32"] // _PLACE_BYTES)
        return of_sums(places * (_PLACE_BYTES + 1), world)
    nbytes = shape.m * shape.n * DTYPE_BYTES[product]
    return of_sums(nbytes if plan.op == "gemm_all_reduce" else nbytes // world, world)


def fits(plan: CommonPart, product: DtypeName) -> bool:
    """Whether a call may have as much as :func:`of_plan` says."""
    return of_plan(plan, product) <= MAIL_BYTES
