"""The bytes that kernels bring to L2 while ranks exchange (``kernels/prefetch.hpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import DTYPE_BYTES, GemmShape, SumShape

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


def prefetched_bytes(call: Call) -> int:
    """Return the bytes of ``prefetch`` that a call prefetches, the first ones; 0 where it has none, or
    where one rank exchanges nothing."""
    given, plan = call.tensors.get("prefetch"), call.plan
    if given is None or plan.world_size == 1:
        return 0
    shape = plan.shape
    assert isinstance(shape, GemmShape | SumShape)
    sent = shape.m * shape.n * DTYPE_BYTES[plan.out_dtype]
    return min(given.nbytes, machine().prefetch.nbytes(sent))


def prefetch_of(call: Call) -> dict[str, _kernels.Prefetch]:
    """Return the argument by which native code prefetches ``prefetch``; empty where a call has none."""
    nbytes = prefetched_bytes(call)
    if nbytes == 0:
        return {}
    return {"prefetch": native().Prefetch(call.tensors["prefetch"].data_ptr(), nbytes)}
