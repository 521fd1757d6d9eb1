"""The custom ops ``torch.ops.vllm_mkernel``, which name a group as vLLM's own collectives do.

They are functional, like vLLM's collectives: what the compiler keeps of them, and in which order, is
the same on all ranks because vLLM compiles the same program on all of them. A call that the group's
mkernel world does not take (:data:`NOT_TAKEN`, raised on every rank before anything is sent) is made
by vLLM.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import vllm.ir.ops
from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger

import mkernel
from mkernel.errors import DtypeError, LayoutError, ShapeError, Unsupported

logger = init_logger("vllm.mkernel")

NOT_TAKEN = (Unsupported, ShapeError, DtypeError, LayoutError)

_groups: weakref.WeakValueDictionary[str, GroupCoordinator] = weakref.WeakValueDictionary()
_told: set[Any] = set()


def warn_once(cause: Any, message: str, *values: Any) -> None:
    """Warn, unless this process has warned of the cause before."""
    if cause not in _told:
        _told.add(cause)
        logger.warning(message, *values)


def join(group: GroupCoordinator) -> str:
    """Make mkernel's world of a group of vLLM's, unless there is one. Collective among its ranks.

    Returns:
        The name by which the ops know the group, which is vLLM's.

    Raises:
        The errors of :func:`mkernel.init`.
    """
    if not mkernel.is_initialized(group.device_group):
        mkernel.init(group.device_group)
    _groups[group.unique_name] = group
    return str(group.unique_name)


def knows(name: str) -> bool:
    """Return whether :func:`join` has made a world of the group with this name."""
    return name in _groups


def _either(
    name: str,
    group: str,
    fused: Callable[[Any], Any],
    plain: Callable[[GroupCoordinator], Any],
) -> Any:
    """Make a call by mkernel, or by vLLM where mkernel does not take it, with one warning a cause."""
    coordinator = _groups[group]
    try:
        return fused(coordinator.device_group)
    except NOT_TAKEN as error:
        cause = name, type(error)
        warn_once(cause, "mkernel does not take a call of %s, vLLM makes it: %s", name, error)
        return plain(coordinator)


def _product(x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, b.t(), bias)


def _gemm_all_reduce(x: Tensor, b: Tensor, bias: Tensor | None, group: str) -> Tensor:
    def plain(coordinator: GroupCoordinator) -> Tensor:
        total = coordinator.all_reduce(_product(x, b, None))
        return total if bias is None else total + bias

    return _either(
        "gemm_all_reduce",
        group,
        lambda world: mkernel.gemm_all_reduce(x, b, bias=bias, group=world),
        plain,
    )


def _gemm_all_reduce_norm(
    x: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    def fused(world: Any) -> tuple[Tensor, Tensor]:
        return mkernel.gemm_all_reduce(
            x,
            b,
            bias=bias,
            residual=residual.contiguous(),
            norm_weight=weight,
            eps=eps,
            group=world,
        )

    def plain(_: GroupCoordinator) -> tuple[Tensor, Tensor]:
        total = _gemm_all_reduce(x, b, bias, group)
        return vllm.ir.ops.fused_add_rms_norm(total, residual, weight, eps)

    return _either("gemm_all_reduce_norm", group, fused, plain)


def _all_gather_gemm(x: Tensor, b: Tensor, bias: Tensor | None, ranks: int, group: str) -> Tensor:
    return _either(
        "all_gather_gemm",
        group,
        lambda world: mkernel.all_gather_gemm(x, b, bias=bias, group=world),
        lambda coordinator: _product(coordinator.all_gather(x, 0), b, bias),
    )


def _gemm_reduce_scatter(x: Tensor, b: Tensor, ranks: int, group: str) -> Tensor:
    return _either(
        "gemm_reduce_scatter",
        group,
        lambda world: mkernel.gemm_reduce_scatter(x, b, group=world),
        lambda coordinator: coordinator.reduce_scatter(_product(x, b, None), 0),
    )


_LIBRARY = torch.library.Library("vllm_mkernel", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vllm_mkernel::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.vllm_mkernel, name).default


GEMM_ALL_REDUCE = _define(
    "gemm_all_reduce(Tensor x, Tensor b, Tensor? bias, str group) -> Tensor",
    _gemm_all_reduce,
    lambda x, b, bias, group: x.new_empty(*x.shape[:-1], b.shape[1]),
)
"""x [..., K_r], b [K_r, N], bias [N]: the sum over ranks of x @ b, + bias, on every rank [..., N]."""

GEMM_ALL_REDUCE_NORM = _define(
    "gemm_all_reduce_norm(Tensor x, Tensor b, Tensor? bias, Tensor residual, Tensor weight, float eps, "
    "str group) -> (Tensor, Tensor)",
    _gemm_all_reduce_norm,
    lambda x, b, bias, residual, weight, eps, group: (
        x.new_empty(residual.shape),
        x.new_empty(residual.shape),
    ),
)
"""The same, + residual [..., N]: the rows' RMSNorm times ``weight`` [N], and the new residual."""

ALL_GATHER_GEMM = _define(
    "all_gather_gemm(Tensor x, Tensor b, Tensor? bias, int ranks, str group) -> Tensor",
    _all_gather_gemm,
    lambda x, b, bias, ranks, group: x.new_empty(x.shape[0] * ranks, b.shape[1]),
)
"""x [M / ranks, K], b [K, N_r], bias [N_r]: the gathered rows @ b, + bias [M, N_r]."""

GEMM_REDUCE_SCATTER = _define(
    "gemm_reduce_scatter(Tensor x, Tensor b, int ranks, str group) -> Tensor",
    _gemm_reduce_scatter,
    lambda x, b, ranks, group: x.new_empty(x.shape[0] // ranks, b.shape[1]),
)
"""x [M, K_r], b [K_r, N]: this rank's rows of the sum over ranks of x @ b [M / ranks, N]."""
