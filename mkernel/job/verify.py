"""Judges a result against float64, computed from the same inputs.

Tolerances are relative Frobenius errors (one rounding to bfloat16 gives 1.7e-3; partial sums kept
in bfloat16 give 2.4e-3, and more with atomics). A NaN or infinity must stand exactly where the
reference has one; the error is taken over the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mkernel.job.inputs import Inputs
from mkernel.plan.model import DtypeName

TOLERANCE: dict[DtypeName, float] = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}

_ROWS = 1024  # rows of the reference held at once, to bound memory


@dataclass(frozen=True)
class Verdict:
    """``error``: relative Frobenius error, infinite where NaN, infinity or shape differ."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance (a NaN error is not)."""
        return self.error <= self.tolerance


def compare(result: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(squared error, squared norm of the reference); infinite error where non-finites differ."""
    if result.shape != reference.shape:
        return float("inf"), 1.0
    wide = result.to(torch.float64)
    finite = torch.isfinite(reference)
    odd = ~finite
    if not torch.equal(torch.isfinite(wide), finite) or not torch.equal(
        torch.nan_to_num(wide[odd], nan=1.0, posinf=2.0, neginf=3.0),
        torch.nan_to_num(reference[odd], nan=1.0, posinf=2.0, neginf=3.0),
    ):
        return float("inf"), 1.0
    gap = (wide - reference)[finite]
    return float(gap @ gap), float(reference[finite] @ reference[finite])


def all_gather_gemm(
    result: torch.Tensor, inputs: Inputs, rank: int, world_size: int, iteration: int
) -> float:
    """Relative Frobenius error of C [M, N_r] = concat(a) @ b on ``rank``."""
    b = inputs.b(rank, iteration).to(torch.float64)
    squared_error = squared_norm = 0.0
    done = 0
    for source in range(world_size):
        shard = inputs.a(source, iteration)
        for first in range(0, len(shard), _ROWS):
            rows = shard[first : first + _ROWS]
            part = result[done : done + len(rows)]
            error, norm = compare(part, rows.to(torch.float64) @ b)
            squared_error, squared_norm = squared_error + error, squared_norm + norm
            done += len(rows)
    if done != len(result):
        return float("inf")
    return float((squared_error / squared_norm) ** 0.5) if squared_norm else squared_error
