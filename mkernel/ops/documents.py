"""Checks of documents that are packed into one sequence of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.errors import DtypeError, ShapeError, Unsupported
from mkernel.ops import validate
from mkernel.plan.documents import checked_boundaries
from mkernel.world.engine import Engine


def checked(cu_seqlens: object, sequence: int, device: str) -> Tensor:
    """Check the boundaries of a call's documents, and return them contiguous. Values that lie on a
    device are not looked at, since the host would have to wait for it.

    Raises:
        ShapeError, DtypeError, ArgumentError: what is wrong with ``cu_seqlens``.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise DtypeError("cu_seqlens", validate.describe(cu_seqlens), "a torch.Tensor of int32")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ShapeError("cu_seqlens", validate.describe(cu_seqlens), "[N + 1], for N documents")
    if cu_seqlens.dtype != torch.int32:
        raise DtypeError("cu_seqlens.dtype", cu_seqlens.dtype, "torch.int32")
    if cu_seqlens.device.type == "cpu":
        checked_boundaries(cu_seqlens.tolist(), sequence)
    else:
        validate.on_device("cu_seqlens", cu_seqlens, device)
    return cu_seqlens.contiguous()


def require(engine: Engine, op: str) -> None:
    """Raise Unsupported where what runs the op takes no packed documents."""
    if op not in engine.claims.documents:
        raise Unsupported(
            f"accelerator {engine.backends.accelerator!r} takes no packed documents (cu_seqlens) in "
            f"{op}; name one beside it whose capabilities have documents, or call attention for each "
            "document"
        )
