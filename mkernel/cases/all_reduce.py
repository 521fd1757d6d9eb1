"""Cases of sums over ranks, with or without a norm: AllReduce, and the base of GEMM's sums.

Option ``norm``: ``residual``, the call adds one and normalises; ``alone``, it normalises the sum. Of
AllReduce alone, option ``in_place``: ``out`` is ``x``; option ``tensors``: whole ``x`` [M·W, N] instead
of random data, cut by rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator

import torch

from mkernel.cases.base import (
    EVERY_RANK,
    NOWHERE,
    Case,
    Memory,
    Onto,
    Outcome,
    Rows,
    Tensors,
    every_row,
    times,
)
from mkernel.ops import all_reduce
from mkernel.ops.around import Normed
from mkernel.ops.common import Execution
from mkernel.plan.invariance import encoded

_X = 0
EPS = 4.0
"""A share of the mean of squares that shows where it is forgotten."""


class SumCase(Case):
    """A sum over ranks. Outputs: ``out``; with a norm ``residual_out``."""

    _norm_data: tuple[int, int]
    """The numbers of the tensors that are drawn for the residual and the norm's weight."""

    @property
    @abstractmethod
    def eps(self) -> float:
        """Return a norm's epsilon: a share of the mean of squares that shows where it is forgotten."""

    @abstractmethod
    def total(
        self, rank: int, world_size: int, iteration: int, rows: Rows, onto: Onto = None
    ) -> torch.Tensor:
        """Compute the sum that a norm takes, in float64: ``rows``, or times columns."""

    @abstractmethod
    def sizes_of_terms(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        """Compute the sum of the absolute values of what the ranks add."""

    def normed_with(self, iteration: int) -> dict[str, torch.Tensor]:
        """Return what a norm takes, the same on every rank. The residual is as large as the sum, so
        that neither can be forgotten."""
        if "norm" not in self.options:
            return {}
        residual_data, weight_data = self._norm_data
        m, n = self.sizes["m"], self.sizes["n"]
        out = getattr(torch, self.out_dtype)
        given = out if self.options.get("scales") else getattr(torch, self.dtype)
        weight = 1 + self.normal(iteration, weight_data, EVERY_RANK, n).to(given) / 4
        if self.options["norm"] == "alone":
            return {"norm_weight": weight}
        residual = self.normal(iteration, residual_data, EVERY_RANK, m, n).to(given)
        residual *= self.sizes.get("k", 1) ** 0.5
        return {"norm_weight": weight, "residual": residual.to(out)}

    def norm(self, tensors: Tensors) -> Normed | None:
        """Return the norm of a call with these inputs, where it has one."""
        weight = tensors.get("norm_weight")
        return None if weight is None else Normed(tensors.get("residual"), weight, self.eps)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute the sum; with a norm the normalised rows and what was normalised, which columns
        multiply at last."""
        given = self.normed_with(iteration)
        if not given:
            return {"out": self.total(rank, world_size, iteration, rows, onto)}
        total = self.total(rank, world_size, iteration, rows)
        if "residual" in given:
            total = total + given["residual"][rows(self.sizes["m"])].double()
        out = total / self._size(total) * given["norm_weight"].double()
        columns = onto and onto(self.sizes["n"])
        return {"out": times(out, columns), "residual_out": times(total, columns)}

    def _size(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what a norm divides rows by."""
        return (rows.square().mean(-1, keepdim=True) + self.eps).sqrt()

    @property
    def rounds_partials(self) -> bool:
        """Return whether there is a norm: the sum may be rounded before the residual is added."""
        return "norm" in self.options

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return the sum's :meth:`sizes_of_terms`; with a norm those of what is added to the new
        residual, and of their shares of the normalised rows."""
        added = self.sizes_of_terms(rank, world_size, iteration)
        given = self.normed_with(iteration)
        if not given:
            return {"out": added}
        if "residual" in given:
            added = added + given["residual"].double().abs()
        size = self._size(self.reference(rank, world_size, iteration)["residual_out"])
        weight = given["norm_weight"].double().abs()
        return {"out": added / size * weight, "residual_out": added}

    def tolerances(self) -> dict[str, float]:
        """Allow one rounding of each result: with a norm there are two."""
        names = ("out", "residual_out") if "norm" in self.options else ("out",)
        return dict.fromkeys(names, self.tolerance)


class AllReduceCase(SumCase):
    """sum(x)."""

    op = "all_reduce"
    given_outputs = ("out",)
    eps = EPS
    _norm_data = 1, 2

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x of ``rank``, and what a norm takes."""
        return {"x": self._x(rank, iteration, into.get("x"))} | self.normed_with(iteration)

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out; with a norm of residual_out, too."""
        memory = (self.sizes["m"], self.sizes["n"]), getattr(torch, self.out_dtype)
        return dict.fromkeys(self.tolerances(), memory)

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op into ``out``, or into x."""
        x = tensors["x"]
        out = x if self.options.get("in_place") else outputs["out"]
        done = all_reduce.call(
            x, self.norm(tensors), out=out, chunk=self.chunk,
            invariant=encoded(self.invariant), **execution,
        )  # fmt: skip
        return Outcome(done.outputs, done.plan, done.record)

    def total(
        self, rank: int, world_size: int, iteration: int, rows: Rows, onto: Onto = None
    ) -> torch.Tensor:
        terms = self._terms(world_size, iteration, rows(self.sizes["m"]))
        return times(sum(terms, torch.zeros(())), onto and onto(self.sizes["n"]))

    def projects(self, names: Collection[str]) -> bool:
        """Return True: there is no product, so the reference itself costs little."""
        return True

    def sizes_of_terms(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        terms = self._terms(world_size, iteration, every_row(self.sizes["m"]))
        return sum((term.abs() for term in terms), torch.zeros(()))

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return none without a norm: what ranks have is not rounded again."""
        return super().partials(rank, world_size, iteration) if self.rounds_partials else {}

    def _x(self, rank: int, iteration: int, into: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.sizes["m"]
        if self.given is None:
            return self.normal(iteration, _X, rank, rows, self.sizes["n"], into=into)
        return self.given["x"][rank * rows : (rank + 1) * rows]

    def _terms(
        self, world_size: int, iteration: int, at: torch.Tensor | slice
    ) -> Iterator[torch.Tensor]:
        for source in range(world_size):
            yield self._x(source, iteration)[at].double()
