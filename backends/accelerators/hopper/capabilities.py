"""Which ops the planner may choose."""

from __future__ import annotations

from importlib import metadata

from mkernel.backends.accelerators.hopper.native import native
from mkernel.errors import BackendUnavailable

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
HIERARCHICAL_OPS = ("all_gather_gemm", "gemm_reduce_scatter")
MOST_RANKS = 16
"""Of a world; as in device/network.cuh."""
_TORCH = (2, 8)
"""The first torch that has products of half-precision inputs in float32 (``aten::mm.dtype_out``)."""


def ops() -> tuple[str, ...]:
    """Names of the ops that this build has kernels of."""
    try:
        native()
    except BackendUnavailable:
        return ()
    return OPS


def library_ops() -> tuple[str, ...]:
    """Names of the ops that also have the library path, with this torch."""
    return ops() if torch_is_fit() else ()


def torch_is_fit() -> bool:
    """Whether the installed torch has what the library path needs. Does not import it."""
    try:
        major, minor, *_ = metadata.version("torch").split(".")
        return (int(major), int(minor)) >= _TORCH
    except (metadata.PackageNotFoundError, ValueError):
        return False
