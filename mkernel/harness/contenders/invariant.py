"""Invariant results without fusing, as their users have them: an invariant product, then a collective,
whose terms are added by a tree.

  AllGather+GEMM  all_gather ──▶ product of whole K
  sums            products of segments of K, rounded ──▶ tree ──▶ all_gather, or all_to_all where rows
                  are scattered ──▶ tree ──▶ out; a residual and a norm behind it
Segments are :data:`SEGMENTS`, or those of the case's promise. What is exchanged, and each node of the
tree, is rounded to the dtype of results, as ``mkernel.Invariant`` says by default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributed

from mkernel.backends.contracts.tree import tree_sum
from mkernel.cases.base import TOLERANCE
from mkernel.harness.contenders import Contender
from mkernel.harness.contenders.collectives import all_gather, collective
from mkernel.harness.contenders.compiled import compiled
from mkernel.harness.contenders.norm import AddAndNorm, has_norm
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS

SEGMENTS = 8
_HOST_ROWS = 64


def _tree(terms: Tensor) -> Tensor:
    """Add along the first dimension."""
    return tree_sum(list(terms))


def leaves(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out [segments, M, N] = the products of each segment of a [M, K] and b [K, N], in blocks
    of as many rows, whatever M is: by Triton, or on CPUs by torch."""
    if a.device.type != "cpu":
        from mkernel.harness.contenders import invariant_kernel

        invariant_kernel.leaves(a, b, out)
        return
    segments, m, _ = out.shape
    k = a.shape[1] // segments
    block = a.new_zeros((_HOST_ROWS, k), dtype=torch.float32)
    for segment in range(segments):
        own = slice(segment * k, (segment + 1) * k)
        right = b[own].float()
        for first in range(0, m, _HOST_ROWS):
            rows = a[first : first + _HOST_ROWS, own]
            block[: len(rows)] = rows
            out[segment, first : first + len(rows)] = (block @ right)[: len(rows)]


class Unfused(Contender):
    """The peer of invariant results."""

    name = "invariant-unfused"
    promises = True
    ops, ops_text = (*GEMMS, "all_reduce"), "for the GEMM ops and AllReduce only"
    library = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        case, sizes = problem.case, problem.case.sizes
        self._norm = AddAndNorm(problem)
        self._add = _tree if problem.device.type == "cpu" else compiled(_tree)
        self._segments = 1
        dtype = getattr(torch, case.out_dtype)
        if problem.gathers:
            self._whole = self._memory((sizes["m"], sizes["k"]), dtype)
            return
        if self.op in GEMMS:
            self._segments = self._of_case(problem) // problem.world
            self._leaves = self._memory((self._segments, sizes["m"], sizes["n"]), dtype)
        rows = sizes["m"]
        if self.op == "gemm_reduce_scatter":
            rows //= problem.world
        self._terms = self._memory((problem.world, rows, sizes["n"]), dtype)
        if problem.device.type != "cpu":  # they are compiled before the first turn
            self._add(self._terms)
            if self._segments > 1:
                self._add(self._leaves)

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.problem.device)

    @staticmethod
    def _of_case(problem: Problem) -> int:
        promised = problem.case.options.get("invariant")
        return SEGMENTS if promised is None else int(promised.segments)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        reason = super().unusable(problem)
        if reason is not None:
            return reason
        case, world = problem.case, problem.world
        if "scales" in case.options or case.dtype != case.out_dtype:
            return "its product takes operands of the results' dtype"
        if "bias" in case.options:
            return "it adds no bias"
        if world & (world - 1):
            return f"its tree adds a power of two of ranks, not {world}"
        if problem.op in GEMMS and not problem.gathers:
            segments = cls._of_case(problem)
            if segments % world or case.sizes["k"] % (segments // world):
                return f"{segments} segments do not cut K of {world} ranks"
        return None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "all_gather_gemm":
            collective(self.op, inputs["a"], self._whole)
            leaves(self._whole, inputs["b"], outputs["out"][None])
            return outputs
        own = inputs["x"] if self.op == "all_reduce" else self._root(inputs)
        if self.op == "gemm_reduce_scatter":
            distributed.all_to_all_single(self._terms.flatten(0, 1), own)
        else:
            all_gather(self._terms.flatten(0, 1), own)
        found = self._norm(self._add(self._terms), inputs)
        if "residual_out" in found:
            return found
        outputs["out"].copy_(found["out"])
        return outputs

    def _root(self, inputs: Inputs) -> Tensor:
        """Return the root of this rank's subtree."""
        leaves(inputs["a"], inputs["b"], self._leaves)
        return self._leaves[0] if self._segments == 1 else self._add(self._leaves)

    def limits(self) -> dict[str, float]:
        """Allow a rounding at each level of the tree, and those of the norm."""
        problem = self.problem
        count = problem.world
        if problem.op in GEMMS and not problem.gathers:
            count = self._of_case(problem)
        wider = math.sqrt(math.log2(count) + 2)
        if problem.op in GEMMS and not has_norm(problem):
            limit = TOLERANCE[problem.case.out_dtype] * wider
            return dict.fromkeys(problem.memory(self.kind), limit)
        return {name: each * wider for name, each in problem.oracle(self.kind).tolerances().items()}
