"""The tensors that native starters of calls take, and the sums of a plan as they take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.collectives.norm import rows_of
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

STARTED = (
    "a", "b", "bias", "out", "a_scale", "b_scale", "gathered", "gathered_scale", "norm_weight",
    "residual", "residual_out", "prefetch", "quantised", "quantised_scale",
)  # fmt: skip
"""The tensors that starters take, in the order of their addresses (``host/call_starter.hpp``)."""

SUMMED = ("x", *STARTED[1:])
"""The tensors that starters of AllReduce take."""


def summed_rows(
    plan: LaunchPlan,
    blocks: int = 0,
    twice: bool = False,
    unrounded: bool = False,
    tree: bool = False,
) -> _kernels.SummedRows:
    """Return the rows that a plan sums, and their norm if the launch has one. ``blocks``: of the
    kernel that sums them by mail; ``twice``: in two exchanges; ``unrounded``: of float32 terms;
    ``tree``: by the tree of invariant results."""
    norm = plan.norm if normalises(plan) else None
    made: _kernels.SummedRows = native().SummedRows(
        rows_of(plan, blocks, twice=twice, unrounded=unrounded, tree=tree),
        None if norm is None else norm.eps,
    )
    return made


def normed_rows(plan: LaunchPlan) -> _kernels.SummedRows | None:
    """Return :func:`summed_rows` if the launch normalises them."""
    return summed_rows(plan) if normalises(plan) else None


def normalises(plan: LaunchPlan) -> bool:
    """Return whether the launch normalises the rows that it sums."""
    return plan.norm is not None and plan.norm.step == "launch"
