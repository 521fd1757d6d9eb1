"""AllReduce by torch's symmetric memory, with torch's norm behind it."""

from __future__ import annotations

import torch

from mkernel.harness.contender import Contender
from mkernel.harness.library_sums import normed
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.symm_mem import group_name, rendezvous, symmetric, unusable


class SymmetricSum(Contender):
    """torch.ops.symm_mem's all-reduce."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._group = group_name()

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return unusable(problem) if problem.op == "all_reduce" else "for plain sums"

    def _symmetric(self) -> torch.Tensor:
        shape, _ = self.problem.memory("op")["out"]
        made = symmetric(shape, self.problem)
        rendezvous(made, self._group)
        return made


class OneShot(SymmetricSum):
    """Everything to everyone at once, of rows that lie in its memory already."""

    name = "symm_mem-one-shot"

    def inputs(self) -> Inputs:
        return {"x": self._symmetric()}

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return normed(
            torch.ops.symm_mem.one_shot_all_reduce(inputs["x"], "sum", self._group), inputs
        )


class TwoShot(SymmetricSum):
    """In two exchanges, in place of a copy of the rows: torch's kernel overwrites what it sums."""

    name = "symm_mem-two-shot"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._sum = self._symmetric()

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self._sum.copy_(inputs["x"])
        torch.ops.symm_mem.two_shot_all_reduce_(self._sum, "sum", self._group)
        return normed(self._sum, inputs)
