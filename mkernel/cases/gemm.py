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
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple
from weakref import ref

import torch

from mkernel.backends.contracts.scaled import dequantised
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
from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.around import Normed
from mkernel.ops.common import Execution
from mkernel.ops.gemm import GemmOp
from mkernel.ops.scales import Scaled
from mkernel.plan.scales import scale_sizes

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
    """Those that a case's truth was last made of, whoever of the ranks in this process it was for."""

    case: ref[GemmCase]
    which: tuple[int, ...]
    found: list[torch.Tensor]


_latest: list[_Products] = []


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
        given = {"a": a, "b": b} | ({} if bias is None else {"bias": bias})
        return given | self.scaled_with(rank, world_size, iteration) | self.normed_with(iteration)

    def scaled_with(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The scales of a rank's operands, where they are e4m3."""
        rows = self.sizes["m"] // (world_size if self.gemm.gathers else 1)
        part = EVERY_RANK if self._shares_b else rank
        return self.random_scales(iteration, rank, part, rows)

    def random_scales(
        self, iteration: int, part_a: int, part_b: int, rows: int
    ) -> dict[str, torch.Tensor]:
        """Of an A of so many rows and a B of these parts (:meth:`generator`), where they are e4m3."""
        mode = self.options.get("scales")
        if mode is None:
            return {}
        of_a, of_b = scale_sizes(mode, rows, self.sizes["n"], self.sizes["k"])
        b_scale = self._scale(iteration, _B_SCALE, part_b, *of_b[::-1]).t()
        return {"a_scale": self._scale(iteration, _A_SCALE, part_a, *of_a), "b_scale": b_scale}

    def _scale(self, iteration: int, which: int, part: int, *shape: int) -> torch.Tensor:
        """Below 0.32, and each at most a third of its neighbours' or three times as much: those beside
        it, in the next call, and of the next rank."""
        chance = self.generator(iteration, which, part)
        fine = 1 + torch.rand(shape, generator=chance, device=self.device) / 4
        rows, columns = (torch.arange(size, device=self.device) for size in shape)
        step = (rows[:, None] + columns + iteration + part) % 3
        return fine * 0.25 ** (1 + step)

    def wide_a(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        """A rank's a in float64, times its scales."""
        a = self._a(rank, world_size, iteration).double()
        scale = self.scaled_with(rank, world_size, iteration).get("a_scale")
        return a if scale is None else dequantised(a, scale, torch.float64)

    def wide_b(self, rank: int, world_size: int, iteration: int) -> torch.Tensor:
        """Its b, likewise."""
        b = self._b(rank, world_size, iteration).double()
        scale = self.scaled_with(rank, world_size, iteration).get("b_scale")
        return b if scale is None else dequantised(b, scale, torch.float64)

    def normed_with(self, iteration: int) -> dict[str, torch.Tensor]:
        """What a norm takes, the same on every rank."""
        if "norm" not in self.options:
            return {}
        n = self.sizes["n"]
        weight = 1 + self.normal(iteration, _WEIGHT, EVERY_RANK, n) / 4
        if self.options["norm"] == "alone":
            return {"norm_weight": weight}
        # As large as the sum, so that neither can be forgotten.
        residual = self.normal(iteration, _RESIDUAL, EVERY_RANK, self.sizes["m"], n)
        residual *= self.sizes["k"] ** 0.5
        out_dtype = getattr(torch, self.out_dtype)
        return {"norm_weight": weight, "residual": residual.to(out_dtype)}

    @property
    def eps(self) -> float:
        """Of a norm: a share of the mean of squares that shows where it is forgotten."""
        return float(self.sizes["k"])

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

    @property
    def tolerance(self) -> float:
        """One rounding of a result, and what is lost where products may be added with fewer bits."""
        rounding = TOLERANCE[self.out_dtype]
        if not self.options.get("use_fast_accum", False):
            return rounding
        return math.hypot(rounding, _FAST_LOSS * math.sqrt(self.sizes["k"]))

    def tolerances(self) -> dict[str, float]:
        """That of ``out``."""
        return {"out": self.tolerance}

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
            norm=self._norm(tensors),
            scaled=self._scaled(tensors),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def _norm(self, tensors: Tensors) -> Normed | None:
        weight = tensors.get("norm_weight")
        return None if weight is None else Normed(tensors.get("residual"), weight, self.eps)

    def keeps(self, elements: int, rows: Rows) -> bool:
        """Whether so many are kept: of a case alone, as all others are the caller's or a device's."""
        whole = rows is every_row and self.given is None
        return whole and self.on_cpu and elements <= _MOST_KEPT

    def kept(
        self, make: Callable[[], list[torch.Tensor]], which: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """What ``make`` gives, or gave when it was last called for the same ``which``: truths and the
        bounds of their errors are made of the same products, and so are those of several ranks that
        are judged in one process. To be read only."""
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
        """Whether every rank has the same B."""
        return self.gemm.gathers and bool(self.options.get("replicate_b", True))

    def biased(
        self, c: torch.Tensor, rank: int, iteration: int, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A result, times columns where there are some, with what the call adds."""
        bias = self._bias(rank, iteration)
        if bias is None:
            return c
        return c + (bias.double() if columns is None else bias.double() @ columns)

    def _b(
        self, rank: int, world_size: int, iteration: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, k = self.sizes["n"], self.sizes["k"]
        shared = self._shares_b
        if self.given is None:
            return self.random_b(iteration, EVERY_RANK if shared else rank, into)
        whole = self.given["b"]
        if not self.gemm.gathers:
            return whole[rank * k : (rank + 1) * k]
        return whole if shared else whole[:, rank * n : (rank + 1) * n].contiguous()


def _forget(case: ref[GemmCase]) -> None:
    """What was kept of a case that is gone."""
    _latest[:] = [each for each in _latest if each.case is not case]


class AllGatherGemmCase(GemmCase):
    """C = concat(a) @ b."""

    op = "all_gather_gemm"
    gemm = all_gather_gemm.OP

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """C [M, N]."""
        whose = EVERY_RANK if self._shares_b else rank

        def whole() -> list[torch.Tensor]:
            return [torch.cat(list(self._parts(rank, world_size, iteration, rows)))]

        keeps = self.keeps(self.sizes["m"] * self.sizes["n"], rows)
        (c,) = self.kept(whole, (whose, world_size, iteration)) if keeps else whole()
        return {"out": self.biased(c.clone() if keeps else c, rank, iteration)}

    def projected(
        self, rank: int, world_size: int, iteration: int, onto: Onto
    ) -> dict[str, torch.Tensor]:
        """C [M, few]."""
        columns, sources = onto(self.sizes["n"]), range(world_size)
        b = self.wide_b(rank, world_size, iteration) @ columns
        c = torch.cat([self.wide_a(source, world_size, iteration) @ b for source in sources])
        return {"out": self.biased(c, rank, iteration, columns)}

    def _parts(
        self, rank: int, world_size: int, iteration: int, rows: Rows
    ) -> Iterator[torch.Tensor]:
        b = self.wide_b(rank, world_size, iteration)
        for source, at in enumerate(shares_of_rows(self.sizes["m"], world_size, rows)):
            yield self.wide_a(source, world_size, iteration)[at.to(b.device)] @ b


class _SumCase(GemmCase):
    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row
    ) -> dict[str, torch.Tensor]:
        """This rank's rows of sum(a @ b), or all of them."""
        total = self._summed(rank, world_size, iteration, rows, sizes=False)
        total = self.biased(total, rank, iteration)
        given = self.normed_with(iteration)
        if not given:
            return {"out": total}
        if "residual" in given:
            at = own_rows(self.sizes["m"], rank, world_size, False, rows)
            total = total + given["residual"][at.to(self.device)].double()
        out = total / self._size(total) * given["norm_weight"].double()
        return {"out": out, "residual_out": total}

    def _size(self, rows: torch.Tensor) -> torch.Tensor:
        """What a norm divides rows by."""
        return (rows.square().mean(-1, keepdim=True) + self.eps).sqrt()

    @property
    def rounds_partials(self) -> bool:
        """With a norm: the sum may be rounded before the residual is added."""
        return "norm" in self.options

    def tolerances(self) -> dict[str, float]:
        """One rounding of each result: with a norm there are two."""
        names = ("out", "residual_out") if "norm" in self.options else ("out",)
        return dict.fromkeys(names, self.tolerance)

    def partials(self, rank: int, world_size: int, iteration: int) -> dict[str, torch.Tensor]:
        """The same rows of sum(abs(a @ b)); with a norm those of what is added to the new residual, and
        of their shares of the normalised rows."""
        added = self._summed(rank, world_size, iteration, every_row, sizes=True)
        given = self.normed_with(iteration)
        if not given:
            return {"out": added}
        if "residual" in given:
            added = added + given["residual"].double().abs()
        new = self.reference(rank, world_size, iteration)["residual_out"]
        weight = given["norm_weight"].double().abs()
        return {"out": added / self._size(new) * weight, "residual_out": added}

    def _summed(
        self, rank: int, world_size: int, iteration: int, rows: Rows, *, sizes: bool
    ) -> torch.Tensor:
        """The sum of the ranks' products; ``sizes``: of their absolute values."""

        def terms() -> Iterator[torch.Tensor]:
            return self._terms(rank, world_size, iteration, rows)

        def both() -> list[torch.Tensor]:
            total, added = torch.zeros(()), torch.zeros(())
            for term in terms():
                total, added = total + term, added + term.abs()
            return [total, added]

        count = 2 * self.sizes["m"] * self.sizes["n"]
        if not self.keeps(count, rows):
            return sum((term.abs() if sizes else term for term in terms()), torch.zeros(()))
        whose = rank if self.gemm.scatters else EVERY_RANK
        return self.kept(both, (whose, world_size, iteration))[sizes].clone()

    def projected(
        self, rank: int, world_size: int, iteration: int, onto: Onto
    ) -> dict[str, torch.Tensor] | None:
        """The same rows times columns; a norm is not linear."""
        if "norm" in self.options:
            return None
        columns = onto(self.sizes["n"])
        at = own_rows(self.sizes["m"], rank, world_size, self.gemm.scatters, every_row)
        total = torch.zeros((), device=self.device)
        for source in range(world_size):
            a = self.wide_a(source, world_size, iteration)[int(at[0]) : int(at[-1]) + 1]
            total = total + a @ (self.wide_b(source, world_size, iteration) @ columns)
        return {"out": self.biased(total, rank, iteration, columns)}

    def _terms(
        self, rank: int, world_size: int, iteration: int, rows: Rows
    ) -> Iterator[torch.Tensor]:
        at = own_rows(self.sizes["m"], rank, world_size, self.gemm.scatters, rows)
        for source in range(world_size):
            a = self.wide_a(source, world_size, iteration)[at.to(self.device)]
            yield a @ self.wide_b(source, world_size, iteration)


class GemmReduceScatterCase(_SumCase):
    """Rows of sum(a @ b)."""

    op = "gemm_reduce_scatter"
    gemm = gemm_reduce_scatter.OP


class GemmAllReduceCase(_SumCase):
    """sum(a @ b)."""

    op = "gemm_all_reduce"
    gemm = gemm_all_reduce.OP
