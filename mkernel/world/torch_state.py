"""The state of torch around a call, and the functions of torch that start one.

Torch's own names of these are private. Where one is missing calls go another way, slower.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

transforms = torch._C._functorch.peek_interpreter_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
tracing = torch._C._is_tracing


def native_functions(device: str) -> dict[str, Any]:
    """Return what native code asks of torch (``backends/runtime/calls/torch_view.cpp``), for calls on
    tensors of a type of device. ``exchange``: None before torch 2.10, where native code can read
    tensors by their attributes alone."""
    return {
        "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None),
        "tensor": Tensor,
        "parameter": Parameter,
        "dtype": torch.dtype,
        "quiet": ((dispatch_modes, 0), (function_modes, 0), (tracing, False), (transforms, None)),
        "forward_ad": forward_ad.__dict__,
        "level": "_current_level",
        "is_grad_enabled": torch.is_grad_enabled,
        "is_neg": Tensor.is_neg,
        "increment_version": increment_version,
        "current_device": _current_device(device),
        "capturing": getattr(torch._C, f"_{device}_isCurrentStreamCapturing", None),
        "raw_stream": getattr(torch._C, f"_{device}_getCurrentRawStream", None),
        "stream": f"{device}_stream",
    }


def allocation(
    shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and arguments that make a row-major tensor without contents on the device of
    ``like``; for calls on the current one, where there are several."""
    kind = like.device.type
    quick, current = _quick_allocation(kind)
    if quick is not None and (
        kind == "cpu" or (current is not None and current() == like.device.index)
    ):
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(size * strides[-1])
        return quick, (tuple(shape), tuple(reversed(strides[: len(shape)])), dtype)
    return partial(torch.empty, dtype=dtype, device=like.device), (shape,)


@cache
def _quick_allocation(kind: str) -> tuple[Any, Any]:
    """Return torch's allocation on a kind of device as its own compiler allocates, past the dispatcher,
    in a quarter of the time of torch.empty; and what returns the current one. None: there is none."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None), _current_device(kind)


def stream_of(device: torch.device) -> tuple[int, bool]:
    """Return the current stream of a device, 0 where it has none, and whether it is captured."""
    stream = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    if stream is None:
        return 0, False
    capturing = getattr(torch._C, f"_{device.type}_isCurrentStreamCapturing", None)
    return stream(device.index), capturing is not None and capturing()


def _current_device(device: str) -> Any:
    return getattr(torch._C, f"_{device}_getDevice", None)
