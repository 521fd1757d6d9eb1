"""What rank processes on GPUs run of AllReduce: calls on fresh data, judged there in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch

import mkernel
from mkernel.cases import case_of, poison
from mkernel.cases.all_reduce import EPS
from mkernel.cases.base import Case
from mkernel.ops.quantised import quantised_rows
from mkernel.plan.model import DtypeName


@dataclass(frozen=True)
class Rows:
    """Rows to be summed. ``norm``: None, ``alone`` or ``residual``. ``to``: memory of its own, x, or
    symmetric memory."""

    m: int
    n: int
    dtype: DtypeName = "bfloat16"
    norm: str | None = None
    to: str = "own"

    def work(self, seed: int) -> Work:
        """Its tensors on this rank."""
        return Work(self, seed)

    def case(self, seed: int) -> Case:
        """The op's case."""
        options = {} if self.norm is None else {"norm": self.norm}
        return case_of("all_reduce")(
            {"m": self.m, "n": self.n}, self.dtype, self.dtype, "row", seed=seed, options=options,
            device="cuda",
        )  # fmt: skip


@dataclass(frozen=True)
class NormedProduct:
    """GEMM+AllReduce of few rows, whose rows are normalised: ``alone``, or behind a ``residual``."""

    m: int
    n: int
    k: int
    dtype: DtypeName = "bfloat16"
    layout: str = "row"
    norm: str = "residual"
    bias: bool = False
    to: ClassVar[str] = "own"

    def work(self, seed: int) -> Work:
        """Its tensors on this rank."""
        return ProductWork(self, seed)

    def case(self, seed: int) -> Case:
        """The op's case."""
        return case_of("gemm_all_reduce")(
            {"m": self.m, "n": self.n, "k": self.k}, self.dtype, self.dtype, self.layout, seed=seed,
            options={"norm": self.norm, "bias": self.bias, "path": "fused"}, device="cuda",
        )  # fmt: skip


class Work:
    """The tensors of some rows on this rank, refilled in place for every turn."""

    def __init__(self, rows: Rows | NormedProduct, seed: int = 0) -> None:
        world = mkernel.world()
        self.rank, self.world, self.rows = world.rank, world.size, rows
        self.case = rows.case(seed)
        self.given = self.case.inputs(self.rank, self.world, 0)
        self.problem = self  # of whom hopper_ranks asks for rank and world
        shape, dtype = self.case.results(self.world)["out"]
        if rows.to == "x":
            self.out = self.given["x"]
        elif rows.to == "symmetric":
            self.out = mkernel.empty(shape, dtype)
        else:
            self.out = torch.empty(shape, dtype=dtype, device="cuda")

    def fill(self, turn: int) -> None:
        """Fresh inputs where the last ones lie, and a poisoned output."""
        for name, tensor in self.case.inputs(self.rank, self.world, turn).items():
            self.given[name].copy_(tensor)
        if self.rows.to != "x":
            poison.fill(self.out)

    def call(self) -> torch.Tensor:
        """The public op; both results of a norm with a residual, one below the other."""
        given: dict[str, Any] = dict(self.given)
        found = mkernel.all_reduce(given.pop("x"), out=self.out, eps=EPS, **given)
        self.found = found if isinstance(found, torch.Tensor) else torch.cat(found)
        return self.found

    def failure(self, turn: int, result: torch.Tensor | None = None, what: str = "") -> list[str]:
        """Empty where the results, of the last call or another one, are right."""
        result = self.found if result is None else result
        names = ("out", "residual_out") if self.rows.norm == "residual" else ("out",)
        outputs = dict(zip(names, result.chunk(len(names)), strict=True))
        found = self.case.compared(outputs, self.rank, self.world, turn, names)
        limits = self.case.tolerances()
        return [
            f"rank {self.rank} {self.rows} turn {turn} {what}: {name} off by {each.error:.1e}"
            for name, each in found.items()
            if not each.error <= limits[name]
        ]


class ProductWork(Work):
    """The same of a product."""

    def call(self) -> torch.Tensor:
        """The op; both results of a norm with a residual, one below the other."""
        done = self.case.called(self.given, {"out": self.out}, {})
        self.plan = done.plan
        names = ("out", "residual_out") if self.rows.norm == "residual" else ("out",)
        self.found = torch.cat([done.outputs[name] for name in names])
        return self.found


def normed_products() -> list[str]:
    """Failures of GEMM+AllReduce with norms, on either path."""
    world, failures = mkernel.world(), []
    for turn, (m, path, norm) in enumerate(
        product((1, 33, 700), ("fused", "library"), ("alone", "residual"))
    ):
        case = case_of("gemm_all_reduce")(
            {"m": m, "n": 1032, "k": 512}, "bfloat16", "bfloat16", "column",
            options={"norm": norm, "path": path, "bias": turn % 2 == 1}, device="cuda",
        )  # fmt: skip
        outcome = case.run(case.inputs(world.rank, world.size, turn))
        assert outcome.plan.norm is not None
        if outcome.plan.norm.step != "launch":
            failures.append(f"{outcome.plan.norm} of {case}")
        found = case.judge(outcome, world.rank, world.size, turn)
        if not case.passed(found):
            failures.append(f"rank {world.rank} turn {turn} {case}: {found}")
    mkernel.synchronize()
    return failures


def quantised() -> list[str]:
    """Failures of normalised sums in e4m3: the same as of the rows that the op gives without."""
    world, failures = mkernel.world(), []
    for turn, rows in enumerate((Rows(1, 4096, norm="residual"), Rows(700, 1032, norm="residual"))):
        work = rows.work(turn)
        plain, new = mkernel.all_reduce(eps=EPS, **work.given)  # type: ignore[call-overload]
        found, scale, again = mkernel.all_reduce(eps=EPS, quantise="row", **work.given)  # type: ignore[call-overload]
        wanted, scales = quantised_rows(plain.cpu())
        right = (
            torch.equal(found.view(torch.uint8).cpu(), wanted.view(torch.uint8))
            and torch.equal(scale.cpu(), scales)
            and torch.equal(again, new)
        )
        if not right:
            failures.append(f"rank {world.rank} {rows}: other rows in e4m3 than the host's")
    mkernel.synchronize()
    return failures


def same_bits(shapes: Sequence[Rows], seed: int) -> list[int]:
    """Checksums of results, which all ranks must share."""
    sums = []
    for turn, shape in enumerate(shapes):
        work = shape.work(seed)
        for _ in range(3):
            work.fill(turn)
            bits = work.call().view(torch.int16).to(torch.int64)
            weights = torch.arange(1, bits.numel() + 1, device=bits.device).view_as(bits)
            sums.append(int((bits * weights).sum()))
    mkernel.synchronize()
    return sums


def drawn(seed: int, count: int) -> list[Rows]:
    """Any legal rows."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        m = chance.choice((1, 2, 3, 8, 17, 64, 131, 132, 133, 256, 1000, chance.randint(1, 2000)))
        n = 8 * chance.choice((1, 3, 128, 511, 1024, chance.randint(1, 1100)))
        found.append(
            Rows(
                m, n, chance.choice(("bfloat16", "float16")),
                chance.choice((None, "alone", "residual")),
                chance.choice(("own", "x", "symmetric")),
            )
        )  # fmt: skip
    return found
