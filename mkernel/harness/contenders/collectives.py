"""torch.distributed's collectives on whole tensors, under the names that this torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional


def _newest(module: Any, *names: str) -> Callable[..., Any]:
    """Return a module's function under the first of its names that this torch knows."""
    found: Callable[..., Any] = next(
        getattr(module, name) for name in names if hasattr(module, name)
    )
    return found


all_gather = _newest(distributed, "all_gather_single", "all_gather_into_tensor")
reduce_scatter = _newest(distributed, "reduce_scatter_single", "reduce_scatter_tensor")

# In compiled programs, with derivatives.
traced_all_gather = _newest(functional, "all_gather_single_autograd", "all_gather_tensor_autograd")
traced_reduce_scatter = _newest(
    functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"
)


def collective(op: str, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Call the op's collective of torch.distributed, into ``out``. ``source`` may be summed in
    place."""
    if source.dtype == torch.float8_e4m3fn:  # of which not all libraries know
        collective(op, source.view(torch.uint8), out.view(torch.uint8))
        return out
    if op == "all_gather_gemm":
        all_gather(out, source)
    elif op == "gemm_reduce_scatter":
        reduce_scatter(out, source)
    else:
        distributed.all_reduce(source)
        return source
    return out
