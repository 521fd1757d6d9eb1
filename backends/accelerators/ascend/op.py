"""The interface of an op of the ascend backend: its memory, its cores, and the kernels of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from mkernel.backends.accelerators.ascend.native import native
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import DtypeError, LayoutError, ShapeError
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend

__all__ = [
    "TORCH_DTYPES",
    "Blocks",
    "Geometry",
    "Matrix",
    "Op",
    "Prepared",
    "dense",
    "matrix",
    "native",
]

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}

Matrix = tuple[int, int, int]
"""Address, row stride, column stride (elements)."""


class Blocks(NamedTuple):
    """Cores of a call: those of the comm kernel, and the cube and vector parts of the compute
    kernel."""

    comm: int
    cube: int
    vector: int = 0


class Geometry(Protocol):
    """The sizes that a plan's kernels share; made by the native module."""

    @property
    def inbox_bytes(self) -> int: ...
    @property
    def outbox_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def words(self) -> int: ...


@dataclass(frozen=True)
class Prepared:
    """The kernels of one call. ``finish`` runs once, when both have ended, and returns what the
    launch's ``results()`` returns; it keeps alive everything else that the kernels use beside the
    call's tensors."""

    kernels: _ascend.Kernels
    finish: Callable[[], Mapping[str, Any]] | None = None


class Op(Protocol):
    """One op, or several similar ones, on simulated cores."""

    def geometry(self, plan: LaunchPlan) -> Geometry:
        """Return the kernels' geometry. ValueError for a plan that the kernels cannot run;
        Unsupported if no kernels could."""

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cores that the plan gives each kernel."""

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels on the call's tensors. Errors name the tensor that does not fit the
        plan."""

    def record(self, plan: LaunchPlan, rank: int) -> Prepared:
        """Build the kernels without tensors: none will be touched, except tables that the kernels
        need, which are kept alive as in a call. ``finish`` is not called."""


def dense(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: str) -> int:
    """Return the address of a contiguous tensor that fits the plan; otherwise raise an error that
    names it."""
    _check(name, tensor, shape, *dtypes)
    if not tensor.is_contiguous():
        raise LayoutError(name, f"strides {tensor.stride()}", "contiguous, as planned")
    return tensor.data_ptr()


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raise an error that names the tensor unless it has the shape and one of the dtypes, and lies
    in host memory."""
    if str(tensor.dtype).removeprefix("torch.") not in dtypes:
        raise DtypeError(name, tensor.dtype, f"{' or '.join(dtypes)}, as planned")
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, tuple(tensor.shape), f"{shape}, as planned")
    if tensor.device.type != "cpu":
        raise LayoutError(name, tensor.device, "a tensor in host memory: the device is simulated")


def matrix(
    call: Call, name: str, shape: tuple[int, int], dtype: str, *, column_major: bool = False
) -> Matrix:
    """Return a matrix argument that fits the plan; otherwise raise an error that names it."""
    tensor = call.tensors[name]
    _check(name, tensor, shape, dtype)
    row, col = tensor.stride()
    # torch leaves the strides of dimensions of size 1 open.
    if column_major:
        row, lead = 1, (col if shape[1] > 1 else shape[0])
        legal = shape[0] == 1 or tensor.stride(0) == 1
    else:
        col, lead = 1, (row if shape[0] > 1 else shape[1])
        legal = shape[1] == 1 or tensor.stride(1) == 1
    shortest = shape[0] if column_major else shape[1]
    if not legal or lead < shortest:
        wanted = "columns" if column_major else "rows"
        raise LayoutError(name, f"strides {tensor.stride()}", f"contiguous {wanted}, as planned")
    return (tensor.data_ptr(), 1, lead) if column_major else (tensor.data_ptr(), lead, 1)
