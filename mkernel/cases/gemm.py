"""Cases of the three GEMM ops. Option ``replicate_b`` (AllGather only, default True): every rank uses
the same B, else its own columns. Option ``tensors``: the user's own whole ``a`` and ``b`` instead of
random data; A is then cut by rows (AllGather) or K (the others), B by columns or K. Option ``gap``:
behind each row of A and B (column, of a column-major B) lie so many elements of a larger tensor, NaN.
Option ``bias``: the call adds one, where B is a rank's own its own too. Option ``norm`` (AllReduce
only): ``residual``, the call adds one and normalises; ``alone``, it normalises the sum. Option
``scales``: the mode of those of e4m3 operands; neighbours' and those of the next call are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import ClassVar, NamedTuple
from weakref import ref

import torch

from mkernel.backends.contracts.scaled import dequantised
from mkernel.cases.all_reduce import SumCase
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
from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.around import Normed, Scaled
from mkernel.ops.common import Execution
from mkernel.ops.gemm import GemmCall, GemmOp
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.invariance import encoded

_A, _B, _BIAS, _RESIDUAL, _WEIGHT, _A_SCALE, _B_SCALE = range(7)
_FAST_LOSS = 2**-13 / math.sqrt(16 * math.log(2))
"""Times sqrt(K): the most that sums of K products of random e4m3 elements lose by fast accumulation,
relative. Hopper's matrix units add 32 products to the sum so far at a time, and cut all of them 13
bits below the largest one's exponent E. A cut takes less than U = 2^(E-13) of a product, towards zero:
in the mean square at most U²/3. Products have independent signs, so the cuts add up as a random walk.
The sum of k products has the mean square k (in units of one product's), of which 2^(2E) is 3/(8 ln 2)
where mantissas are distributed logarithmically. So K products lose the sum over k of
2^-26 · 3/(8 ln 2) · k / 3, which is 2^-26 · K² / (16 ln 2), of a sum with the mean square K. Products
of e4m3 elements have so few bits that many lose none: 0.4 to 0.7 of this was emulated and measured.
Sums of products with equal signs lose more."""


_MOST_KEPT = 2**22
"""Elements that are kept until others are wanted: 32 MiB."""


class _Products(NamedTuple):
    """The products that a case's truth was last made of, whichever rank of this process it was for."""

    case: ref[GemmCase]
    which: tuple[int, ...]
    found: list[torch.Tensor]


_latest: list[_Products] = []


def shares_of_rows(m: int, world_size: int, rows: Rows) -> Iterator[torch.Tensor | slice]:
    """Yield which rows of each rank's share of M are wanted, counted from the share's first."""
    at, own = rows(m), m // world_size
    if isinstance(at, slice):
        assert at == slice(m), "a slice has all rows"
        yield from [slice(own)] * world_size
        return
    for rank in range(world_size):
        yield at[at // own == rank] - rank * own


def own_rows(
    m: int, rank: int, world_size: int, scatters: bool, rows: Rows
) -> torch.Tensor | slice:
    """Return which of M rows are wanted of a rank's result: of its share, where the op scatters."""
    count = m // world_size if scatters else m
    first, at = rank * count if scatters else 0, rows(count)
    if isinstance(at, slice):
        wanted = range(first, first + count)[at]
        return slice(wanted.start, wanted.stop)
    return first + at


def _apart(rows: torch.Tensor, gap: int) -> torch.Tensor:
    """Return the same rows as part of a wider matrix."""
    wider = rows.new_full((rows.shape[0], rows.shape[1] + gap), float("nan"))
    part = wider[:, : rows.shape[1]]
    return part.copy_(rows)


class GemmCase(Case):
    """The base of the three GEMM ops' cases."""

    gemm: ClassVar[GemmOp]
    given_outputs = ("out",)

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return a and b of ``rank``, their scales, and what the call adds."""
        a = self._a(rank, world_size, iteration, into.get("a"))
        b = self.laid_out(self._b(rank, iteration, into.get("b")))
        gap = self.options.get("gap", 0)
        if gap:
            a = _apart(a, gap)
            b = _apart(b.t(), gap).t() if self.layout == "column" else _apart(b, gap)
        bias = self._bias(rank, iteration)
        given = {"a": a, "b": b} | ({} if bias is None else {"bias": bias})
        return given | self.scaled_with(rank, world_size, iteration)

    def scaled_with(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """Return the scales of a rank's operands, where they are e4m3."""
        rows = self.sizes["m"] // (world_size if self.gemm.gathers else 1)
        part = EVERY_RANK if self._shares_b else rank
        return self.random_scales(iteration, rank, part, rows)

    def random_scales(
        self, iteration: int, part_a: int, part_b: int, rows: int
    ) -> dict[str, torch.Tensor]:
        """Draw the scales of e4m3 operands: of an A of so many rows, and of a B, by their parts
        (:meth:`generator`)."""
        mode = self.options.get("scales")
        if mode is None:
            return {}
        of_a, of_b = scale_sizes(mode, rows, self.sizes["n"], self.sizes["k"])
        b_scale = self.drawn_scale(iteration, _B_SCALE, part_b, *of_b[::-1]).t()
        return {"a_scale": self.drawn_scale(iteration, _A_SCALE, part_a, *of_a), "b_scale": b_scale}

    def wide_a(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        """Return a rank's a in float64, times its scales."""
        a = self._a(rank, world_size, iteration).double()
        scale = self.scaled_with(rank, world_size, iteration).get("a_scale")
        return a if scale is None else dequantised(a, scale, torch.float64)

    def wide_b(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        """Return a rank's b in float64, times its scales."""
        b = self._b(rank, iteration).double()
        scale = self.scaled_with(rank, world_size, iteration).get("b_scale")
        return b if scale is None else dequantised(b, scale, torch.float64)

    def laid_out(self, b: torch.Tensor) -> torch.Tensor:
        """Return B in the case's layout."""
        return b.t().contiguous().t() if self.layout == "column" else b

    def random_b(self, iteration: int, part: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Draw a random B [K, N]; on devices in the case's layout, as it lies in memory."""
        n, k = self.sizes["n"], self.sizes["k"]
        if self.layout == "column" and not self.on_cpu:
            into = None if into is None else into.t()
            return self.normal(iteration, _B, part, n, k, into=into).t()
        return self.normal(iteration, _B, part, k, n, into=into)

    @property
    def tolerance(self) -> float:
        """Allow one rounding, and what is lost where products may be added with fewer bits."""
        rounding = self.rounding
        if not self.options.get("use_fast_accum", False):
            return rounding
        return math.hypot(rounding, _FAST_LOSS * math.sqrt(self.sizes["k"]))

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return that of out; with a norm of residual_out, too."""
        rows = self.sizes["m"] // (world_size if self.gemm.scatters else 1)
        memory = (rows, self.sizes["n"]), getattr(torch, self.out_dtype)
        return dict.fromkeys(self.tolerances(), memory)

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op into ``out``."""
        call = GemmCall(
            tensors["a"],
            tensors["b"],
            tensors.get("bias"),
            out=outputs["out"],
            chunk=self.chunk,
            path=self.options.get("path"),
            norm=self.norm(tensors),
            scaled=self._scaled(tensors),
            invariant=encoded(self.invariant),
        )
        done = self.gemm.call(call, **execution)
        return Outcome(done.outputs, done.plan, done.record)

    def norm(self, tensors: Tensors) -> Normed | None:
        """Return None: only a sum is normalised."""
        return None

    def projects(self, names: Collection[str]) -> bool:
        """Return whether ``out`` is the product alone; a norm is not linear."""
        return "norm" not in self.options

    def keeps(self, elements: int, rows: Rows) -> bool:
        """Return whether so many elements are kept: only random data's, and on a CPU."""
        whole = rows is every_row and self.given is None
        return whole and self.on_cpu and elements <= _MOST_KEPT

    def kept(
        self, make: Callable[[], list[torch.Tensor]], which: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Return what ``make`` gives, or gave when it was last called for the same ``which``.

        Truths and the bounds of their errors are made of the same products, and so are those of several
        ranks that are judged in one process. To be read only.
        """
        for latest in _latest[:1]:
            if latest.case() is self and latest.which == which:
                return latest.found
        found = make()
        _latest[:] = [_Products(ref(self, _forget), which, found)]
        return found

    def _scaled(self, tensors: Tensors) -> Scaled | None:
        if "a_scale" not in tensors:
            return None
        fast = self.options.get("use_fast_accum", False)
        return Scaled(tensors["a_scale"], tensors["b_scale"], fast)

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
        own = self.gemm.gathers and not self._shares_b
        drawn = self.normal(iteration, _BIAS, rank if own else EVERY_RANK, self.sizes["n"])
        return drawn.to(getattr(torch, self.out_dtype)) if self.options.get("scales") else drawn

    @property
    def _shares_b(self) -> bool:
        """Return whether every rank has the same B."""
        return self.gemm.gathers and bool(self.options.get("replicate_b", True))

    def biased(
        self, c: torch.Tensor, rank: int, iteration: int, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add a call's bias to its result, which was multiplied by columns where there are some."""
        bias = self._bias(rank, iteration)
        return c if bias is None else c + times(bias.double(), columns)

    def _b(self, rank: int, iteration: int, into: torch.Tensor | None = None) -> torch.Tensor:
        n, k = self.sizes["n"], self.sizes["k"]
        shared = self._shares_b
        if self.given is None:
            return self.random_b(iteration, EVERY_RANK if shared else rank, into)
        whole = self.given["b"]
        if not self.gemm.gathers:
            return whole[rank * k : (rank + 1) * k]
        return whole if shared else whole[:, rank * n : (rank + 1) * n].contiguous()


def _forget(case: ref[GemmCase]) -> None:
    """Forget what was kept of a case that is gone."""
    _latest[:] = [each for each in _latest if each.case is not case]


class AllGatherGemmCase(GemmCase):
    """C = concat(a) @ b."""

    op = "all_gather_gemm"
    gemm = all_gather_gemm.OP

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute C [M, N]."""
        whose = EVERY_RANK if self._shares_b else rank
        columns = onto and onto(self.sizes["n"])

        def whole() -> list[torch.Tensor]:
            b = times(self.wide_b(rank, world_size, iteration), columns)
            shares = shares_of_rows(self.sizes["m"], world_size, rows)
            parts = (
                self.wide_a(source, world_size, iteration)[at] @ b
                for source, at in enumerate(shares)
            )
            return [torch.cat(list(parts))]

        keeps = self.keeps(self.sizes["m"] * self.sizes["n"], rows) and onto is None
        (c,) = self.kept(whole, (whose, world_size, iteration)) if keeps else whole()
        return {"out": self.biased(c.clone() if keeps else c, rank, iteration, columns)}


class _GemmSumCase(SumCase, GemmCase):
    """A sum of products, with what is added to it."""

    _norm_data = _RESIDUAL, _WEIGHT

    @property
    def eps(self) -> float:
        """Return a norm's epsilon: the mean of squares of such a sum."""
        return float(self.sizes["k"])

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return a and b of ``rank``, and what a norm takes."""
        given = super().inputs(rank, world_size, iteration, into)
        return given | self.normed_with(iteration)

    def total(
        self, rank: int, world_size: int, iteration: int, rows: Rows, onto: Onto = None
    ) -> torch.Tensor:
        columns = onto and onto(self.sizes["n"])
        total = self._summed(rank, world_size, iteration, rows, columns)
        return self.biased(total, rank, iteration, columns)

    def sizes_of_terms(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        return self._summed(rank, world_size, iteration, every_row, sizes=True)

    def _summed(
        self,
        rank: int,
        world_size: int,
        iteration: int,
        rows: Rows,
        columns: torch.Tensor | None = None,
        *,
        sizes: bool = False,
    ) -> torch.Tensor:
        """Compute the sum of the ranks' products; ``sizes``: of their absolute values."""

        def terms() -> Iterator[torch.Tensor]:
            at = own_rows(self.sizes["m"], rank, world_size, self.gemm.scatters, rows)
            for source in range(world_size):
                a = self.wide_a(source, world_size, iteration)[at]
                yield a @ times(self.wide_b(source, world_size, iteration), columns)

        def both() -> list[torch.Tensor]:
            total, added = torch.zeros(()), torch.zeros(())
            for term in terms():
                total, added = total + term, added + term.abs()
            return [total, added]

        count = 2 * self.sizes["m"] * self.sizes["n"]
        if columns is not None or not self.keeps(count, rows):
            return sum((term.abs() if sizes else term for term in terms()), torch.zeros(()))
        whose = rank if self.gemm.scatters else EVERY_RANK
        return self.kept(both, (whose, world_size, iteration))[sizes].clone()


class GemmReduceScatterCase(_GemmSumCase):
    """Rows of sum(a @ b)."""

    op = "gemm_reduce_scatter"
    gemm = gemm_reduce_scatter.OP


class GemmAllReduceCase(_GemmSumCase):
    """sum(a @ b)."""

    op = "gemm_all_reduce"
    gemm = gemm_all_reduce.OP
