"""What rank processes on GPUs run of calls with e4m3 operands, beside ``hopper_ranks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from calls import skewed
from hopper_ranks import Shape

import mkernel
from mkernel.backends.accelerators.hopper import few_rows, gemm, parts_exchange, products
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule, ReduceSchedule
from mkernel.backends.contracts.scaled import dequantised
from mkernel.plan.model import LaunchPlan


def planned(shapes: Sequence[Shape]) -> list[str]:
    """The kind of each shape's schedule."""
    found: list[str] = []
    for shape in shapes:
        work = shape.work()
        work.fill(0)
        done = work.case.called(work.given, work.outs, {})
        found.append(done.plan.schedule.kind)
    mkernel.synchronize()
    return found


def fast(shape: Shape) -> list[float]:
    """Errors of calls that may and may not add with fewer bits, and how they differ from torch's
    product of the same rows."""
    found = []
    for quick in (False, True):
        work = shape.work()
        work.fill(1)
        out = work.public(out=work.out, use_fast_accum=quick)
        rows = work.given["a"]
        own = torch._scaled_mm(
            rows, work.given["b"], work.given["a_scale"], work.given["b_scale"].reshape(1, -1),
            out_dtype=out.dtype, use_fast_accum=quick,
        )  # fmt: skip
        first = work.rank * len(rows)
        part = out[first : first + len(rows)].double()
        found += [work.error(1, out), float((part - own.double()).norm() / own.double().norm())]
    mkernel.synchronize()
    return found


def gathered(shape: Shape) -> list[str]:
    """What is wrong of the rows that a call hands out, and of several products of one gather."""
    work, found = shape.work(), []
    world, case = work.world, work.case
    for turn in range(3):
        work.fill(turn)
        given = work.given
        done = case.gemm.call(
            given["a"], given["b"], scaled=case._scaled(given), gathered=True, path=shape.path
        )
        result, whole = done.outputs["out"], done.outputs["gathered"]
        found += work.failure(turn, result, "gathered")
        everyone = [case.inputs(rank, world, turn)["a"] for rank in range(world)]
        if not torch.equal(whole.float(), torch.cat(everyone).float()):
            found.append(f"turn {turn}: other rows were gathered")
    mkernel.synchronize()
    return found


def faulty(fault: str, shape: Shape) -> int:
    """Wrong results of many calls of the library path with a planted fault."""
    factor = products.ScaledFactor
    usual, kept, met = factor.product, {}, set[str]()

    def product(self: Any, a: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        met.add("product")
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
        parts_exchange.Running.wait = lambda *_: met.add("wait")  # type: ignore[method-assign]
    try:
        found = len(skewed([shape], 12, 3))
        assert ("wait" if fault == "no wait" else "product") in met, "the calls took another path"
        return found
    finally:
        factor.product = usual  # type: ignore[method-assign]
        parts_exchange.Running.wait = wait  # type: ignore[method-assign]


def faulty_fused(fault: str, shape: Shape) -> int:
    """The same of the fused path: the scales that its kernel gets are wrong."""
    usual, kept, met = gemm.Operands.of, dict[int, Any](), 0

    def of(call: Any) -> Any:
        nonlocal met
        met += 1
        found = usual(call)
        scale = found.a_scale
        if fault == "scales of other rows":
            scale = scale.roll(1, 0)
        elif fault == "scales of the call before":
            place = call.tensors["out"].data_ptr()
            scale, kept[place] = kept.get(place, scale), scale.clone()
        elif fault == "scales of b left out":
            columns = found.b_scale.clone()
            columns[..., :: columns.shape[-1] // 4] = 1
            return found._replace(b_scale=columns)
        return found._replace(a_scale=scale)

    gemm.Operands.of = of  # type: ignore[method-assign, assignment]
    starter = few_rows.FewRowsExecutor.starter  # native, which asks for no operands
    few_rows.FewRowsExecutor.starter = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        found = len(skewed([shape], 12, 3))
        assert met == 12, f"{met} of 12 calls took this path"
        return found
    finally:
        gemm.Operands.of = usual  # type: ignore[method-assign]
        few_rows.FewRowsExecutor.starter = starter  # type: ignore[method-assign]


def exact(shapes: Sequence[Shape]) -> list[str]:
    """What is wrong of sums of small integers with scales that are powers of two: however few bits
    products are added with, these sums have no more, and every bit of the results is known."""
    found = [text for shape in shapes for text in _exact(shape)]
    mkernel.synchronize()
    return found


def _exact(shape: Shape) -> list[str]:
    work, found = shape.work(), list[str]()
    case, world, rank = work.case, work.world, work.rank
    for turn in range(3):
        work.fill(turn)
        given = [case.inputs(each, world, turn) for each in range(world)]
        for part, tensors in enumerate(given):
            for number, (name, tensor) in enumerate(sorted(tensors.items())):
                chance = torch.Generator("cuda").manual_seed((turn * world + part) * 8 + number)
                scale = name.endswith("scale")
                most = 1 if scale else 3
                drawn = torch.randint(
                    -most, most + 1, tensor.shape, generator=chance, device="cuda"
                )
                tensor.copy_(torch.exp2(drawn.float()) if scale else drawn.float())
        for name, tensor in given[rank].items():
            work.given[name].copy_(tensor)
        plan = case.called(work.given, work.outs, {}).plan
        if plan.path != "fused":
            return [f"{shape} went by the path {plan.path}"]
        if case.gemm.gathers:
            own = {name: given[rank][name] for name in ("b", "b_scale")}
            right = torch.cat([_product({**each, **own}) for each in given])
        else:
            right = _of_plan(plan, [_product(each) for each in given], work.out.dtype)
            if case.gemm.scatters:
                right = right.chunk(world)[rank]
        wrong = int((work.out != right.to(work.out.dtype)).sum())
        if wrong:
            found.append(f"turn {turn}: {wrong} elements of {shape} have other bits")
    return found


def _product(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wide = (dequantised(given[name], given[f"{name}_scale"], torch.float64) for name in ("a", "b"))
    return torch.matmul(*wide)


def _of_plan(plan: LaunchPlan, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' products as a plan's kernel rounds them before they travel."""
    how = plan.schedule
    if isinstance(how, FewRowsSchedule):  # all of them alike
        return sum(part.to(getattr(torch, how.product)).double() for part in parts)
    return _summed(parts, plan.part(ReduceSchedule).rows, dtype)


def _summed(parts: Sequence[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of each owner's ``rows`` rows: what comes from other ranks was rounded."""
    sums = []
    for owner, first in enumerate(range(0, len(parts[0]), rows)):
        here = [part[first : first + rows] for part in parts]
        rounded = [part.to(dtype).double() for at, part in enumerate(here) if at != owner]
        sums.append(sum(rounded, here[owner]))
    return torch.cat(sums)
