"""The ops and features that the planner may choose. Capabilities do not depend on the build: a
machine without the kernels plans for one that has them, and :meth:`HopperAccelerator.status`
reports what cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata

from mkernel.plan.model import ScaleMode

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
SUMS = ("all_reduce",)
PREFETCHES = ("gemm_all_reduce", "all_reduce")
ATTENTION = ("ring_attention", "ring_attention_backward")
DISPATCHES = ("moe_dispatch", "moe_dispatch_gemm")
MOE = (*DISPATCHES, "moe_combine", "moe_gemm_combine")
INVARIANT = (*SUMS, "moe_dispatch", "moe_combine")
"""Ops that keep the promise of invariant results; library products do not."""
MOST_RANKS = 16
"""The most ranks of a world; as in device/network.cuh."""
_TORCH = (2, 8)
"""The first torch that has products of half-precision inputs in float32 (``aten::mm.dtype_out``);
its calls of cuDNN's attention are the same from then on."""

_SCALED_TORCH = (2, 10)
"""The first torch that takes block scales as cuBLAS reads them (``aten::_scaled_mm_v2``)."""

HOPPER = (9, 0)
"""The compute capability of Hopper, on which alone cuBLAS takes scales by blocks of 128."""
_E4M3 = (8, 9)
"""The first compute capability whose devices multiply e4m3 operands."""
_GROUPED_TORCH = (2, 9)
"""The first torch whose product of groups without rows is zero; before, it hangs."""


NO_SCALED_EXPERTS = (
    "torch has no product of groups with scales by blocks of 128: torch._scaled_grouped_mm takes them "
    "by rows, or of e8m0 by blocks of 32"
)


def experts() -> tuple[str, ...]:
    """Return the names of the MoE ops that run without kernels of products, with this torch."""
    return MOE if torch_is_fit(_GROUPED_TORCH) else tuple(op for op in MOE if "gemm" not in op)


def ops() -> tuple[str, ...]:
    """Return the names of the ops that run with this torch."""
    return (*OPS, *SUMS, *MOE, *ATTENTION) if torch_is_fit() else (*OPS, *SUMS, *MOE)


def one_node_ops() -> tuple[str, ...]:
    """Return the names of the ops that run on one node only."""
    return (*SUMS, *ATTENTION[1:])


def library_ops() -> tuple[str, ...]:
    """Return the names of the ops that also have the library path, with this torch."""
    return tuple(op for op in ops() if op in OPS) if torch_is_fit() else ()


def scale_modes(capability: tuple[int, int] = HOPPER) -> tuple[ScaleMode, ...]:
    """Return the scales of e4m3 operands for which the library path has products, with this torch, on
    devices of that compute capability."""
    if not library_ops() or not torch_is_fit(_SCALED_TORCH) or capability < _E4M3:
        return ()
    return ("tensor", "row", "block") if capability == HOPPER else ("tensor", "row")


def fused_scale_modes() -> tuple[ScaleMode, ...]:
    """Return the scales of e4m3 operands that the kernels take, whatever bits they add with."""
    return tuple(mode for mode in scale_modes() if mode != "block")


def torch_is_fit(least: tuple[int, int] = _TORCH) -> bool:
    """Return whether the installed torch has at least that version, by default the one that the
    library path and attention need. Does not import torch."""
    return _torch(metadata.version) >= least


@cache
def _torch(version_of: Callable[[str], str]) -> tuple[int, int]:
    """Return the installed torch's version; (0, 0) if it has none that can be read. Each plan
    queries it a few times, and reading it takes 2 ms."""
    try:
        major, minor, *_ = version_of("torch").split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return 0, 0
