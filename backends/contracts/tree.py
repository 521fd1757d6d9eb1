"""The one tree in which invariant results are added up (:mod:`mkernel.plan.invariance`), in torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mkernel.plan.invariance import pairs


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape and dtype, their number a power of two: a node is the
    float32 sum of its two children, rounded to that dtype. None of them is written to."""
    for level in pairs(len(parts)):
        parts = [
            (parts[one].float() + parts[other].float()).to(parts[0].dtype) for one, other in level
        ]
    return parts[0]
