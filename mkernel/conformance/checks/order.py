"""Checks that rows come from the right rank and the right place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, permutations

import torch

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import GEMMS, typical, whole_mnk, with_tensors
from mkernel.conformance.ranks import Judge, describe, each_case, where
from mkernel.harness.outcome import CheckSkipped
from mkernel.plan.model import DtypeName

_BASE = 100
"""The base in which row numbers are written as two digits, which every dtype holds exactly."""


def rank_order(subject: AcceleratorSubject) -> None:
    """Give every row its number; it must come out in its place."""
    for world in subject.worlds((1, 3), *([] if subject.quick else [subject.largest()])):
        cases = [
            _numbered(subject, op, world[0] * world[1]) for op in subject.claimed() if op in GEMMS
        ]
        subject.judge(each_case, rank_rows, cases, world=world)


def _numbered(subject: AcceleratorSubject, op: str, size: int) -> Case:
    """Make a case whose A holds row numbers in its first two columns (of the first rank's K), and
    whose B is a unit matrix."""
    case = typical(subject, op, size, {"n": subject.aligned(8), "k": subject.aligned(8)})
    m, n, k = whole_mnk(case, size)
    rows = torch.arange(m)
    a, b = torch.zeros(m, k), torch.zeros(k, n)
    a[:, 0], a[:, 1] = rows % _BASE, rows // _BASE
    b[:2, :2] = torch.eye(2)
    return with_tensors(case, a=a, b=b)


def rank_rows(case: Case) -> Iterator[str]:
    """Decode the row numbers, and yield those that are not in their place."""
    got = case.run(Judge(case).inputs(0)).outputs["out"].cpu().double()
    numbers = got[:, 0] + _BASE * got[:, 1]
    first = mkernel.world().rank * len(got) if case.op == "gemm_reduce_scatter" else 0
    wanted = torch.arange(first, first + len(got), dtype=torch.float64)
    wrong = (numbers != wanted).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        yield (
            f"{describe(case)}, {where()}: {len(wrong)} rows are not in their place; row {at} "
            f"holds number {numbers[at]:g} instead of {wanted[at]:g}"
        )


def gathered(subject: AcceleratorSubject) -> None:
    """Check that the gathered A of AllGather+GEMM is every rank's rows, bit for bit."""
    subject.claimed("all_gather_gemm")
    for world in subject.usual_worlds():
        case = typical(subject, "all_gather_gemm", world[0] * world[1])
        subject.judge(rank_gathered, case, world=world)


def rank_gathered(case: Case) -> list[str]:
    """Make three calls with fresh inputs, and compare the gathered A with the rows of all ranks."""
    world, judge = mkernel.world(), Judge(case)
    found = []
    for iteration in range(3):
        mine = judge.inputs(iteration)
        parts = [case.inputs(rank, world.size, iteration)["a"] for rank in range(world.size)]
        _, whole = mkernel.all_gather_gemm(
            mine["a"], mine["b"], out_dtype=getattr(torch, case.out_dtype), return_gathered=True
        )
        if not torch.equal(whole.cpu(), torch.cat(parts)):
            found.append(f"{describe(case)}, {where()}, call {iteration}: the gathered A differs")
    return found


def sum_order(subject: AcceleratorSubject) -> None:
    """Check sums over ranks in which every order of three terms gives other bits."""
    if not subject.capabilities.sums_in_rank_order:
        raise CheckSkipped("sums_in_rank_order is not claimed")
    ops = subject.claimed("gemm_reduce_scatter", "gemm_all_reduce", "all_reduce")
    pairs = [pair for pair in subject.capabilities.dtype_pairs() if "float64" not in pair]
    for world in subject.worlds((1, 3), *([] if subject.quick else [(1, 4)])):
        if world[1] < 3:
            raise CheckSkipped("needs 3 devices: two terms have the same sum in either order")
        cases = [
            _cancelling_between_ranks(subject, op, world[1], dtype, out_dtype)
            for op in ops
            for dtype, out_dtype in pairs
        ]
        subject.judge(each_case, rank_sums, cases, world=world)


_LARGE = 2.0**15
_SMALL = 2.0**-12
"""The unit of small terms. Multiples of it below 32 are lost beside ``_LARGE`` in float32; all
dtypes hold both."""


def _cancelling_between_ranks(
    subject: AcceleratorSubject, op: str, ranks: int, dtype: DtypeName, out_dtype: DtypeName
) -> Case:
    """Make a case whose rows each have a large term on one rank, its negative on another, and small
    terms on the others."""
    sizes = {"n": subject.aligned(8), **({} if op == "all_reduce" else {"k": subject.aligned(8)})}
    case = typical(subject, op, ranks, sizes, dtype=dtype, out_dtype=out_dtype)
    m, n = case.sizes["m"], case.sizes["n"]
    random = torch.Generator().manual_seed(subject.seed)
    terms = _SMALL * (2 * torch.randint(4, 16, (ranks, m), generator=random) + 1)
    for row, (first, second) in zip(range(m), cycle(permutations(range(ranks), 2)), strict=False):
        terms[first, row], terms[second, row] = _LARGE, -_LARGE
    signs = 1.0 - 2 * (torch.arange(n) % 2)
    if op == "all_reduce":
        return with_tensors(case, x=(terms[:, :, None] * signs).flatten(0, 1))
    k = case.sizes["k"]
    a, b = torch.zeros(m, ranks * k), torch.zeros(ranks * k, n)
    a[:, ::k], b[::k] = terms.T, signs
    return with_tensors(case, a=a, b=b)


def rank_sums(case: Case) -> Iterator[str]:
    """Compare bits with those of the float32 sum in the order of ranks."""
    world = mkernel.world()
    whole = case.options["tensors"]
    got = case.run(Judge(case).inputs(0)).outputs["out"].cpu()
    if case.op == "all_reduce":
        terms = whole["x"].float().chunk(world.size)
    else:
        parts = zip(whole["a"].chunk(world.size, 1), whole["b"].chunk(world.size), strict=True)
        terms = tuple(a.float() @ b.float() for a, b in parts)
    wanted = terms[0].clone()
    for term in terms[1:]:
        wanted += term
    if case.op == "gemm_reduce_scatter":
        wanted = wanted.chunk(world.size)[world.rank]
    wrong = int((got != wanted.to(got.dtype)).sum())
    if wrong:
        yield (
            f"{describe(case)}, {where()}: {wrong} of {got.numel()} elements are not the float32 sum "
            "in the order of ranks: something else is added first, or narrower"
        )


CHECKS = (
    Check("rank-order", "rows of every rank come out in their place", rank_order),
    Check("sum-order", "sums are those of float32 in the order of ranks, bit for bit", sum_order),
    Check("gathered", "the gathered A is exact", gathered),
)
