"""Cases of the three GEMM ops. Option ``replicate_b`` (AllGather only, default True): every rank uses
the same B, else its own columns. Option ``tensors``: the user's own whole ``a`` and ``b`` instead of
random data; A is then cut by rows (AllGather) or K (the others), B by columns or K. Option ``gap``:
behind each row of A and B (column, of a column-major B) lie so many elements of a larger tensor, NaN.
Option ``bias``: the call adds one, where B is a rank's own its own too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from mkernel.cases.base import EVERY_RANK, NOWHERE, Case, Memory, Outcome, Rows, Tensors, every_row
from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.common import Execution
from mkernel.ops.gemm import GemmOp

_A, _B, _BIAS = 0, 1, 2


def shares_of_rows(m: int, world_size: int, rows: Rows) -> Iterator[torch.Tensor]:
    """Which rows of each rank's share of M are asked for, counted from the share's first."""
    at, own = torch.arange(m)[_on_cpu(rows(m))], m // world_size
    for rank in range(world_size):
        yield at[at // own == rank] - rank * own


def own_rows(m: int, rank: int, world_size: int, scatters: bool, rows: Rows) -> torch.Tensor:
    """Which of M rows are asked for of a rank's result: of its share, where the op scatters."""
    count = m // world_size if scatters else m
    first = rank * count if scatters else 0
    return first + torch.arange(count)[_on_cpu(rows(count))]


def _on_cpu(at: torch.Tensor | slice) -> torch.Tensor | slice:
    return at if isinstance(at, slice) else at.cpu()


def _apart(rows: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows as part of a wider matrix."""
    wider = rows.new_full((rows.shape[0], rows.shape[1] + gap), float("nan"))
    part = wider[:, : rows.shape[1]]
    return part.copy_(rows)


class GemmCase(Case):
    """What the three have in common."""

    gemm: ClassVar[GemmOp]
    given_outputs = True

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """a and b of ``rank``."""
        a = self._a(rank, world_size, iteration, into.get("a"))
        b = self.laid_out(self._b(rank, world_size, iteration, into.get("b")))
        gap = self.options.get("gap", 0)
        if gap:
            a = _apart(a, gap)
            b = _apart(b.t(), gap).t() if self.layout == "column" else _apart(b, gap)
        bias = self._bias(rank, iteration)
        return {"a": a, "b": b} | ({} if bias is None else {"bias": bias})

    def laid_out(self, b: torch.Tensor) -> torch.Tensor:
        """B in the case's layout."""
        return b.t().contiguous().t() if self.layout == "column" else b

    def random_b(self, iteration: int, part: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """A random B [K, N]; on devices in the case's layout, drawn as it lies in memory."""
        n, k = self.sizes["n"], self.sizes["k"]
        if self.layout == "column" and not self.on_cpu:
            into = None if into is None else into.t()
            return self.normal(iteration, _B, part, n, k, into=into).t()
        return self.normal(iteration, _B, part, k, n, into=into)

    def results(self, world_size: int) -> dict[str, Memory]:
        """out."""
        rows = self.sizes["m"] // (world_size if self.gemm.scatters else 1)
        return {"out": ((rows, self.sizes["n"]), getattr(torch, self.out_dtype))}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op into ``out``."""
        done = self.gemm.call(
            tensors["a"],
            tensors["b"],
            tensors.get("bias"),
            out=outputs["out"],
            chunk=self.chunk,
            path=self.options.get("path"),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def _a(
        self, rank: int, world_size: int, iteration: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self.sizes["m"] // (world_size if self.gemm.gathers else 1)
        if self.given is None:
            return self.normal(iteration, _A, rank, rows, self.sizes["k"], into=into)
        whole = self.given["a"]
        if self.gemm.gathers:
            return whole[rank * rows : (rank + 1) * rows]
        k = self.sizes["k"]
        return whole[:, rank * k : (rank + 1) * k].contiguous()

    def _bias(self, rank: int, iteration: int) -> torch.Tensor | None:
        if not self.options.get("bias", False):
            return None
        own = self.gemm.gathers and not self.options.get("replicate_b", True)
        return self.normal(iteration, _BIAS, rank if own else EVERY_RANK, self.sizes["n"])

    def biased(self, c: torch.Tensor, rank: int, iteration: int) -> torch.Tensor:
        """A result with what the call adds."""
        bias = self._bias(rank, iteration)
        return c if bias is None else c + bias.double()

    def _b(
        self, rank: int, world_size: int, iteration: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, k = self.sizes["n"], self.sizes["k"]
        shared = self.gemm.gathers and self.options.get("replicate_b", True)
        if self.given is None:
            return self.random_b(iteration, EVERY_RANK if shared else rank, into)
        whole = self.given["b"]
        if not self.gemm.gathers:
            return whole[rank * k : (rank + 1) * k]
        return whole if shared else whole[:, rank * n : (rank + 1) * n].contiguous()


class AllGatherGemmCase(GemmCase):
    """C = concat(a) @ b."""

    op = "all_gather_gemm"
    gemm = all_gather_gemm.OP

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """C [M, N]."""
        b = self._b(rank, world_size, iteration).double()
        shares = shares_of_rows(self.sizes["m"], world_size, rows)
        parts = [
            self._a(source, world_size, iteration)[at.to(b.device)].double() @ b
            for source, at in enumerate(shares)
        ]
        return {"out": self.biased(torch.cat(parts), rank, iteration)}


class _SumCase(GemmCase):
    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """This rank's rows of sum(a @ b), or all of them."""
        total = sum(self._terms(rank, world_size, iteration, rows), torch.zeros(()))
        return {"out": self.biased(total, rank, iteration)}

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The same rows of sum(abs(a @ b))."""
        terms = self._terms(rank, world_size, iteration, every_row)
        return {"out": sum((term.abs() for term in terms), torch.zeros(()))}

    def _terms(
        self, rank: int, world_size: int, iteration: int, rows: Rows
    ) -> Iterator[torch.Tensor]:
        at = own_rows(self.sizes["m"], rank, world_size, self.gemm.scatters, rows)
        for source in range(world_size):
            a = self._a(source, world_size, iteration)[at.to(self.device)].double()
            yield a @ self._b(source, world_size, iteration).double()


class GemmReduceScatterCase(_SumCase):
    """Rows of sum(a @ b)."""

    op = "gemm_reduce_scatter"
    gemm = gemm_reduce_scatter.OP


class GemmAllReduceCase(_SumCase):
    """sum(a @ b)."""

    op = "gemm_all_reduce"
    gemm = gemm_all_reduce.OP
