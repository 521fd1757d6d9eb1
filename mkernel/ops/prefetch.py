"""The tensor that a call brings to a cache while ranks exchange. A hint, which no result depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkernel.errors import DtypeError, LayoutError
from mkernel.ops import validate


def hinted(prefetch: Any) -> Any:
    """Return ``prefetch`` as registered ops take it: of a DTensor, however it is placed, this rank's
    part; without a gradient."""
    if not isinstance(prefetch, Tensor):
        return prefetch
    local = getattr(prefetch, "to_local", None)
    own = prefetch if local is None else local()
    return own.detach() if own.requires_grad and torch.is_grad_enabled() else own


def check_prefetch(prefetch: Any, device: str) -> None:
    """Require a tensor on that device whose elements are packed, in any order of its dimensions.
    DtypeError (where it is no tensor), ArgumentError, LayoutError."""
    if not isinstance(prefetch, Tensor):
        raise DtypeError("prefetch", validate.describe(prefetch), "a torch.Tensor")
    validate.on_device("prefetch", prefetch, device)
    begin, end = validate.span(prefetch)
    if prefetch.numel() and end - begin != prefetch.nbytes:
        raise LayoutError(
            "prefetch",
            validate.describe(prefetch),
            "elements without gaps",
            why="bytes are prefetched from the first to the last element",
        )
