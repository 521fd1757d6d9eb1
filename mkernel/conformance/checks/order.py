"""Rows come from the rank and the place that they should."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import GEMMS, typical, whole_mnk, with_tensors
from mkernel.conformance.ranks import Judge, describe, each_case, where

_BASE = 100
"""Row numbers are written in two digits of this base, which every dtype holds exactly."""


def rank_order(subject: AcceleratorSubject) -> None:
    """Every row carries its number: it must come out in its place."""
    for world in subject.worlds((1, 3), *([] if subject.quick else [subject.largest()])):
        cases = [
            _numbered(subject, op, world[0] * world[1]) for op in subject.claimed() if op in GEMMS
        ]
        subject.judge(each_case, rank_rows, cases, world=world)


def _numbered(subject: AcceleratorSubject, op: str, size: int) -> Case:
    """A holds row numbers in its first two columns (of the first rank's K), B is a unit matrix."""
    case = typical(subject, op, size, {"n": subject.aligned(8), "k": subject.aligned(8)})
    m, n, k = whole_mnk(case, size)
    rows = torch.arange(m)
    a, b = torch.zeros(m, k), torch.zeros(k, n)
    a[:, 0], a[:, 1] = rows % _BASE, rows // _BASE
    b[:2, :2] = torch.eye(2)
    return with_tensors(case, a=a, b=b)


def rank_rows(case: Case) -> Iterator[str]:
    """Decode the row numbers."""
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
    """The gathered A of AllGather+GEMM is every rank's rows, bit for bit."""
    subject.claimed("all_gather_gemm")
    for world in subject.usual_worlds():
        case = typical(subject, "all_gather_gemm", world[0] * world[1])
        subject.judge(rank_gathered, case, world=world)


def rank_gathered(case: Case) -> list[str]:
    """Three calls with fresh inputs."""
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


CHECKS = (
    Check("rank-order", "rows of every rank come out in their place", rank_order),
    Check("gathered", "the gathered A is exact", gathered),
)
