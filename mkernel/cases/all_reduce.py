"""Case of AllReduce. Option ``norm``: ``residual``, the call adds one and normalises; ``alone``, it
normalises the sum. Option ``in_place``: ``out`` is ``x``. Option ``tensors``: whole ``x`` [M·W, N]
instead of random data, cut by rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mkernel.cases.base import (
    EVERY_RANK,
    NOWHERE,
    TOLERANCE,
    Case,
    Memory,
    Onto,
    Outcome,
    Rows,
    Tensors,
    every_row,
)
from mkernel.ops import all_reduce
from mkernel.ops.around import Normed
from mkernel.ops.common import Execution

_X, _RESIDUAL, _WEIGHT = range(3)
EPS = 4.0
"""A share of the mean of squares that shows where it is forgotten."""


class AllReduceCase(Case):
    """sum(x). Outputs: ``out``; with a norm ``residual_out``."""

    op = "all_reduce"
    given_outputs = True

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """x of ``rank``, and what a norm takes, the same on every rank."""
        return {"x": self._x(rank, iteration, into.get("x"))} | self._normed_with(iteration)

    def results(self, world_size: int) -> dict[str, Memory]:
        """out."""
        return {"out": (self._shape, getattr(torch, self.out_dtype))}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op into ``out``, or into x."""
        weight = tensors.get("norm_weight")
        norm = None if weight is None else Normed(tensors.get("residual"), weight, EPS)
        out = tensors["x"] if self.options.get("in_place") else outputs["out"]
        done = all_reduce.call(tensors["x"], norm, out=out, chunk=self.chunk, **execution)
        return Outcome(done.outputs, done.plan, done.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """The sum; with a norm the normalised rows and what was normalised."""
        at = rows(self.sizes["m"])
        total = sum(self._terms(world_size, iteration, at), torch.zeros(()))
        given = self._normed_with(iteration)
        if not given:
            return {"out": total}
        if "residual" in given:
            total = total + given["residual"][at].double()
        return {"out": total / _size(total) * given["norm_weight"].double(), "residual_out": total}

    def projected(
        self, rank: int, world_size: int, iteration: int, onto: Onto
    ) -> dict[str, torch.Tensor]:
        """The same times columns: there is no product, so the reference itself costs little."""
        columns = onto(self.sizes["n"])
        found = self.reference(rank, world_size, iteration)
        return {name: each @ columns for name, each in found.items()}

    @property
    def rounds_partials(self) -> bool:
        """With a norm: the sum may be rounded before the residual is added."""
        return "norm" in self.options

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """What ranks have is not rounded again. With a norm the sum may be: it, and its share of the
        normalised rows."""
        given = self._normed_with(iteration)
        if not given:
            return {}
        terms = self._terms(world_size, iteration, every_row(self.sizes["m"]))
        added = sum((term.abs() for term in terms), torch.zeros(()))
        if "residual" in given:
            added = added + given["residual"].double().abs()
        size = _size(self.reference(rank, world_size, iteration)["residual_out"])
        weight = given["norm_weight"].double().abs()
        return {"out": added / size * weight, "residual_out": added}

    def tolerances(self) -> dict[str, float]:
        """One rounding of each result: with a norm there are two."""
        names = ("out", "residual_out") if "norm" in self.options else ("out",)
        return dict.fromkeys(names, TOLERANCE[self.out_dtype])

    @property
    def _shape(self) -> tuple[int, int]:
        return self.sizes["m"], self.sizes["n"]

    def _x(self, rank: int, iteration: int, into: torch.Tensor | None = None) -> torch.Tensor:
        if self.given is None:
            return self.normal(iteration, _X, rank, *self._shape, into=into)
        rows = self.sizes["m"]
        return self.given["x"][rank * rows : (rank + 1) * rows]

    def _terms(
        self, world_size: int, iteration: int, at: torch.Tensor | slice
    ) -> Iterator[torch.Tensor]:
        for source in range(world_size):
            yield self._x(source, iteration)[at].double()

    def _normed_with(self, iteration: int) -> dict[str, torch.Tensor]:
        if "norm" not in self.options:
            return {}
        weight = 1 + self.normal(iteration, _WEIGHT, EVERY_RANK, self.sizes["n"]) / 4
        if self.options["norm"] == "alone":
            return {"norm_weight": weight}
        residual = self.normal(iteration, _RESIDUAL, EVERY_RANK, *self._shape)
        return {"norm_weight": weight, "residual": residual.to(getattr(torch, self.out_dtype))}


def _size(rows: torch.Tensor) -> torch.Tensor:
    """What a norm divides rows by."""
    return (rows.square().mean(-1, keepdim=True) + EPS).sqrt()
