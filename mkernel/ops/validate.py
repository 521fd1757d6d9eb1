"""Argument checks that several ops share. A failure names the argument, value, legal range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import DtypeName

_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
DTYPES: dict[DtypeName, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}


def describe(tensor: object) -> str:
    """Describe what should be a tensor in an error message."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"Tensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, strides={tensor.stride()})"


def matrix(name: str, value: object) -> torch.Tensor:
    """Require a 2-D tensor without empty dimensions. DtypeError (where it is no tensor), ShapeError."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(name, describe(value), "a torch.Tensor")
    if value.dim() != 2:
        raise ShapeError(name, describe(value), "a matrix (2 dimensions)", why=f"{value.dim()}-D")
    if 0 in value.shape:
        raise ShapeError(name, describe(value), "at least 1 row and 1 column", why="empty")
    return value


def activation(name: str, value: object) -> torch.Tensor:
    """Require a tensor [.., K] of at least two dimensions, none of them empty. DtypeError,
    ShapeError."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(name, describe(value), "a torch.Tensor")
    if value.dim() < 2:
        raise ShapeError(name, describe(value), "2 dimensions or more", why=f"{value.dim()}-D")
    if 0 in value.shape:
        raise ShapeError(name, describe(value), "at least 1 row and 1 column", why="empty")
    return value


def dimension(name: str, value: object, tensor: torch.Tensor) -> int:
    """Require a dimension of an activation [.., K] but its last, and return it counted from the first.
    ArgumentError."""
    most = tensor.dim() - 2
    if isinstance(value, int) and not isinstance(value, bool):
        found = value + tensor.dim() if value < 0 else value
        if 0 <= found <= most:
            return found
    raise ArgumentError(
        name, repr(value), f"0 to {most}: a dimension of a {tuple(tensor.shape)}, but not its last"
    )


def vector(
    name: str,
    value: object,
    size: int,
    dtype: torch.dtype,
    *,
    matrix: str = "b",
    like: str = "a",
) -> torch.Tensor:
    """Require one element for each column of ``matrix``, in the dtype of ``like``. DtypeError,
    ShapeError."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(name, describe(value), "a torch.Tensor")
    if tuple(value.shape) != (size,):
        raise ShapeError(name, describe(value), f"[{size}], one element a column of {matrix}")
    if value.dtype != dtype:
        raise DtypeError(f"{name}.dtype", value.dtype, f"{dtype}, the dtype of {like}")
    return value


def dtype_name(name: str, dtype: torch.dtype, legal: tuple[DtypeName, ...]) -> DtypeName:
    """Require a dtype that the backend takes, and return its name in plans. DtypeError."""
    found = _NAMES.get(dtype)
    if found is None or found not in legal:
        raise DtypeError(name, dtype, "one of " + ", ".join(legal))
    return found


def same_dtype(name: str, tensor: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """Require the same dtype of two arguments. DtypeError."""
    if tensor.dtype != like.dtype:
        why = "dtypes must not mix"
        raise DtypeError(name, tensor.dtype, f"{like.dtype}, the dtype of {other}", why=why)


def same_columns(name: str, b: torch.Tensor, like: torch.Tensor) -> None:
    """Require that two matrices can follow the same one in a product. ShapeError."""
    if len(b) != len(like):
        raise ShapeError(name, describe(b), f"[K, N] with K = {len(like)}, as the other b")


def on_device(name: str, tensor: torch.Tensor, device: str) -> None:
    """Require a tensor in the memory that the accelerator reads. ArgumentError."""
    if tensor.device.type != device:
        raise ArgumentError(
            f"{name}.device", tensor.device, device, why="the accelerator reads this memory only"
        )


def contiguous(name: str, tensor: torch.Tensor) -> None:
    """Require elements that are packed in order. LayoutError."""
    if not tensor.is_contiguous():
        raise LayoutError(name, describe(tensor), "contiguous", why="call .contiguous()")


def row_major(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Require a matrix whose rows are contiguous and packed. LayoutError."""
    if not tensor.is_contiguous():
        raise LayoutError(
            name, describe(tensor), "a contiguous row-major matrix", why="call .contiguous()"
        )
    return tensor


def expert_layout(
    name: str, tensor: torch.Tensor, capabilities: AcceleratorCapabilities
) -> Literal["row", "column"]:
    """Return ``row`` for packed matrices [experts, K, N], ``column`` for the transposes of packed ones.
    LayoutError: they are neither, or the backend does not read them."""
    found: Literal["row", "column"] = "row" if tensor.is_contiguous() else "column"
    if found == "column" and not tensor.transpose(1, 2).is_contiguous():
        raise LayoutError(name, describe(tensor), "contiguous [E/W, H, I] or [E/W, I, H]")
    if found not in capabilities.b_layouts:
        raise LayoutError(name, describe(tensor), "contiguous", why="call .contiguous()")
    return found


def output(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, dim: int = 0
) -> torch.Tensor:
    """Require a caller's output tensor: contiguous, or with ``dim`` outermost in memory. ShapeError,
    DtypeError, LayoutError."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, describe(tensor), f"shape {shape}")
    if tensor.dtype != dtype:
        raise DtypeError(name, tensor.dtype, str(dtype))
    return tensor if dim and tensor.movedim(dim, 0).is_contiguous() else row_major(name, tensor)


def apart(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Require outputs that share no memory with an input or with another output: parts of them are
    written while others are still read. What is no tensor is passed over. ArgumentError."""
    spans = {name: span(each) for name, each in read.items() if isinstance(each, torch.Tensor)}
    for name, output in written.items():
        if not isinstance(output, torch.Tensor):
            continue
        begin, end = span(output)
        for other, (first, last) in spans.items():
            if begin < last and first < end:
                raise ArgumentError(
                    name,
                    describe(output),
                    f"a tensor that shares no memory with {other}",
                    why="a call writes to it while inputs are still read",
                )
        spans[name] = (begin, end)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first element and of the end of its last."""
    begin, last = tensor.data_ptr(), 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return begin, begin + (last + 1) * tensor.element_size()
