"""What rank processes on GPUs run of calls with e4m3 operands, beside ``hopper_ranks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hopper_ranks import LATE_S, Shape, Work, skewed, spin

import mkernel
from mkernel.backends.accelerators.hopper import parts_exchange, products
from mkernel.cases import poison


def planned(shapes: Sequence[Shape]) -> list[str]:
    """The kind of each shape's schedule."""
    found = []
    for shape in shapes:
        work = Work(shape)
        work.fill(0)
        done = work.problem.case.called(work.inputs, {"out": work.out}, {})
        found.append(done.plan.schedule.kind)
    mkernel.synchronize()
    return found


def fast(shape: Shape) -> list[float]:
    """Errors of calls that may and may not add with fewer bits, and how they differ from torch's
    product of the same rows."""
    found = []
    for quick in (False, True):
        work = Work(shape)
        work.fill(1)
        out = work.public(out=work.out, use_fast_accum=quick)
        rows = work.inputs["a"]
        own = torch._scaled_mm(
            rows, work.inputs["b"], work.inputs["a_scale"], work.inputs["b_scale"].reshape(1, -1),
            out_dtype=out.dtype, use_fast_accum=quick,
        )  # fmt: skip
        first = work.problem.rank * len(rows)
        part = out[first : first + len(rows)].double()
        found += [work.error(1), float((part - own.double()).norm() / own.double().norm())]
    mkernel.synchronize()
    return found


def gathered(shape: Shape) -> list[str]:
    """What is wrong of the rows that a call hands out, and of several products of one gather."""
    work, found = Work(shape), []
    world, case = work.problem.world, work.problem.case
    for turn in range(3):
        work.fill(turn)
        given = work.inputs
        result, whole = mkernel.all_gather_gemm(
            given["a"], given["b"], a_scale=given["a_scale"], b_scale=given["b_scale"],
            return_gathered=True,
        )  # fmt: skip
        found += work.failure(turn, result, "gathered")
        everyone = [case.inputs(rank, world, turn)["a"] for rank in range(world)]
        if not torch.equal(whole.float(), torch.cat(everyone).float()):
            found.append(f"turn {turn}: other rows were gathered")
    mkernel.synchronize()
    return found


def faulty(fault: str, shape: Shape) -> int:
    """Wrong results of many calls with a planted fault."""
    factor = products.ScaledFactor
    usual, kept = factor.product, {}

    def product(self: Any, a: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        if fault == "scales of other rows":
            scale = scale.roll(1, 0)
        elif fault == "scales of the call before":
            place = out.data_ptr()
            scale, kept[place] = kept.get(place, scale), scale.clone()
        elif fault == "a block of K without its scale":
            scale = scale.clone()
            scale[:, 0] = 1
        usual(self, a, scale, out)

    wait = parts_exchange.Running.wait
    factor.product = product  # type: ignore[method-assign]
    if fault == "no wait":
        parts_exchange.Running.wait = lambda *_: None  # type: ignore[method-assign]
    try:
        return len(skewed([shape], 12, 3))
    finally:
        factor.product = usual  # type: ignore[method-assign]
        parts_exchange.Running.wait = wait  # type: ignore[method-assign]


def bits(shapes: Sequence[Shape], times: int) -> list[int]:
    """How many different results each shape's calls had on the same inputs, under changing skew."""
    found = []
    for shape in shapes:
        work, seen = Work(shape), list[torch.Tensor]()
        for turn in range(times):
            work.fill(0)
            poison.fill(work.out)
            if turn % work.problem.world == work.problem.rank:
                spin(LATE_S * (turn % 3) / 3)
            work.call()
            if not any(torch.equal(work.out, other) for other in seen):
                seen.append(work.out.clone())
        assert not work.failure(0)
        found.append(len(seen))
    mkernel.synchronize()
    return found
