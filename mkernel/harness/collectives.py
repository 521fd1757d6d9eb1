"""torch.distributed's collectives on whole tensors, under the names that this torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed


def _newest(*names: str) -> Callable[..., Any]:
    """torch.distributed's function under the first of its names that this torch knows."""
    found: Callable[..., Any] = next(
        getattr(distributed, name) for name in names if hasattr(distributed, name)
    )
    return found


all_gather = _newest("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")


def collective(op: str, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The op's collective by torch.distributed, into ``out``. ``source`` may be summed in place."""
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
