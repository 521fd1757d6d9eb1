"""Oracles of the parts of a GEMM op alone: their inputs, and the truth of their results.

Product     the product on one rank, all of its inputs there
Collective  the op's collective on this rank's data, nothing computed but the sum
Transfer    what the collective's bytes are at the least, moved and not added up
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.base import NOWHERE, Memory, Onto, Oracle, Rows, Tensors, every_row, times
from mkernel.cases.comparison import narrowed
from mkernel.cases.gemm import GemmCase, own_rows, shares_of_rows
from mkernel.plan.model import E4M3

_A, _X = 0, 2  # 1 is B


@dataclass(frozen=True)
class Part(Oracle):
    """One part of the op of ``case``; its data and dtypes are the case's."""

    given_outputs = ("out",)

    case: GemmCase

    @property
    def _mnk(self) -> tuple[int, int, int]:
        sizes = self.case.sizes
        return sizes["m"], sizes["n"], sizes["k"]

    def _memory(self, *shape: int) -> dict[str, Memory]:
        return {"out": (shape, getattr(torch, self.case.out_dtype))}

    def _rows(self, *shape: int) -> dict[str, Memory]:
        """Return the memory of rows of A; what is e4m3 has a result of another dtype."""
        case = self.case
        dtype = case.dtype if case.dtype == E4M3 else case.out_dtype
        return {"out": (shape, getattr(torch, dtype))}

    def tolerances(self) -> dict[str, float]:
        """Return the op's."""
        return self.case.tolerances()

    def projects(self, names: Collection[str]) -> bool:
        """Return True: a product's last factor and sums take the columns."""
        return True


class Product(Part):
    """The product a [M, K] @ b [K, N]."""

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return a and b."""
        case, (m, _, k) = self.case, self._mnk
        a = case.normal(iteration, _A, rank, m, k, into=into.get("a"))
        b = case.laid_out(case.random_b(iteration, rank, into.get("b")))
        return {"a": a, "b": b} | case.random_scales(iteration, rank, rank, m)

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out [M, N]."""
        m, n, _ = self._mnk
        return self._memory(m, n)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute out [M, N]."""
        given = self.inputs(rank, world_size, iteration)
        a, b = given["a"].double(), given["b"].double()
        if "a_scale" in given:
            a = dequantised(a, given["a_scale"], a.dtype)
            b = dequantised(b, given["b_scale"], b.dtype)
        return {"out": a[rows(len(a))] @ times(b, onto and onto(b.shape[1]))}


class Collective(Part):
    """The op's AllGather of rows [M/W, K], or its sum of partial results [M, N]."""

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return x."""
        m, n, k = self._mnk
        shape = (m // world_size, k) if self.case.gemm.gathers else (m, n)
        x = self.case.normal(iteration, _X, rank, *shape, into=into.get("x"))
        if self.case.dtype == E4M3 and not self.case.gemm.gathers:  # results are no e4m3
            x = x.to(getattr(torch, self.case.out_dtype))
        return {"x": x}

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out: [M, K] gathered, [M/W, N] scattered or [M, N]."""
        m, n, k = self._mnk
        if self.case.gemm.gathers:
            return self._rows(m, k)
        return self._memory(m // world_size if self.case.gemm.scatters else m, n)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute the rows of all ranks, or their sum."""
        xs = [self.inputs(each, world_size, iteration)["x"] for each in range(world_size)]
        m, gemm, columns = self.case.sizes["m"], self.case.gemm, onto and onto(xs[0].shape[1])
        if gemm.gathers:
            shares = shares_of_rows(m, world_size, rows)
            gathered = [narrowed(x[at], columns) for x, at in zip(xs, shares, strict=True)]
            return {"out": torch.cat(gathered)}
        at = own_rows(m, rank, world_size, gemm.scatters, rows)
        return {"out": sum((narrowed(x[at], columns) for x in xs), torch.zeros(()))}


class Transfer(Collective):
    """The bytes of the collective, from every rank to every rank.

    A scatter takes this rank's rows from every peer; a reduction to all also takes from every peer the
    rows which that peer would have summed.
    """

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out: the gathered rows; of a sum what each rank sends, one after another."""
        m, n, k = self._mnk
        if self.case.gemm.gathers:
            return self._rows(m, k)
        halves = 1 if self.case.gemm.scatters else 2
        return self._memory(halves * (m // world_size) * world_size, n)

    def pieces(self, rank: int, world_size: int, peer: int) -> list[tuple[slice, slice]]:
        """Return which rows of the output are which rows of a peer's ``x``."""
        rows = self.case.sizes["m"] // world_size
        slot = slice(peer * rows, (peer + 1) * rows)
        if self.case.gemm.gathers:
            return [(slot, slice(0, rows))]
        pieces = [(slot, slice(rank * rows, (rank + 1) * rows))]
        if not self.case.gemm.scatters:
            second = world_size * rows
            pieces.append((slice(second + slot.start, second + slot.stop), slot))
        return pieces

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Put those pieces together."""
        ((shape, dtype),) = self.results(world_size).values()
        whole = torch.empty(shape, dtype=dtype, device=self.case.device)
        for source in range(world_size):
            x = self.inputs(source, world_size, iteration)["x"]
            for target, origin in self.pieces(rank, world_size, source):
                whole[target] = x[origin]
        return {"out": narrowed(whole[rows(len(whole))], onto and onto(shape[1]))}
