"""Which ops the planner may choose: those that this build has kernels for, and those that torch
adds."""

from __future__ import annotations

from importlib import metadata

from mkernel.backends.accelerators.hopper.native import native
from mkernel.errors import BackendUnavailable

FUNCTIONS = {
    "all_gather_gemm": "all_gather_gemm",
    "gemm_reduce_scatter": "gemm_reduce",
    "gemm_all_reduce": "gemm_reduce",
}
"""For each op, the function of ``_hopper`` that runs it; a build without the function lacks the op."""

LIBRARY_OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
_TORCH = (2, 8)
"""The first torch that has products of half-precision inputs in float32 (``aten::mm.dtype_out``)."""


def ops() -> tuple[str, ...]:
    """Names of the ops that this build has kernels of."""
    try:
        made = native()
    except BackendUnavailable:
        return ()
    return tuple(name for name, function in FUNCTIONS.items() if hasattr(made, function))


def library_ops() -> tuple[str, ...]:
    """Names of the ops that also have the library path, with this torch."""
    return tuple(name for name in ops() if name in LIBRARY_OPS) if torch_is_fit() else ()


def torch_is_fit() -> bool:
    """Whether the installed torch has what the library path needs. Does not import it."""
    try:
        major, minor, *_ = metadata.version("torch").split(".")
        return (int(major), int(minor)) >= _TORCH
    except (metadata.PackageNotFoundError, ValueError):
        return False
