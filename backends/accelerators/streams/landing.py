"""The landings of a plan: places in a rank's window that its peers write to, the same on every
rank."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from mkernel.plan.arguments import scale_sizes
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName

_ALIGNMENT = 256
_GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


_Wanted = dict[str, tuple[int, int, DtypeName]]
"""Rows and columns from each source, and their dtype, by name."""


class Landing(NamedTuple):
    """A place that peers write to: ``offset`` in bytes in the window, ``shape`` [source, rows,
    columns]."""

    offset: int
    shape: tuple[int, int, int]
    dtype: DtypeName

    @property
    def nbytes(self) -> int:
        """The size of the landing in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def landings(plan: CommonPart) -> dict[str, Landing]:
    """Return a plan's landings by name. MoE has none because its messages vary in size, attention
    because it passes on what it receives."""
    wanted = _of_sum(plan) if plan.op == "all_reduce" else _of_gemm(plan)
    found, end = {}, 0
    for name, (height, columns, dtype) in wanted.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        found[name] = Landing(offset, (plan.world_size, height, columns), dtype)
        end = offset + found[name].nbytes
    return found


def _of_sum(plan: CommonPart) -> _Wanted:
    rows, columns = -(-plan.summed.m // plan.world_size), plan.summed.n
    return {"slots": (rows, columns, plan.dtype), "results": (rows, columns, plan.out_dtype)}


def _of_gemm(plan: CommonPart) -> _Wanted:
    if plan.op not in _GEMMS:
        return {}
    gemm = plan.gemm
    rows = -(-gemm.m // plan.world_size)
    wanted: _Wanted = {}
    if plan.op == "all_gather_gemm":
        wanted["gathered"] = (rows, gemm.k, plan.dtype)
        if plan.scales is not None:
            of_a = scale_sizes(plan.scales.mode, rows, gemm.n, gemm.k)[0]
            wanted["scales"] = (*of_a, "float32")
    else:
        wanted["slots"] = (rows, gemm.n, plan.sums)
    if plan.op == "gemm_all_reduce":
        wanted["results"] = (rows, gemm.n, plan.out_dtype)
    return wanted


def landing_bytes(plan: CommonPart) -> int:
    """Return the bytes of a window with all of a plan's landings; 0 if its messages are no puts."""
    if plan.world_size == 1 or any(route.kind != "p2p" for route in plan.routes.classes):
        return 0
    return max((each.offset + each.nbytes for each in landings(plan).values()), default=0)
