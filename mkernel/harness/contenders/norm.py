"""The residual and RMSNorm that follow a library's sum, built as users of such libraries build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm

from mkernel.cases.all_reduce import SumCase
from mkernel.harness.contenders.compiled import compiled
from mkernel.harness.problem import Inputs, Problem, Tensors

_Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def has_norm(problem: Problem) -> bool:
    """Return whether the problem's calls have a residual and a norm."""
    return "norm" in problem.case.options


def _added_and_normed(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new = total + residual
    return rms_norm(new, weight.shape, weight, eps), new


class AddAndNorm:
    """The step after a library's sum; it does nothing where the problem has no norm.

    On CUDA devices it is one kernel, which torch compiles in the constructor. On a CPU, whose compiler
    takes seconds, it is two ops.
    """

    def __init__(self, problem: Problem) -> None:
        self._run: _Run | None = None
        if not has_norm(problem):
            return
        case: Any = problem.case
        assert isinstance(case, SumCase)
        self._eps = case.eps
        self._run = _added_and_normed
        if problem.device.type != "cpu":
            self._run = compiled(_added_and_normed)
        shape, dtype = problem.memory("op")["residual_out"]
        total, residual, weight = (
            torch.zeros(each, dtype=dtype, device=problem.device)
            for each in (shape, shape, shape[1:])
        )
        self._run(total, residual, weight, self._eps)

    def __call__(self, total: torch.Tensor, inputs: Inputs) -> Tensors:
        """Return the results of a call, given the sum of its ranks."""
        if self._run is None:
            return {"out": total}
        out, new = self._run(total, inputs["residual"], inputs["norm_weight"], self._eps)
        return {"out": out, "residual_out": new}
