"""AllReduce by torch's symmetric memory, with torch's norm behind it."""

from __future__ import annotations

import torch

from mkernel.harness.contender import Contender
from mkernel.harness.library_sums import normed
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.symm_mem import group_name, rendezvous, symmetric, unusable


class SymmetricSum(Contender):
    """torch.ops.symm_mem's all-reduce of rows that lie in its memory already."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._group = group_name()

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return unusable(problem) if problem.op == "all_reduce" else "for plain sums"

    def inputs(self) -> Inputs:
        shape, _ = self.problem.memory("op")["out"]
        x = symmetric(shape, self.problem)
        rendezvous(x, self._group)
        return {"x": x}


class OneShot(SymmetricSum):
    """Everything to everyone at once."""

    name = "symm_mem-one-shot"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return normed(
            torch.ops.symm_mem.one_shot_all_reduce(inputs["x"], "sum", self._group), inputs
        )


class TwoShot(SymmetricSum):
    """In two exchanges."""

    name = "symm_mem-two-shot"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        found = super().unusable(problem)
        if found is None and not hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"):
            return "this torch sums in place alone"
        return found

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        torch.ops.symm_mem.two_shot_all_reduce_out(inputs["x"], "sum", self._group, out)
        return normed(out, inputs)
